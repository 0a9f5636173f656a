"""Batches, guesses and simulated acceptance; training a draft head; resuming a killed run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.trained.distilled import SmallModel
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.drafters.tree_shapes import by_accuracy, validate
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import OutriderError
from outrider.core.methods import make_drafter, make_rule
from outrider.core.training.acceptance_curve import walk
from outrider.core.training.checkpoint import about, begin, load, save
from outrider.core.training.dataset import Lesson, TargetTeacher, batches, read, rejections, split
from outrider.core.training.draft_head import Batch, Guess, agreement
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.losses import Loss, kl
from outrider.core.training.trainer import Plan, Trainer

CONFIG = Config(vocabulary=48, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return Decoder.random(CONFIG, 3)


@pytest.fixture(scope="module")
def lessons(target: Decoder) -> list[Lesson]:
    """The target's own greedy answers."""
    prompts = [[one % 48, (7 * one + 1) % 48, 5] for one in range(96)]
    found: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, None, make_rule(), prompts, sampling=Sampling(temperature=0), max_new_tokens=20):
        found[step.row] += step.emitted
    return [Lesson(tuple(prompt), tuple(answer)) for prompt, answer in zip(prompts, found, strict=True)]


def test_the_teachers_distributions_are_those_of_decoding(target: Decoder, lessons: list[Lesson]) -> None:
    batch = read(TargetTeacher(target), lessons[:5], frozenset({"layer.1"}))
    assert batch.tokens.shape == batch.answer.shape == (5, 23) and batch.taps["layer.1"].shape == (5, 23, 32)
    where = batch.loss_mask()
    distributions = batch.teacher_log_probs(where)
    torch.testing.assert_close(distributions.exp().sum(-1), torch.ones(len(distributions)))
    assert (distributions.argmax(-1) == batch.labels()[where]).all()  # greedy answers: each is its teacher's choice
    few = torch.tensor([1, 5, 9, 20])
    torch.testing.assert_close(batch.teacher_log_probs(where, few), distributions[:, few].log_softmax(-1))
    torch.testing.assert_close(
        batch.teacher_log_probs_for(3), batch.teacher_log_probs(batch.answer & (torch.arange(23) >= 2))
    )
    torch.testing.assert_close(batch.labels(3)[batch.loss_mask(3)], batch.tokens[:, 3:][batch.answer[:, 2:-1]])


def test_rows_of_unequal_length_are_read_as_alone(target: Decoder) -> None:
    rows = [Lesson((1, 2), (3, 4, 5)), Lesson((9,), (8,)), Lesson((4, 4, 4), (1, 2, 3, 4, 5), counts=(0, 3))]
    together = read(TargetTeacher(target), rows, frozenset())
    for row, one in enumerate(rows):
        alone = read(TargetTeacher(target), [one], frozenset())
        states = together.taps["last"][row, : one.size]
        torch.testing.assert_close(states, alone.taps["last"][0], atol=1e-5, rtol=1e-5)
        assert together.answer[row].nonzero()[:, 0].tolist() == alone.answer[0].nonzero()[:, 0].tolist()
    assert together.answer[2].nonzero()[:, 0].tolist() == [2, 5]
    assert together.live.sum(1).tolist() == [5, 2, 8]


def test_validation_measures_the_accuracy_that_shapes_a_static_tree(target: Decoder, lessons: list[Lesson]) -> None:
    torch.manual_seed(0)
    head = MedusaHeads(target, heads=2)
    training = HeadTraining(TargetTeacher(target), {"medusa": head}, lambda *_: lessons, lessons[:9], Path(), tokens=64)
    training.validate({"medusa": head}, nullcontext)
    rates = torch.tensor(head.config["accuracy"])
    assert rates.shape == (2, 10) and ((rates >= 0) & (rates.sum(1, keepdim=True) <= 1.001)).all()
    batch = read(training.teacher, lessons[:9], frozenset())
    asked = batch.loss_mask(2)
    logits = next(iter(head.guesses(batch))).logits
    right = (logits.argmax(-1) == batch.labels(2)[asked]).float().mean()
    assert float(rates[0, 0]) == pytest.approx(float(right), abs=1e-4)
    again = MedusaHeads(target, **{**head.config, "vocabulary": 0})
    head.shared(MedusaHeads(target, heads=2).config)
    drafter = Learned(again.drafts(target), nodes=5, depth=2)
    assert drafter._fixed.parents == tuple(validate(by_accuracy(head.config["accuracy"], 5, 2)))


