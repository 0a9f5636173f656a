"""The child process: renders chat templates and tries tokenizer files, a JSON request and a JSON answer a line.

Runs on its own, without this package, so that it starts quickly. Its memory is bounded from the start; the parent
bounds its time (process.py)."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
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

    _try(Tokenizer.from_file(path))


def _try(tokenizer: Any) -> None:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for special in (False, True):
        ids = tokenizer.encode(_TEXT, add_special_tokens=special).ids
        tokenizer.decode(ids[:1000], skip_special_tokens=special)


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def _hide(hidden: str) -> None:
    """Let transformers not find it: importing torch takes seconds and 400 MB, and no tokenizer needs it."""
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == hidden else found(name, package)


def convert_tokenizer(folder: str) -> dict[str, Any]:
    """A folder without tokenizer.json, as transformers reads it: the file's text, the template and special tokens."""
    _hide("torch")
    from transformers import AutoTokenizer

    source = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer = getattr(source, "backend_tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"a {type(source).__name__} has no fast version; give a tokenizer that has a tokenizer.json")
    _try(tokenizer)
    template = getattr(source, "chat_template", None)
    if isinstance(template, dict):  # several named templates
        template = template.get("default")
    special = {name: str(text) for name in _SPECIAL if (text := getattr(source, name, None))}
    return {"tokenizer": tokenizer.to_str(), "template": template, "special": special}


ACTIONS: dict[str, Callable[..., Any]] = {
    "render": render,
    "try_tokenizer": try_tokenizer,
    "convert_tokenizer": convert_tokenizer,
}


def serve(megabytes: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
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
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
