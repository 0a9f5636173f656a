"""outrider.speech as people use it, on a small voice of noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.drafters.trained.drafter import Learned
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.rules.neighbours import Tolerance
from outrider.core.trace import Trace
from outrider.speech.audio import Sound, spoken
from outrider.speech.conditioned_heads import ConditionedHeads
from outrider.speech.mel import RATE, SILENCE
from outrider.speech.model import SpeechModel
from outrider.speech.options import Options
from outrider.speech.vocoder import CONTEXT


def heard(speaker: SpeechModel, text: str, **options: object) -> np.ndarray:
    return np.concatenate([piece.samples for piece in speaker.stream(text, **options)])  # type: ignore[arg-type]


def test_what_is_streamed_is_the_whole(speaker: SpeechModel) -> None:
    text = "Good morning, everyone. " + "The harbour was quiet, and nobody had seen the ship before. " * 3
    whole = speaker.generate(text, seed=4)
    assert len(whole.phonemes) > 1 and len(whole.starts) == len(whole.tokens)
    assert np.array_equal(heard(speaker, text, seed=4), whole.sound.samples)
    assert whole.finish in ("end", "limit") and whole.first is not None
    assert whole.trace.rows == len(whole.phonemes) and sum(map(len, (s.emitted for s in whole.trace.steps)))
    assert Trace.from_json(whole.trace.to_json()) == whole.trace
    assert abs(whole.starts[-1] - whole.sound.seconds) < 0.2 * len(whole.phonemes) + 0.1
    factor = whole.factor
    assert factor.total == factor.model + factor.codec + factor.vocoder > 0


@pytest.mark.slow
def test_whoever_drafts_the_same_tokens_sound_the_same(speaker: SpeechModel) -> None:
    text = "Where is the station, please?"
    plain = speaker.generate(text, rule="gumbel-match", seed=7)
    for drafter in ("prompt-lookup", "jacobi", "draft-model"):
        found = speaker.generate(text, drafter=drafter, rule="gumbel-match", seed=7)
        assert found.tokens == plain.tokens and np.array_equal(found.sound.samples, plain.sound.samples)
        assert found.trace.method == drafter


def test_pieces_join_without_a_seam(speaker: SpeechModel) -> None:
    codes = torch.randint(25, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        mel = speaker.codec.decode(torch.tensor([codes]))
        silent = torch.nn.functional.pad(mel, (0, CONTEXT), value=SILENCE)  # as it is behind the end
        whole = speaker.vocoder(silent)[0, : 150 * 512].numpy()
    np.testing.assert_allclose(spoken(codes, speaker.codec, speaker.vocoder), whole, atol=1e-5)


def test_several_texts_are_spoken_side_by_side(speaker: SpeechModel) -> None:
    texts = ["One.", "Two and three. And four, of course, which nobody expected.", "Yes!"]
    found = speaker.generate(texts, seed=2)
    assert [one.text for one in found] == texts
    for text, one in zip(texts, found, strict=True):
        alone = speaker.generate(text, seed=2)
        assert alone.tokens == one.tokens and one.sound.seconds > 0


def test_it_ends_whatever_the_voice_does(speaker: SpeechModel) -> None:
    speaker.network.head.weight[-1] = 0.0
    found = speaker.generate("Hello there.", temperature=0.0)
    assert found.finish in ("end", "limit") and len(found.tokens) < 100


def test_sound_is_saved_and_read(speaker: SpeechModel, tmp_path: Path) -> None:
    sound = Sound(np.sin(np.arange(RATE) / 30).astype(np.float32) / 2)
    sound.save(tmp_path / "a.wav")
    back = Sound.load(tmp_path / "a.wav")
    np.testing.assert_allclose(back.samples, sound.samples, atol=1e-4)
    assert back.rate == RATE and back.seconds == 1 and "audio/wav" in sound._repr_html_()
    assert abs(len(sound.at(16_000).samples) - 16_000) < 2 and sound.at(RATE) is sound
    assert abs(speaker.resynthesised(sound).seconds - 1) < 0.03
    with pytest.raises(InvalidOption, match=r"16,000 samples a second and 22,050"):
        speaker.resynthesised(sound.at(16_000))
    with pytest.raises(InvalidOption, match=r"\.wav"):
        sound.save(tmp_path / "a.mp3")
    (tmp_path / "b.wav").write_bytes(b"RIFFnothing")
    with pytest.raises(InvalidOption, match="no WAV"):
        Sound.load(tmp_path / "b.wav")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, "no text"),
        ("?!", {}, "nothing that can be spoken"),
        ([], {}, "no text"),
        ("Hi.", {"drafter": "psychic"}, "psychic"),
        ("Hi.", {"rule": "whim"}, "whim"),
        ("Hi.", {"speed": 9}, "speed is 9"),
        ("Hi.", {"loud": True}, "loud"),
        ("Hi.", {"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_input_is_said(speaker: SpeechModel, text: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(OutriderError, match=said):
        speaker.generate(text, **options)  # type: ignore[arg-type, call-overload]


def test_speech_has_ways_of_its_own_to_begin(speaker: SpeechModel) -> None:
    target = speaker.target(speaker.voice.script([[0, 3, 0]]))
    draft_head = ConditionedHeads(target, heads=4).drafts(target)

    def grown(rule: str, **options: object) -> tuple[str, int]:
        wanted = Options(drafter="medusa", rule=rule, drafter_options={"draft_head": draft_head, **options})
        made = speaker.drafter(wanted, [[0, 3, 0]], speaker.voice.script([[0, 3, 0]])).made
        assert isinstance(made, Learned)
        return made.draft_kind, len(made._fixed.parents)

    assert grown("exact") == ("sampled", 16) and grown("tolerance") == ("tree", 24)
    assert grown("exact", nodes=8) == ("sampled", 8) and grown("exact", draft_kind="tree") == ("tree", 16)
    assert grown("exact", tree=(-1, 0)) == ("sampled", 2)
    assert speaker.rule(Options(rule="tolerance")).made == Tolerance(tau=30)
    assert speaker.rule(Options(rule="tolerance", rule_options={"tau": 1})).made == Tolerance(tau=1)