def test_one_pass_gives_the_states_of_the_prefill() -> None:
    teacher = TargetTeacher(Decoder.random(CONFIG, 0))
    rows, needs = [[1, 2, 3], list(range(20)), [4]], frozenset({"layer.1", "embedding"})
    known, states = teacher._prefill(rows, needs), teacher._pass(rows, needs)
    assert known.keys() == states.keys() == needs | {"last"}
    for tap in known:
        for row, ids in enumerate(rows):
            torch.testing.assert_close(states[tap][row, : len(ids)], known[tap][row, : len(ids)])


def test_batches_have_every_example_once_within_the_token_limit() -> None:
    rows = [Lesson((1,) * (n % 7 + 1), (2,) * (n % 11 + 1), str(n)) for n in range(200)]
    found = batches(rows, 64, 5, max_length=18)
    assert sorted(one.kind for group in found for one in group) == sorted(one.kind for one in rows)
    assert all(len(group) * max(one.size for one in group) <= 64 for group in found)
    assert found == batches(rows, 64, 5, max_length=18) != batches(rows, 64, 6, max_length=18)
    short = batches(rows, 64, 5, max_length=6)
    assert all(one.size <= 6 for group in short for one in group)
    many = [Lesson((n, 1), (2,)) for n in range(400)]
    learned, held = split(many, 10)
    assert len(learned) + len(held) == 400 and 20 < len(held) < 60
    assert split(many[:100], 10)[1] == [one for one in many[:100] if one in held]  # the same as more are added


def _batch(tokens: Tensor, answer: Tensor) -> Batch:
    return Batch(tokens, torch.ones_like(answer), answer, {}, lambda states, vocabulary: states)


def _guess(batch: Batch, offset: int, right: Tensor) -> Guess:
    """One-hot logits that name the token t + offset where `right` [B, T], else another one."""
    named = torch.where(right, batch.labels(offset), (batch.labels(offset) + 1) % 10)
    return Guess(torch.nn.functional.one_hot(named, 10).float(), offset)


def test_simulated_acceptance_is_that_of_the_loop() -> None:
    tokens = torch.arange(12)[None] % 10
    answer = torch.zeros(1, 12, dtype=torch.bool)
    answer[0, 3:11] = True  # the prompt is 4 tokens, the answer 8
    batch = _batch(tokens, answer)
    always, never = torch.ones(1, 12, dtype=torch.bool), torch.zeros(1, 12, dtype=torch.bool)
    alone = walk(agreement([_guess(batch, 1, never)], batch, 4), answer)
    assert (alone.calls, alone.tokens, alone.tokens_per_pass) == (8, 8, 1.0)
    chain = walk(agreement([_guess(batch, 1, always)], batch, 3), answer)
    assert (chain.calls, chain.tokens) == (2, 8)  # 3 drafted and one more, twice
    heads = walk(agreement([_guess(batch, 2, always), _guess(batch, 3, never)], batch, 4), answer)
    assert (heads.calls, heads.tokens, heads.conditional) == (4, 8, (1.0, 0.0))
    half = always.clone()
    half[0, 5] = False  # the guess made behind position 5, about token 6, is wrong
    some = walk(agreement([_guess(batch, 1, half)], batch, 4), answer)
    assert (some.calls, some.tokens) == (2, 8)  # 3, 4 accepted, 5 corrected; then the rest
    assert some.unconditional[0] == 1.0 and some.tried[0] == 2


@pytest.mark.slow
def test_a_distilled_draft_model_drafts_as_simulated(target: Decoder, lessons: list[Lesson], tmp_path: Path) -> None:
    learned, held = lessons[:80], lessons[80:]
    draft_head = SmallModel(target, layers=(0, -1), vocabulary=torch.arange(48))
    plan = Plan(minutes=1e6, steps=60, rate=3e-3, precision="no", validations=1)
    training = HeadTraining(
        TargetTeacher(target), {"draft-model": draft_head}, lambda *_: learned, held, tmp_path, tokens=256, depth=4
    )
    progress = Trainer(training, plan, tmp_path, quiet=True).run()
    first, last = (row["models"]["draft-model"]["tokens_per_pass"] for row in progress.history)
    assert last > max(first, 1.15)
    assert {"curve.json", "curve.png", "draft-model.safetensors", "draft-model.json"} <= {
        p.name for p in tmp_path.iterdir()
    }
    facts = about(tmp_path / "draft-model.safetensors")
    assert facts["provenance"]["done"]["steps"] == 60 and facts["config"]["layers"] == [0, 2]
    again = load(tmp_path / "draft-model.safetensors", {"SmallModel": SmallModel}, target)
    emitted = calls = 0
    for one in held:
        drafter = make_drafter("draft-model", model=again.drafts(target), length=4)
        for step in decode(
            target, drafter, make_rule(), [one.prompt], sampling=Sampling(temperature=0), max_new_tokens=20
        ):
            emitted, calls = emitted + len(step.emitted), calls + 1
    assert emitted / calls == pytest.approx(last, rel=0.05)  # 16-bit weights, and the answer's end, move it a little


