"""The text benchmark on a tiny random model: prompts, the check of near-ties, looping outputs, the report."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.app.bench.tables import columns, name_of
from outrider.core.assets.store import ASSETS
from outrider.core.bench.runner import Bench, Contender, Item, Outcome
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.testing.table_target import TableTarget
from outrider.text import TextModel
from outrider.text.bench.comparison import Judge, compare, distinct, gaps, loops
from outrider.text.bench.run import (
    PromptsError,
    Settings,
    calibration_prompts,
    contenders,
    costs,
    load_prompts,
    report,
    write,
)

SMALL = Config(vocabulary=61, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


def lines(path: Path, *found: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in found))
    return path


def test_bundled_prompts_cover_every_task() -> None:
    items = load_prompts()
    tasks = Counter(item.task for item in items)
    assert set(tasks) == {"chat", "code", "summary", "translation", "maths", "extraction", "editing"}
    assert min(tasks.values()) >= 6
    assert len({item.id for item in items}) == len(items)
    assert len({item.content for item in items}) == len(items)
    assert all(150 <= len(item.content.split("\n\n", 1)[1].split()) <= 300 for item in items if item.task == "summary")


def test_a_limit_takes_from_every_task_in_turn() -> None:
    items = load_prompts(limit=9)
    assert len({item.task for item in items[:7]}) == 7
    assert [item.id for item in items[:7]] == [f"{item.task}-1" for item in items[:7]]
    assert [item.id for item in items[7:]] == ["chat-2", "code-2"]


USER = {"role": "user", "content": "Written."}
UNFILLED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"  # as SPEED-Bench ships


def test_prompts_from_files(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        "",
        {"prompt": "Only this.", "task": "chat"},
        {"id": 81, "prompt": "Another."},
        {"question_id": "5", "category": "coding", "messages": [{"role": "system", "content": "S."}, USER]},
    )
    items = load_prompts(path)
    assert [item.content for item in items] == ["First.", "Only this.", "Another.", "Written."]
    assert [item.task for item in items] == ["writing", "chat", "all", "coding"]
    assert len({item.id for item in items}) == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is a list"),
        ({"turns": []}, "no text in prompt, turns or messages"),
        ({"turns": [3]}, "no text in prompt, turns or messages"),
        ({"prompt": "  "}, "no text in prompt, turns or messages"),
        ({"turns": [UNFILLED]}, "is a placeholder"),
        ("", "contains no prompts"),
    ],
)
def test_an_invalid_line_raises_with_its_number(line: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=words):
        load_prompts(lines(tmp_path / "p.jsonl", line))


def test_a_missing_or_binary_file_raises(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="there is no such file"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptsError, match="UTF-8"):
        load_prompts(tmp_path / "b.jsonl")
    with pytest.raises(InvalidOption, match="limit is 0"):
        load_prompts(limit=0)


def test_looping_of_hand_made_outputs() -> None:
    assert distinct([1, 2, 3]) == 1.0, "too short to say"
    assert distinct([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5
    assert distinct([1] * 8) == 1 / 5
    assert not loops([1, 2, 3, 4, 1, 2, 3, 4])
    assert loops([1, 2, 3, 4] * 3)
    assert not loops([])


@pytest.mark.parametrize("kind", ["decoder", "table"])
def test_the_gap_check_finds_only_planted_tokens(kind: str) -> None:
    from outrider.core.decode import decode
    from outrider.core.distribution import Sampling
    from outrider.core.methods import make_rule

    target = Decoder.random(SMALL, seed=1, dtype=torch.float64) if kind == "decoder" else TableTarget(61, seed=2)
    greedy = Sampling(temperature=0)
    steps = decode(target, None, make_rule("exact"), [[5, 7, 9]], sampling=greedy, max_new_tokens=40)
    tokens = [token for step in steps for token in step.emitted]
    assert max(gaps(target, [5, 7, 9], tokens)) < 1e-9
    wrong = [*tokens]
    wrong[17] = (wrong[17] + 1) % 61
    result = gaps(target, [5, 7, 9], wrong)
    assert max(result[:17]) < 1e-9
    assert result[17] > 0.05
    assert gaps(target, [5, 7, 9], []) == []


def test_the_gap_check_splits_long_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableTarget(61, seed=2)
    whole = gaps(target, [1], list(range(40)))
    monkeypatch.setattr("outrider.text.bench.comparison._LOGITS", 7 * 61)
    assert gaps(target, [1], list(range(40))) == pytest.approx(whole)


def test_comparison_of_outputs() -> None:
    def verdict(tokens: list[int], gap: float = 0.2) -> str:
        return compare([1, 2, 3, 0], tokens, worst=lambda _: gap, near=0.5, end={0})

    assert verdict([1, 2, 3, 0], 9.0) == "same"
    assert verdict([1, 2, 4, 0]) == "near"
    assert verdict([1, 2, 4, 0], 0.6) == "wrong"
    assert verdict([1, 2, 3]) == "wrong", "it is truncated"
    assert verdict([1, 2, 3, 0, 5]) == "wrong", "it continues after its end token"
    assert verdict([1, 4, 0, 5]) == "wrong"


def measured(lm: TextModel, settings: Settings, extra: list[Contender] | None = None) -> tuple[Bench, dict[str, Any]]:
    items = [Item("a", "one", "the cat sat on the mat"), Item("b", "two", "a quick brown fox")]
    bench = Bench([*contenders(lm, settings), *(extra or [])], items, settings.repeat)
    list(bench.go())
    return bench, report(bench, lm, settings, cost=costs(lm, items), about={"note": 1}, skipped={"peer": "no"})


def test_the_report_has_every_field(
    lm: TextModel, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))  # where `auto` stores its calibration
    settings = Settings(drafters=("prompt-lookup", "jacobi", "auto"), max_new_tokens=12, repeat=2)
    _, result = measured(lm, settings)
    assert {"schema", "machine", "versions", "settings", "rows"} <= result.keys()
    assert [one["drafter"] for one in result["rows"]] == ["plain", "prompt-lookup", "jacobi", "auto"]
    wanted = {"drafter", "rule", "lossless", "tokens_per_pass", "acceptance_rate", "tokens_per_second"}
    wanted |= {"speedup", "speedup_low", "speedup_high", "identical", "quality"}
    for one in result["rows"]:
        assert wanted <= one.keys()
        assert one["lossless"] is True
        assert one["identical"] == 1.0
        assert one["wrong"] == 0.0
        assert one["quality"]["worst_gap"] < 1e-3
        assert set(one["tasks"]) == {"one", "two"}
        assert one["speedup_low"] <= one["speedup"] <= one["speedup_high"]
    assert result["rows"][0]["tokens_per_pass"] == 1.0
    assert result["settings"]["prompts"] == 2
    assert result["settings"]["note"] == 1
    assert result["skipped"] == {"peer": "no"}
    write(result, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    with pytest.raises(InvalidOption, match="can't be written"):
        write(result, tmp_path / "found.json" / "below a file.json")


def test_a_planted_wrong_token_is_reported(lm: TextModel) -> None:
    settings = Settings(drafters=("prompt-lookup",), max_new_tokens=12)

    def run(item: Item) -> Outcome:
        out = lm.generate(item.content, drafter=None, max_new_tokens=12)
        tokens = [*out.tokens]
        tokens[4] = next(one for one in range(9, 40) if one != tokens[4] and one not in lm.end)
        return Outcome(tuple(tokens), 1.0, out.trace.steps)

    _, result = measured(lm, settings, [Contender("faulty", run)])
    faulty = result["rows"][-1]
    assert (faulty["identical"], faulty["near_ties"], faulty["wrong"]) == (0.0, 0.0, 1.0)
    assert faulty["quality"]["worst_gap"] > 1e-3
    _, result = measured(lm, settings, [Contender("relaxed", run, lossless=False)])
    assert (result["rows"][-1]["identical"], result["rows"][-1]["wrong"]) == (0.0, 0.0), "a relaxed rule may differ"


@pytest.mark.slow
def test_sampled_outputs_are_compared_only_under_gumbel_match(lm: TextModel) -> None:
    hot = Settings(drafters=("prompt-lookup",), temperature=1.0, max_new_tokens=8)
    _, result = measured(lm, hot)
    assert [one["identical"] for one in result["rows"]] == [None, None]
    assert "worst_gap" not in result["rows"][0]["quality"]
    _, result = measured(lm, Settings(drafters=("prompt-lookup",), temperature=1.0, rules=("gumbel-match",)))
    assert result["rows"][1]["identical"] == 1.0


def test_relaxed_rules_print_their_price_beside_exact(lm: TextModel) -> None:
    settings = Settings(
        drafters=("prompt-lookup",),
        rules=("exact", "top-k-membership"),
        rule_options={"top-k-membership.k": [2, 300]},
        max_new_tokens=24,
    )
    _, result = measured(lm, settings)
    plain, exact, narrow, wide = result["rows"]
    assert [name_of(row) for row in result["rows"]] == [
        "plain",
        "prompt-lookup",
        "prompt-lookup top-k-membership (k=2)",
        "prompt-lookup top-k-membership (k=300)",
    ]
    assert plain["total_variation_per_token"] == exact["total_variation_per_token"] == 0
    assert plain["quality"]["nll"] == pytest.approx(exact["quality"]["nll"])
    assert wide["tokens_per_pass"] > exact["tokens_per_pass"] and wide["options"] == {"k": 300}
    assert wide["total_variation_per_token"] > narrow["total_variation_per_token"]
    assert wide["quality"]["nll"] > exact["quality"]["nll"]
    assert "NLL / token" in columns(result["rows"])
    _, result = measured(lm, replace(settings, rules=("exact",), rule_options={}))
    assert "NLL / token" not in columns(result["rows"]) and "nll" not in result["rows"][1]["quality"]


def test_unknown_names_list_the_known_ones(lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match=r"unknown drafter 'promt-lookup'.*Did you mean 'prompt-lookup'"):
        contenders(lm, Settings(drafters=("promt-lookup",)))
    with pytest.raises(InvalidOption, match="unknown rule 'exat'"):
        contenders(lm, Settings(rules=("exat",)))
    with pytest.raises(InvalidOption, match="no drafters"):
        contenders(lm, Settings(drafters=()))
    assert [contender.name for contender in contenders(lm, Settings(drafters=("plain", "jacobi", "jacobi")))] == [
        "plain",
        "jacobi",
    ]


def test_the_near_tie_bound_depends_on_the_precision(lm: TextModel) -> None:
    assert lm.dtype == "float32"
    assert Judge(lm, Settings()).near == 1e-3


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["smollm2-135m"].here, reason="the model is not here")
def test_the_real_model_on_two_prompts(smollm2: TextModel) -> None:
    settings = Settings(drafters=("prompt-lookup",), max_new_tokens=24)
    items = load_prompts(limit=2)
    bench = Bench(contenders(smollm2, settings), items)
    list(bench.go())
    plain, lookup = report(bench, smollm2, settings, cost=costs(smollm2, items))["rows"]
    assert lookup["identical"] == 1.0
    assert lookup["tokens_per_pass"] >= plain["tokens_per_pass"] == 1.0


def test_drafters_are_calibrated_on_prompts_that_are_not_scored(tmp_path: Path) -> None:
    scored = load_prompts()
    used = calibration_prompts(scored)
    assert {item.task for item in used} == {item.task for item in scored} and len(used) == 14
    assert not {item.content for item in used} & {item.content for item in scored}
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{item.content} "}) for item in used[:3]), encoding="utf-8")
    own = load_prompts(file)
    assert not {item.content.strip() for item in calibration_prompts(own)} & {item.content.strip() for item in own}
    assert len(calibration_prompts(own)) == 11


def test_outputs_obey_the_schemas_of_their_prompts(lm: TextModel) -> None:
    pytest.importorskip("llguidance")
    items = load_prompts(Path("records"), limit=2)
    settings = Settings(drafters=("prompt-lookup",), max_new_tokens=40, formats=True)
    bench = Bench(contenders(lm, settings), items, 1)
    list(bench.go())
    outputs = [run.outcome.tokens for run in bench.runs]
    assert all(lm.tokens.decode(tokens).startswith('{"') for tokens in outputs)
    rows = report(bench, lm, settings, cost=None)["rows"]
    assert [row["identical"] for row in rows] == [1.0, 1.0]
    # without the constraint the forced names are far from the likeliest tokens
    assert rows[0]["quality"]["worst_gap"] < 1e-3 < Judge(lm, Settings(formats=False)).worst(items[0], outputs[0])
