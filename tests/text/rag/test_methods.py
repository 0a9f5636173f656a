"""Speculative RAG (document subsets, answer probabilities, the best draft), the benchmark of all methods, documents and
questions from files, and the command."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.commands import rag as rag_app
from outrider.core.assets import archives
from outrider.core.distribution import Sampling
from outrider.core.errors import InvalidOption
from outrider.text import load
from outrider.text.model import TextModel
from outrider.text.rag import specrag
from outrider.text.rag.documents import DocumentError, Question, documents, passages, questions
from outrider.text.rag.methods import ANSWER_METHODS, METHODS, Answerer, AnswerMethod, RagBench, report
from outrider.text.rag.retrievers import BM25, Dense
from tests.text.rag.test_ralm import PASSAGES, embed
from tests.text.tiny import write

ASKED = [Question("1", "the cat sat", ("cat",)), Question("2", "seven wizards", ("violins",))]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load(write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048), dtype="float32")


def test_probabilities_equal_those_of_reading_token_by_token(lm: TextModel) -> None:
    prompts, answers = [[5, 6, 7], [9, 8]], [[40, 41, 42], [50]]
    result = specrag._means(lm.target(), prompts, answers)
    for prompt, answer, mean in zip(prompts, answers, result, strict=True):
        chances, before = [], list(prompt)
        for token in answer:
            target = lm.target()
            target.begin([before], Sampling(), frozenset())
            from outrider.core.draft import Draft

            distribution = torch.softmax(target.score(Draft.empty(1)).logits()[0, 0].double(), -1)
            chances.append(float(distribution[token]))
            before.append(token)
        assert mean == pytest.approx(float(np.exp(np.mean(np.log(chances)))), rel=1e-4)
    assert specrag._means(lm.target(), [[5]], [[]]) == [0.0]


def test_every_draft_reads_one_document_of_each_cluster() -> None:
    near = np.array([[1, 0.01 * n] for n in range(4)] + [[0.01 * n, 1] for n in range(4)], np.float32)
    parts = specrag.subsets(near, each=2, count=5, seed=3)
    assert len(parts) == 5 and len({tuple(part) for part in parts}) == 5
    assert all(sorted(one // 4 for one in part) == [0, 1] for part in parts)
    assert parts == specrag.subsets(near, each=2, count=5, seed=3)
    assert len(specrag.subsets(near[:2], each=2, count=5)) == 1  # there is only one choice


def test_the_draft_with_the_highest_score_is_the_answer(lm: TextModel) -> None:
    store = Dense(PASSAGES, embed=embed)
    reply = specrag.speculative(lm, lm, store, embed, "seven wizards", documents=6, drafts=3, max_new_tokens=6)
    assert reply.text == max(reply.drafts, key=lambda one: one.score).answer
    assert 1 < len(reply.drafts) <= 3 and all(set(draft.documents) <= set(reply.documents) for draft in reply.drafts)
    for one in reply.drafts:
        assert one.score == one.drafter_probability * one.target_probability * one.support_probability
        assert 0 < one.score < 1
    again = specrag.speculative(lm, lm, store, embed, "seven wizards", documents=6, drafts=3, max_new_tokens=6)
    assert again.drafts == reply.drafts
    plain = specrag.plain(lm, store, "seven wizards", documents=6, max_new_tokens=6)
    assert plain.documents == reply.documents and plain.wrote == len(plain.tokens) <= 6
    assert reply.wrote == 0 and reply.read > 0
    with pytest.raises(InvalidOption, match="between 1 and all"):
        specrag.speculative(lm, lm, store, embed, "x", documents=1, each=2)


def test_methods_are_measured_in_turns(lm: TextModel) -> None:
    measured = RagBench(Answerer(lm, Dense(PASSAGES, embed=embed), max_new_tokens=8), ASKED)
    assert len(list(measured.run())) == len(ASKED) * len(ANSWER_METHODS)
    result = report([measured], {"documents": "made"})
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [way.name for way in ANSWER_METHODS] and len(rows) == 7
    for name, row in rows.items():
        assert row["questions"] == 2
        assert row["identical"] == (2 if name.startswith("ralm-spec") else None)
        assert (row["speedup"] is None) == (name in ("iterative", "rag"))
    assert rows["rag"]["read"] > rows["rag"]["wrote"] > 0
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    with pytest.raises(InvalidOption, match="method"):
        AnswerMethod(method="guessing")
    assert {way.method for way in ANSWER_METHODS} == set(METHODS)


def test_questions_and_passages_come_from_files(tmp_path: Path) -> None:
    ours = questions()
    assert len(ours) == 50 and len({our.text for our in ours}) == 50
    assert ours[0].answered_by("It is canberra.") and not ours[0].answered_by("Canberrans")
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"question": "Who?", "answers": ["A. B."]}\n\n')
    assert questions(good)[0].answered_by("by A. B., it seems")
    bad.write_text('{"question": "Who?", "answers": []}')
    for path, words in ((bad, "line 1: expected"), (tmp_path / "none", "can't be read")):
        with pytest.raises(DocumentError, match=words):
            questions(path)
    text = "One two three. Four five six seven. Eight nine. " * 4
    parts = passages(text, 5)
    assert " ".join(parts).split() == text.split() and all(5 <= len(part.split()) < 10 for part in parts[:-1])
    assert passages("word " * 23, 5)[0].split() == ["word"] * 5
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("One thing. " * 200)
    assert len(documents(str(tmp_path / "notes"))) == 5
    with pytest.raises(InvalidOption, match="documents 'nowhere'"):
        documents("nowhere")
    (tmp_path / "notes" / "a.txt").write_text("One thing.")
    with pytest.raises(DocumentError, match="1 passages"):
        documents(str(tmp_path / "notes"))


def test_named_things_are_the_instances_of_wordnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "  1 This is a licence",
        '1 15 n 02 Canberra 0 Australian_capital 0 001 @i 2 n 0000 | the capital of Australia; "we saw Canberra"  ',
        "2 15 n 01 city 0 001 @ 3 n 0000 | a large town  ",
        "3 18 n 01 Nile 0 001 @i 2 n 0000 | the longest river  ",
    )
    text = "\n".join(lines).encode()
    with tarfile.open(tmp_path / "wordnet.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("package/dict/data.noun")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    monkeypatch.setattr(archives, "fetch", lambda name, table: tmp_path)
    assert documents("named-things") == [
        "Canberra, Australian capital: the capital of Australia",
        "Nile: the longest river",
    ]


def test_the_command_answers_and_measures(lm: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rag_app, "_ready", lambda *_: (lm, lm, BM25(PASSAGES)))
    output = CliRunner().invoke(
        cli, ["rag", "the cat and the fox", "--max-new-tokens", "6", "--speculation-stride", "2"]
    )
    assert output.exit_code == 0, output.output
    assert "retriever calls" in output.stderr and "speculated retrievals right" in output.stderr
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.json"
    asked.write_text('{"question": "the cat", "answers": ["cat"]}\n')
    words = ["bench", "rag", "--questions", str(asked), "--retrievers", "bm25", "--methods", "iterative,ralm-spec"]
    page = tmp_path / "PAGE.md"
    output = CliRunner().invoke(
        cli, [*words, "--max-new-tokens", "6", "--no-timing", "--json", str(out), "--page", str(page)]
    )
    assert output.exit_code == 0, output.output
    result = json.loads(out.read_text())
    assert [row["identical"] for row in result["rows"]] == [None, 1, 1, 1, 1]
    assert "seconds" not in output.stdout and "ralm-spec, 3 ahead" in output.stdout
    assert "| ralm-spec, 3 ahead | bm25 | 1 | 1 |" in page.read_text()
    assert "--max-new-tokens 6 " in page.read_text() and "--retrievers bm25" in page.read_text()
    output = CliRunner().invoke(cli, ["bench", "rag", "--methods", "guessing"])
    assert isinstance(output.exception, InvalidOption)
