"""The child process: renders chat templates and tries tokenizer files, a JSON request and a JSON answer a line.

Runs on its own, without this package, so that it starts quickly. Its memory is bounded from the start; the parent
bounds its time (process.py)."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

MAX_CHARACTERS = 4_000_000  # of a rendered conversation
_TEXT = "Hello, world! 123 naïve 世界\n\tx = [1]\x00"


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateSyntaxError(message, 0)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))  # marks for training


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """A conversation as the text that the model was trained on."""
    from jinja2 import TemplateSyntaxError

    try:
        compiled = _compiled(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"the model's chat template can't be read: {error}") from None
    try:
        text: str = compiled.render(messages=messages, tools=tools or None, add_generation_prompt=True, **special)
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"the model's chat template refuses this conversation: {why}") from None
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"the model's chat template makes {len(text):,} characters of it; {MAX_CHARACTERS:,} are allowed"
        )
    return text


def try_tokenizer(path: str) -> None:
    """Load a tokenizer file, then encode and decode a text: what makes the library panic or abort, does so here."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for special in (False, True):
        ids = tokenizer.encode(_TEXT, add_special_tokens=special).ids
        tokenizer.decode(ids[:1000], skip_special_tokens=special)


ACTIONS: dict[str, Callable[..., Any]] = {"render": render, "try_tokenizer": try_tokenizer}


def serve(megabytes: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": ACTIONS[request["action"]](*request["arguments"])}
        except (KeyboardInterrupt, SystemExit):
            raise
        except MemoryError:
            answer = {"error": f"it needs more than {megabytes} MB of memory"}
        except BaseException as error:  # the tokenizer library's panics are no Exception
            answer = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
