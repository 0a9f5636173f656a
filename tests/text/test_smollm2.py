"""The real default model, downloaded on first use: its answers, its logits, and the examples in docstrings."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import outrider.text.loading
import outrider.text.model
import outrider.text.transformers_generate
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.text import TextModel, custom_generate
from outrider.text.bigrams import bigrams

pytestmark = pytest.mark.slow
SUMMARY = (
    "Repeat this text word for word, then stop: The mill by the river was built in 1871. It ground wheat for three "
    "villages until the railway came, and then it ground wheat for nobody."
)


def test_it_answers_simple_questions(smollm2: TextModel) -> None:
    out = smollm2.generate("What is the capital of France?", max_new_tokens=30)
    assert "Paris" in out.text
    assert out.finish_reason == "stop"
    assert smollm2.end == (2,)
    assert smollm2.tokens.template is not None


@pytest.mark.parametrize("drafter", ["auto", "prompt-lookup", "jacobi"])
def test_drafting_changes_no_token(drafter: str, smollm2: TextModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 48}
    plain = smollm2.generate(SUMMARY, drafter=None, **options)
    result = smollm2.generate(SUMMARY, drafter=drafter, **options)
    assert result.tokens == plain.tokens
    if drafter == "prompt-lookup":
        assert result.trace.summary().tokens_per_pass > 1.5


def test_the_next_turn_reuses_the_cache(smollm2: TextModel) -> None:
    talk = [{"role": "user", "content": "Name a fruit in one word."}]
    first = smollm2.generate(talk, max_new_tokens=16)
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Another one?"}]
    second = smollm2.generate(talk, max_new_tokens=16)
    assert second.trace.options["reused"] == len(first.prompt) + len(first.tokens)
    assert second.tokens == smollm2.generate([talk], max_new_tokens=16)[0].tokens


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_our_logits_equal_those_of_transformers(smollm2: TextModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from outrider.core.distribution import Sampling
    from outrider.core.draft import Draft
    from outrider.core.tree import Tree

    theirs = AutoModelForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32).eval()
    ids = smollm2.encode(SUMMARY)
    assert (
        ids
        == AutoTokenizer.from_pretrained(smollm2.folder).apply_chat_template(
            [{"role": "user", "content": SUMMARY}], add_generation_prompt=True
        )["input_ids"]
    ), "the template and the tokenizer agree too"
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0, 4:]
    target = smollm2.target()
    target.begin([ids[:5]], Sampling(), frozenset())
    rest = torch.tensor([ids[5:]])
    draft = Draft.guess(rest, Tree.chain(rest.shape[1]), torch.ones_like(rest, dtype=torch.bool))
    result = target.score(draft).logits()[0]
    assert float((result - wanted).abs().max()) < 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "module",
    [outrider.text.loading, outrider.text.model, outrider.text.transformers_generate],
    ids=lambda one: one.__name__,
)
def test_the_examples_in_docstrings_are_true(module: Any, smollm2: TextModel) -> None:
    names: dict[str, Any] = {"load": outrider.text.load, "custom_generate": custom_generate}
    if module is outrider.text.transformers_generate:
        from transformers import AutoModelForCausalLM

        names["model"] = AutoModelForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32)
        names["ids"] = torch.tensor([smollm2.encode("Name a colour.")])
    tests = [one for one in doctest.DocTestFinder().find(module, extraglobs=names) if one.examples]
    assert tests
    for one in tests:
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(one).failed == 0


def test_it_loads_without_transformers(smollm2: TextModel) -> None:
    code = (
        "import sys\nfrom outrider import text\nlm = text.load('smollm2-135m')\n"
        "out = lm.generate('Hi', drafter=None, max_new_tokens=2)\n"
        "assert len(out.tokens) == 2\nprint(*sys.modules, sep='\\n')"
    )
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # several threads are slow on a busy machine
    child = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=alone)
    assert not {"transformers", "gguf", "huggingface_hub"} & set(child.stdout.split())


def test_the_included_bigrams_are_those_of_the_model(smollm2: TextModel) -> None:
    table = bigrams(smollm2)
    assert table.shape == (smollm2.target().vocabulary, 8)
    some = torch.tensor([[260], [2000], [11_000], [49_000]])
    target = smollm2.target()
    for token in some.flatten().tolist():
        target.begin([[0, token]], Sampling(), frozenset())  # after the start token
        likeliest = target.score(Draft.empty(1)).logits()[0, 0].topk(8).indices.tolist()
        assert len(set(likeliest) & set(table[token].tolist())) >= 6, "worked out in 16 bits, compared in 32"
