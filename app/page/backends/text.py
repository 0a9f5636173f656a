"""The page's backend for text with our language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from outrider.app.page import validate
from outrider.app.page.backends.interface import Choice, Knob, LazyModel, ModelSpec, RunSettings
from outrider.app.page.recordings import Modality, Recording, tokens_in
from outrider.app.viz import reading
from outrider.core.methods import AUTO
from outrider.core.trace import Step
from outrider.text import TextModel, load
from outrider.text.resolve_drafter import listed_drafters, rules

MODEL = "smollm2-135m"
_ALTERNATIVES = 3  # most likely tokens recorded at each position


class TextBackend:
    """Text by SmolLM2-135M-Instruct, by another model (`spec`), or by the model that `load_` returns."""

    name: Modality = "text"
    title = "Text"
    prompt_label = "prompt"
    lessons: Mapping[str, str] = {
        "Writes code": "Write a Python class Point with x and y, add, subtract and multiply methods.",
        "Copies its input": "Copy this list exactly: apple, banana, cherry, date, elderberry, fig, grape, honeydew, "
        "kiwi, lemon, mango, nectarine, orange, papaya.",
        "Counts": "List the numbers from one to thirty in words.",
        "Answers from a text": "Answer from this text. Text: The lighthouse at Cape Byron was built in 1901 and stands "
        "22 metres tall. Question: Tell me all about the lighthouse at Cape Byron.",
        "Explains": "Why is the sky blue?",
        "Surprises the drafter": "Write a haiku about a fast horse.",
    }
    examples: tuple[str, ...] = tuple(lessons.values())
    default_temperature: float = 0.0
    default_drafter = AUTO.name
    defaults: Modality | None = name
    is_server = False
    extra_options: tuple[Knob | Choice, ...] = (
        Knob("max_new_tokens", 1, validate.TOKENS, 1, 96),
        Choice("response_format", ("text", "json_object"), "text"),
    )

    def __init__(
        self,
        load_: Callable[[], TextModel] | None = None,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        spec: ModelSpec | None = None,
    ) -> None:
        """`spec` may name a draft head in its options."""
        self.device = device
        self._spec, self._model = spec, MODEL if load_ is None else ""  # the name that trained heads are listed for
        if spec is not None:
            self._lazy = LazyModel(lambda: spec.load(load, device, dtype), spec.model)
        else:
            placeholder = f"SmolLM2-135M-Instruct, {dtype}, {device}" if load_ is None else "a language model"
            self._lazy = LazyModel(load_ or (lambda: load(MODEL, device=device, dtype=dtype)), placeholder)

    @property
    def description(self) -> str:
        if not self.loaded:
            return self._lazy.description
        lm = self.load()
        return f"{lm.name}, {lm.dtype}, {lm.device}"

    @property
    def loaded(self) -> bool:
        return self._lazy.loaded

    def load(self) -> TextModel:
        return self._lazy.get()

    def drafters(self) -> list[str]:
        return (listed_drafters(self._model) if self._spec is None else self.load().drafters).ready

    def rules(self) -> list[str]:
        return rules()

    def begin(self, settings: RunSettings) -> TextGeneration:
        return TextGeneration(self.load(), settings)


class TextGeneration:
    """A text in progress."""

    def __init__(self, lm: TextModel, settings: RunSettings) -> None:
        self._lm, self._settings = lm, settings
        self._steps: list[Step] = []
        self._html: list[str] = []
        self._stream = lm.stream(settings.prompt, **settings.options(), **settings.extra, alternatives=_ALTERNATIVES)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        step = next(self._stream).step
        self._steps.append(step)
        return step

    def close(self) -> None:
        self._stream.close()

    def preview(self) -> str:
        for step in self._steps[len(self._html) :]:
            self._html.append(reading.preview(step, self._lm.tokens.piece))
        return reading.running_answer(self._html)

    def recording(self) -> Recording:
        trace = self._stream.trace
        names = {str(token): self._lm.tokens.piece(token)[:200] for token in sorted(tokens_in(trace))}
        return Recording("text", trace, self._settings.prompt, names)
