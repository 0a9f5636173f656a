"""The recipe that trains each drafter's weights, and the recipes whose weights are missing.

Imports nothing heavy at module level.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.app.report.sections import GPU_REPORT


def untrained(modality: str, recipes: Sequence[str]) -> list[str]:
    """The recipes whose weights are missing: neither bundled nor trained on this machine."""
    if modality in ("text", GPU_REPORT):
        from outrider.text.recipes import find

        return [recipe for recipe in recipes if find("smollm2-135m", recipe) is None]
    from outrider.core.training.recipes import NoWeights
    from outrider.image import recipes as images
    from outrider.speech import recipes as speeches

    def find_weights(recipe: str) -> object:
        if recipe == "image-tokenizer":
            return images.tokenizer_folder()
        return images.weights(recipe) if modality == "image" else speeches.weights(recipe)

    missing = []
    for recipe in recipes:
        try:
            find_weights(recipe)
        except NoWeights:
            missing.append(recipe)
    return missing


def recipe_of(modality: str, drafter: str) -> str:
    """The name of the recipe that trains a drafter's weights; empty if it needs none."""
    from outrider.core.methods import DRAFTERS

    if drafter not in DRAFTERS:
        return ""
    method = DRAFTERS[drafter]
    if modality in ("text", GPU_REPORT):
        from outrider.text.recipes import RECIPES

        same_head = [recipe.name for recipe in RECIPES.values() if recipe.kind is method.draft_head]
        return drafter if drafter in RECIPES else same_head[0] if same_head else ""
    if "model" in method.needs:
        return f"{modality}-draft"
    if method.draft_head is None:
        return ""
    if modality == "speech":
        return f"speech-{drafter}"
    from outrider.image.recipes import RECIPES as OF_IMAGE

    return next((recipe.name for recipe in OF_IMAGE.values() if recipe.kind is method.draft_head), "")