@pytest.mark.slow
def test_precision_stays_16_bits_after_a_validation(
    target: Decoder, lessons: list[Lesson], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Watched(SmallModel):
        def loss(self, batch: Batch, loss: Loss) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().loss(batch, loss)

    monkeypatch.setattr("outrider.core.training.optim.halves", lambda: True)
    draft_heads, teacher = {"draft-model": Watched(target, layers=(0,))}, TargetTeacher(target)
    training = HeadTraining(teacher, draft_heads, lambda *_: lessons[:40], lessons[80:], tmp_path, tokens=256)
    Trainer(training, Plan(minutes=1e6, steps=3, validations=1000), tmp_path, quiet=True).run()
    assert seen == [True] * 3


def test_only_low_rank_corrections_are_saved(target: Decoder, lessons: list[Lesson], tmp_path: Path) -> None:
    draft_head = SmallModel(target, layers=(0, -1), rank=4, vocabulary=torch.arange(0, 48, 2))
    names = set(draft_head.state_dict())
    assert not any("base" in name or "embedding" in name for name in names)
    with torch.no_grad():
        for name, one in draft_head.named_parameters():
            if name.endswith("up"):
                one.normal_(std=0.1)
    save(draft_head, tmp_path / "small.safetensors", {"seed": 0})
    again = load(tmp_path / "small.safetensors", {"SmallModel": SmallModel}, target)
    batch = read(TargetTeacher(target), lessons[:4], frozenset())
    with torch.no_grad():
        (mine,), (theirs,) = draft_head.guesses(batch), again.guesses(batch)
        assert (mine.logits - theirs.logits).abs().max() < 0.3 < mine.logits.std()
        model = again.drafts(target)
        rows = [[*one.prompt, *one.answer] for one in lessons[:4]]
        states = TargetTeacher(model).states(rows, frozenset())["last"][batch.loss_mask()]
        logits = model.network.logits(states)
    torch.testing.assert_close(logits[:, ::2], theirs.logits, atol=1e-4, rtol=1e-4)
    assert (logits[:, 1::2] == -torch.inf).all() and model.weight_bytes < target.weight_bytes


def test_large_matrices_are_saved_in_8_bits(tmp_path: Path) -> None:
    target = Decoder.random(
        Config(vocabulary=48, hidden_size=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate_size=96)
    )
    path, short = tmp_path / "small.safetensors", {"SmallModel": SmallModel}
    draft_head = SmallModel(target, layers=(0,))
    large = [name for name, one in draft_head.state_dict().items() if one.ndim > 1 and one.numel() >= 4096]
    save(draft_head, path, {})
    again = load(path, short, target).state_dict()
    for name, one in draft_head.state_dict().items():
        most = one.flatten(1).abs().amax(1, keepdim=True) / 254 * 1.001 if name in large else one.abs() / 250
        assert ((again[name] - one).abs().view(len(one), -1) <= most.view(len(one), -1)).all()
    whole = tmp_path / "whole.safetensors"
    save(draft_head, whole, {}, 16)
    assert large
    assert path.stat().st_size < 0.75 * whole.stat().st_size
    save(draft_head, tmp_path / "part.safetensors", {}, finer=(large[0],))
    part, sixteen = (load(one, short, target).state_dict() for one in (tmp_path / "part.safetensors", whole))
    assert [name for name in large if part[name].equal(sixteen[name])] == large[:1]
    with safe_open(path, "pt") as file:
        parts = {name: file.get_tensor(name) for name in file.keys() if name != f"{large[0]}.scale"}  # noqa: SIM118
    save_file(parts, path)
    with pytest.raises(OutriderError, match="does not fit"):
        load(path, short, target)


def test_files_that_do_not_fit_are_refused(target: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    save(SmallModel(target, layers=(0,)), path, {})
    wider = Decoder.random(
        Config(vocabulary=48, hidden_size=16, layers=3, heads=2, kv_heads=2, head_dim=8, intermediate_size=48)
    )
    with pytest.raises(OutriderError, match="does not fit"):
        load(path, {"SmallModel": SmallModel}, wider)
    with pytest.raises(OutriderError, match="kind of trained weights"):
        load(path, {}, target)
    path.with_suffix(".json").write_text("[]")
    with pytest.raises(OutriderError):
        load(path, {"SmallModel": SmallModel}, target)


def test_training_starts_from_given_weights(target: Decoder, tmp_path: Path) -> None:
    path, said = tmp_path / "small.safetensors", []
    learned = SmallModel(target, layers=(0,))
    with torch.no_grad():
        for one in learned.parameters():
            one.normal_(std=0.1)
    save(learned, path, {}, 16)
    other = SmallModel(target, layers=(0,), rank=2)  # which has corrections besides
    made = {name: one.clone() for name, one in other.state_dict().items()}
    begin(other, path, said.append)
    held = learned.state_dict()
    shared = [name for name, one in made.items() if name in held and held[name].shape == one.shape]
    assert 0 < len(shared) < len(made) and said == [f"{len(shared)} of {len(made)} tensors start from {path}"]
    for name, one in other.state_dict().items():
        torch.testing.assert_close(one, held[name] if name in shared else made[name], atol=1e-2, rtol=1e-2)
    deeper = SmallModel(target, layers=(1, 0))  # in which the layer stands elsewhere
    before = deeper.blocks[0].attention.qkv.weight.clone()
    begin(deeper, path, said.append)
    assert torch.equal(deeper.blocks[0].attention.qkv.weight, before)
    for name, one in deeper.blocks[1].state_dict().items():
        torch.testing.assert_close(one, held[f"blocks.0.{name}"], atol=1e-2, rtol=1e-2)
    path.with_suffix(".json").write_text(path.with_suffix(".json").read_text().replace("SmallModel", "Another"))
    with pytest.raises(OutriderError, match="contains a Another"):
        begin(learned, path, said.append)


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from outrider.core.drafters.trained.distilled import SmallModel
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.drafters.tree_shapes import by_accuracy, validate
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.training.dataset import TargetTeacher, Lesson
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.trainer import Plan, Trainer

config = Config(vocabulary=48, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)
target = Decoder.random(config, 3)
draw = torch.Generator().manual_seed(0)
rows = torch.randint(48, (40, 16), generator=draw).tolist()
lessons = [Lesson(tuple(row[:4]), tuple(row[4:])) for row in rows]
torch.manual_seed(0)
draft_head = SmallModel(target, layers=(0, -1))
often = float(sys.argv[2])
plan = Plan(minutes=1e6, steps=400, precision="no", validations=1, checkpoint_minutes=often)
heads, out = {"small": draft_head}, Path(sys.argv[1])
training = HeadTraining(TargetTeacher(target), heads, lambda *_: lessons, lessons[:4], out, tokens=64)
Trainer(training, plan, out).run()
"""


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def command(name: str, minutes: float) -> list[str]:
        return [sys.executable, str(script), str(tmp_path / name), str(minutes)]

    running = subprocess.Popen(command("killed", 0.005), stderr=subprocess.DEVNULL)
    mark = tmp_path / "killed" / "checkpoint" / "state.json"
    deadline = time.monotonic() + 120
    while not mark.is_file() and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, "it was over before it could be killed"
    folder = next(one for one in (mark.parent, mark.parent.with_name("checkpoint.old")) if one.is_dir())
    steps = json.loads((folder / "state.json").read_text())["steps"]
    assert 0 < steps < 400
    subprocess.run(command("killed", 1e6), check=True, stderr=subprocess.DEVNULL)
    subprocess.run(command("whole", 1e6), check=True, stderr=subprocess.DEVNULL)
    target = Decoder.random(CONFIG, 3)
    ends = []
    for name in ("killed", "whole"):
        found = json.loads((tmp_path / name / "checkpoint" / "state.json").read_text())
        assert found["steps"] == 400
        ends.append(load(tmp_path / name / "small.safetensors", {"SmallModel": SmallModel}, target).state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], atol=0, rtol=0)


def test_rejected_drafts_of_serving_become_examples(target: Decoder, lessons: list[Lesson]) -> None:
    worse = SmallModel(target, layers=(0, -1)).drafts(target)
    drafter = make_drafter("draft-model", model=worse, length=3)
    prompt = lessons[0].prompt
    steps = list(decode(target, drafter, make_rule(), [prompt], sampling=Sampling(temperature=0), max_new_tokens=20))
    lesson = rejections(prompt, steps)
    assert lesson is not None and lesson.answer == lessons[0].answer[: len(lesson.answer)]
    wrong = [place for step in steps for place in [step.sources[-1] == "resampled"]]
    assert len(lesson.counts or ()) == sum(wrong) > 0
    batch = read(TargetTeacher(target), [lesson], frozenset())
    draft_head = SmallModel(target, layers=(0, -1))
    assert int(batch.answer.sum()) == sum(wrong)
    assert not draft_head.hits(batch, 1)[batch.answer].any()  # those are just the places where it is wrong
    assert float(draft_head.loss(batch, kl).detach()) > 0
