"""Which weights a drafter needs, which recipe trains them, and which are there. Imports nothing heavy by itself."""

from __future__ import annotations

from collections.abc import Sequence


def untrained(modality: str, recipes: Sequence[str]) -> list[str]:
    """Which of these recipes' weights are not there: neither shipped nor trained here."""
    if modality == "text":
        from outrider.text.recipes import find

        return [one for one in recipes if find("smollm2-135m", one) is None]
    from outrider.core.training.recipes import NoWeights
    from outrider.image import recipes as images
    from outrider.speech import recipes as speeches

    def there(one: str) -> object:
        if one == "image-tokenizer":
            return images.tokenizer_folder()
        return images.weights(one) if modality == "image" else speeches.weights(one)

    found = []
    for one in recipes:
        try:
            there(one)
        except NoWeights:
            found.append(one)
    return found


def recipe_of(modality: str, drafter: str) -> str:
    """What trains a drafter: the name of a recipe, or nothing where it needs none."""
    from outrider.core.methods import DRAFTERS

    if drafter not in DRAFTERS:
        return ""
    method = DRAFTERS[drafter]
    if modality == "text":
        from outrider.text.recipes import RECIPES

        alike = [one.name for one in RECIPES.values() if one.kind is method.draft_head]
        return drafter if drafter in RECIPES else alike[0] if alike else ""
    if "model" in method.needs:
        return f"{modality}-draft"
    if method.draft_head is None:
        return ""
    if modality == "speech":
        return f"speech-{drafter}"
    from outrider.image.recipes import RECIPES as OF_IMAGE

    return next((one.name for one in OF_IMAGE.values() if one.kind is method.draft_head), "")
