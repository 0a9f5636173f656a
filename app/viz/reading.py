"""The answer of a trace as clean text that can be copied, with who wrote each token and the rejected guesses beside it.

One drawing serves three views, which style sheets choose: the text alone, the tokens in two colours, and with guesses.
Guesses and chat markers cannot be selected, so they are never copied. Pure functions; independent of models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from outrider.app.viz.svg import Drawing, safe
from outrider.app.viz.token_styles import Kind, nodes_of
from outrider.app.viz.trace_html import Name, numbered
from outrider.core.trace import Step

_ROOM = 3_000_000  # characters of HTML after which no more tokens are drawn
_MARKER = re.compile(r"\s*(<\|[^|<>]*\|>|</?s>|<(bos|eos|pad|end_of_turn|start_of_turn)>)\s*")
_CLASSES: dict[Kind, str] = {
    "drafted": "or-d",
    "relaxed": "or-d or-r",
    "resampled": "or-w",
    "bonus": "or-w",
    "rejected": "or-x",
}


def answer(
    steps: Sequence[Step],
    name: Name = numbered,
    *,
    clock: Sequence[float] | None = None,
    guesses: bool = True,
    label: str = "the answer; arrow keys choose a token, Enter explains it",
) -> Drawing:
    """The text of the steps. With `clock`, the seconds at which steps were done, for a replay. Without `guesses` its
    tokens cannot be explained, as in plain decoding. Tokens beyond about 3 MB of HTML are counted, not drawn."""
    parts, room, drawn = list[str](), _ROOM, 0
    for place, step in enumerate(steps):
        at = None if clock is None else clock[place]
        for kind, html in _step(step, name, place, at, guesses=guesses, explained=guesses):
            room, drawn = room - len(html), drawn + (kind != "rejected")
            parts.append(html)
            if room < 0:
                break
        if room < 0:
            parts.append(f"… {sum(len(step.emitted) for step in steps) - drawn} more tokens, not shown")
            break
    label = label if guesses else "plain decoding"
    focus = f' tabindex="0" role="group" aria-label="{safe(label)}"'
    return Drawing(f'<div class="or-tokens"{focus}>{"".join(parts)}</div>')


def preview(step: Step, name: Name = numbered) -> str:
    """The tokens of one step of a run in progress, for `running_answer`."""
    return "".join(html for _, html in _step(step, name, 0, None, guesses=True, explained=False))


def running_answer(parts: Sequence[str]) -> Drawing:
    """The answer so far, of the HTML of its steps."""
    focus = 'tabindex="0" role="group" aria-label="the answer so far"'
    return Drawing(f'<div class="or-lane"><div class="or-tokens" {focus}>{"".join(parts)}</div></div>')


def _step(
    step: Step, name: Name, place: int, at: float | None, *, guesses: bool, explained: bool
) -> Iterator[tuple[Kind, str]]:
    data = f' data-at="{at:.3f}"' if at is not None else ""
    hidden = " or-later" if at is not None else ""
    for key, kind, token in _tokens(step):
        if kind != "rejected" or guesses:
            own = f"{data} data-s={place} data-c={key}" if explained else data
            yield kind, _token(kind, name(token), own, hidden)


def _tokens(step: Step) -> Iterator[tuple[str, Kind, int]]:
    """The tokens of a step, each with its key: `o` and the index of a committed token, or `g` and the draft's node."""
    for kind, token, node, level in nodes_of(step):
        yield (f"g{node}" if kind == "rejected" else f"o{level}"), kind, token


def _token(kind: Kind, text: str, data: str, hidden: str) -> str:
    tag = "s" if kind == "rejected" else "span"
    marker = " or-m" if _MARKER.fullmatch(text) else ""
    inner = written(text) if kind != "rejected" else safe(text)
    return f'<{tag} class="or-t {_CLASSES[kind]}{marker}{hidden}"{data}>{inner}</{tag}>'


def written(text: str) -> str:
    """A token's text for reading: line ends and tabs stay, other invisible characters become visible."""
    lines = ["\t".join(safe(part) for part in line.split("\t")) for line in text.split("\n")]
    return '<i class="or-nl"></i>\n'.join(lines)


def clean(text: str) -> bool:
    """Whether a token belongs to the answer: it is not a chat marker."""
    return not _MARKER.fullmatch(text)
