"""The public API of outrider.speech on a small voice with random weights."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.constraint import Positions
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.rules.neighbours import Tolerance
from outrider.core.trace import Trace
from outrider.speech.audio import Sound, SoundStream, synthesise
from outrider.speech.codec import FRAMES
from outrider.speech.conditioned_heads import ConditionedHeads
from outrider.speech.mel import HOP, RATE, SILENCE
from outrider.speech.model import SpeechModel
from outrider.speech.options import Given, Options
from outrider.speech.vocoder import CONTEXT


def streamed(speaker: SpeechModel, text: str, **options: object) -> np.ndarray:
    return np.concatenate([piece.samples for piece in speaker.stream(text, **options)])  # type: ignore[arg-type]


def test_streaming_equals_generate(speaker: SpeechModel) -> None:
    text = "Good morning, everyone. " + "The harbour was quiet, and nobody had seen the ship before. " * 3
    whole = speaker.generate(text, seed=4)
    assert len(whole.phonemes) > 1 and len(whole.starts) == len(whole.tokens)
    assert np.array_equal(streamed(speaker, text, seed=4), whole.sound.samples)
    assert whole.finish_reason in ("stop", "length") and whole.time_to_first_sound is not None
    assert whole.trace.rows == len(whole.phonemes) and sum(map(len, (s.emitted for s in whole.trace.steps)))
    assert Trace.from_json(whole.trace.to_json()) == whole.trace
    assert abs(whole.starts[-1] - whole.sound.seconds) < 0.2 * len(whole.phonemes) + 0.1
    factor = whole.real_time_factor
    assert factor.total == factor.model + factor.codec + factor.vocoder > 0


@pytest.mark.slow
def test_drafting_changes_neither_tokens_nor_sound(speaker: SpeechModel) -> None:
    text = "Where is the station, please?"
    plain = speaker.generate(text, drafter=None, rule="gumbel-match", seed=7)
    for drafter in ("prompt-lookup", "jacobi", "draft-model"):
        drafted = speaker.generate(text, drafter=drafter, rule="gumbel-match", seed=7)
        assert drafted.tokens == plain.tokens and np.array_equal(drafted.sound.samples, plain.sound.samples)
        assert drafted.trace.method == drafter


def test_processors_change_drafted_and_plain_decoding_alike(speaker: SpeechModel) -> None:
    def fewer_codes(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert ids[0, 0] == speaker.voice.end, "an utterance begins with the end token"
        logits[:, :5] = -torch.inf
        logits[:, ids[0, -1:]] -= 2
        return logits

    options = {"rule": "gumbel-match", "seed": 7, "logits_processor": fewer_codes}
    plain = speaker.generate("Yes.", drafter=None, **options)  # type: ignore[call-overload]
    assert min(plain.tokens) >= 5 and plain.trace.options["logits_processor"] == "fewer_codes"
    for drafter in ("jacobi", "draft-model"):
        assert speaker.generate("Yes.", drafter=drafter, **options).tokens == plain.tokens  # type: ignore[call-overload]


def test_a_forced_beginning_and_ending_are_kept_and_guessed(speaker: SpeechModel) -> None:
    end, codes = speaker.voice.end, tuple(range(speaker.voice.end))
    shape = Positions([(3,), (4,), (3,), codes, codes, (5,), (6,), (end,)])
    options = {"rule": "gumbel-match", "seed": 7, "constraint": shape}
    plain = speaker.generate("Yes.", drafter=None, **options)  # type: ignore[call-overload]
    assert plain.tokens[:3] == [3, 4, 3] and plain.tokens[5:] == [5, 6, end] and len(plain.trace.steps) == 8
    for drafter in ("jacobi", "draft-model"):
        out = speaker.generate("Yes.", drafter=drafter, **options)  # type: ignore[call-overload]
        assert out.tokens == plain.tokens and len(out.trace.steps) < 8 and out.finish_reason == "stop"


def test_an_async_stream_gives_the_same_sound(speaker: SpeechModel) -> None:
    async def collected() -> list[np.ndarray]:
        return [piece.samples async for piece in speaker.stream("Yes.", seed=4)]

    result = speaker.generate("Yes.", seed=4)
    assert np.array_equal(np.concatenate(asyncio.run(collected())), result.sound.samples)
    assert result.trace.method == "jacobi", "the default drafter"


def test_chunks_join_seamlessly(speaker: SpeechModel) -> None:
    codes = torch.randint(25, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        mel = speaker.codec.decode(torch.tensor([codes]))
        silent = torch.nn.functional.pad(mel, (0, CONTEXT), value=SILENCE)  # as after the end
        whole = speaker.vocoder(silent)[0, : 150 * 512].numpy()
    np.testing.assert_allclose(synthesise(codes, speaker.codec, speaker.vocoder), whole, atol=1e-5)


def test_few_frames_are_vocoded_twice(speaker: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, forward = [], speaker.vocoder.forward

    def counted(mel: torch.Tensor) -> torch.Tensor:
        lengths.append(mel.shape[-1])
        return forward(mel)

    monkeypatch.setattr(speaker.vocoder, "forward", counted)
    stream, sound = SoundStream(speaker.codec, speaker.vocoder), 0
    for code in range(400):
        sound += sum(map(len, stream.push([code % 25])))
    sound += len(stream.finish())
    assert (sound, lengths) == (400 * FRAMES * HOP, [32, 128, 256, 512])  # of 800


def test_several_texts_are_one_batch(speaker: SpeechModel) -> None:
    texts = ["One.", "Two and three. And four, of course, which nobody expected.", "Yes!"]
    results = speaker.generate(texts, seed=2)
    assert [result.text for result in results] == texts
    for text, result in zip(texts, results, strict=True):
        alone = speaker.generate(text, seed=2)
        assert alone.tokens == result.tokens and result.sound.seconds > 0


def test_generation_is_bounded(speaker: SpeechModel) -> None:
    speaker.network.head.weight[-1] = 0.0
    result = speaker.generate("Hello there.", temperature=0.0)
    assert result.finish_reason in ("stop", "length") and len(result.tokens) < 100


def test_sound_is_saved_and_loaded(speaker: SpeechModel, tmp_path: Path) -> None:
    sound = Sound(np.sin(np.arange(RATE) / 30).astype(np.float32) / 2)
    sound.save(tmp_path / "a.wav")
    back = Sound.load(tmp_path / "a.wav")
    np.testing.assert_allclose(back.samples, sound.samples, atol=1e-4)
    assert back.sample_rate == RATE and back.seconds == 1 and "audio/wav" in sound._repr_html_()
    assert abs(len(sound.resample(16_000).samples) - 16_000) < 2 and sound.resample(RATE) is sound
    assert abs(speaker.resynthesised(sound).seconds - 1) < 0.03
    with pytest.raises(InvalidOption, match=r"16,000 samples per second and must have 22,050"):
        speaker.resynthesised(sound.resample(16_000))
    with pytest.raises(InvalidOption, match=r"\.wav"):
        sound.save(tmp_path / "a.mp3")
    (tmp_path / "b.wav").write_bytes(b"RIFFnothing")
    with pytest.raises(InvalidOption, match="not an uncompressed WAV"):
        Sound.load(tmp_path / "b.wav")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "text is empty"),
        ("?!", {}, "nothing to speak"),
        ([], {}, "no text"),
        ("Hi.", {"drafter": "psychic"}, "psychic"),
        ("Hi.", {"rule": "whim"}, "whim"),
        ("Hi.", {"speed": 9}, "speed is 9"),
        ("Hi.", {"loud": True}, "loud"),
        ("Hi.", {"temperature": -1.0}, "temperature"),
        ("Hi.", {"logits_processor": 3}, "logits_processor is 3"),
    ],
)
def test_bad_input_is_refused(speaker: SpeechModel, text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(OutriderError, match=message):
        speaker.generate(text, **options)  # type: ignore[arg-type, call-overload]


def test_default_options_on_speech(speaker: SpeechModel) -> None:
    target = speaker.target(speaker.voice.script([[0, 3, 0]]))
    draft_head = ConditionedHeads(target, heads=4).drafts(target)

    def grown(rule: str, **options: object) -> tuple[str, int]:
        wanted = Options(drafter="medusa", rule=rule, drafter_options={"head": draft_head, **options})
        made = speaker.drafter(wanted, [[0, 3, 0]], speaker.voice.script([[0, 3, 0]])).made
        assert isinstance(made, Learned)
        return made.draft_kind, len(made._fixed.parents)

    assert grown("exact") == ("sampled", 16) and grown("tolerance") == ("tree", 24)
    assert grown("exact", nodes=8) == ("sampled", 8) and grown("exact", draft_kind="tree") == ("tree", 16)
    assert grown("exact", tree=(-1, 0)) == ("sampled", 2)
    assert speaker.rule(Options(rule="tolerance")).made == Tolerance(tau=30)
    assert speaker.rule(Options(rule="tolerance", rule_options={"tau": 1})).made == Tolerance(tau=1)


def test_help_shows_every_option() -> None:
    names = {each.name for each in fields(Options)}
    assert names == set(Given.__annotations__)
    assert names < set(inspect.signature(SpeechModel.generate).parameters)
