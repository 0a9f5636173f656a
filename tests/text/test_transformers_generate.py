"""custom_generate in transformers' generate(): the same tokens, the same options, and errors for unsupported ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.errors import Incompatible
from outrider.text import custom_generate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=5)
    )


@pytest.fixture(params=[llama, gpt2], scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = request.param().eval()
    for parameter in made.parameters():
        parameter.data *= 3
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = 5, 0
    return made


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three prompts, padded on the left."""
    ids = torch.randint(6, 97, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :4] = mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["prompt-lookup", "jacobi", None])
def test_greedy_output_equals_transformers(drafter: str | None, model: Any, batch: dict[str, Any]) -> None:
    wanted = model.generate(**batch, max_new_tokens=40, do_sample=False)
    result = model.generate(
        **batch, max_new_tokens=40, do_sample=False, custom_generate=custom_generate, drafter=drafter
    )
    assert torch.equal(result, wanted)


def test_penalties_and_stopping_criteria_apply(model: Any, batch: dict[str, Any]) -> None:
    def enough(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= 20 and int(ids[row, -1]) % 3 == 0 for row in range(len(ids))])

    from transformers import StoppingCriteriaList

    options = {"max_new_tokens": 40, "do_sample": False, "repetition_penalty": 1.3}
    one = {name: tensor[1:2] for name, tensor in batch.items()}
    for extra in ({}, {"stopping_criteria": StoppingCriteriaList([enough])}):
        wanted = model.generate(**one, **options, **extra)
        assert torch.equal(model.generate(**one, **options, **extra, custom_generate=custom_generate), wanted)


def test_other_processors_apply(model: Any, batch: dict[str, Any]) -> None:
    single = {name: tensor[1:2] for name, tensor in batch.items()}
    options = {"max_new_tokens": 24, "do_sample": False, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2}
    options |= {"min_new_tokens": 10, "suppress_tokens": [7, 8]}
    expected = model.generate(**single, **options)
    for drafter in ("prompt-lookup", None):
        result = model.generate(**single, **options, custom_generate=custom_generate, drafter=drafter)
        assert torch.equal(result, expected)


def test_a_draft_model_drafts(model: Any, batch: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "custom_generate": custom_generate}
    expected = model.generate(**batch, **{**options, "custom_generate": None})
    assert torch.equal(model.generate(**batch, **options, draft_model=model, num_draft_tokens=3), expected)


def test_sampling_follows_the_seed_or_torchs_generator(model: Any, batch: dict[str, Any]) -> None:
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "custom_generate": custom_generate}

    def drawn(manual: int | None = None, **more: Any) -> torch.Tensor:
        if manual is not None:
            torch.manual_seed(manual)
        return model.generate(**batch, **options, **more)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn())
    assert torch.equal(drawn(seed=4), drawn(seed=4))
    few = drawn(2, top_k=1, rule="gumbel-match")
    assert torch.equal(few, model.generate(**batch, max_new_tokens=20, do_sample=False))


def test_the_output_as_a_dictionary(model: Any, batch: dict[str, Any]) -> None:
    result = model.generate(**batch, max_new_tokens=4, return_dict_in_generate=True, custom_generate=custom_generate)
    assert result.sequences.shape[0] == 3
    assert torch.equal(result.sequences[:, :12], batch["input_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor with padded prompts"),
        ({"do_sample": True, "temperature": 0.5, "typical_p": 0.9}, "TypicalLogitsWarper after the temperature"),
        ({"num_beams": 3}, "num_beams=3"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ],
)
def test_unsupported_options_raise_by_name(
    options: dict[str, Any], message: str, model: Any, batch: dict[str, Any]
) -> None:
    with pytest.raises(Incompatible, match=message):
        model.generate(**batch, **{"max_new_tokens": 4, "do_sample": False, **options}, custom_generate=custom_generate)


def test_a_streamer_gets_the_prompt_then_every_token(model: Any) -> None:
    from transformers.generation.streamers import BaseStreamer

    class PrefixCache(BaseStreamer):
        def __init__(self) -> None:
            self.got: list[list[int]] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    ids, kept = torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8]]), PrefixCache()
    out = model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=custom_generate, stream_to=kept)
    assert kept.ended
    assert kept.got[0] == ids[0].tolist()
    assert [token for part in kept.got for token in part] == out[0].tolist()
    assert len(kept.got) > 2


def test_an_assistant_model_drafts(model: Any, batch: dict[str, Any]) -> None:
    """transformers passes it to its own loops only; a refused one shows that ours takes it too."""
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "custom_generate": custom_generate}
    expected = model.generate(**batch, **{**options, "custom_generate": None})
    assert torch.equal(model.generate(**batch, **options, assistant_model=model), expected)
    with pytest.raises(Incompatible, match="T5ForConditionalGeneration is an encoder-decoder model"):
        model.generate(**batch, **options, assistant_model=t5())


def test_encoder_decoder_models_are_refused(model: Any) -> None:
    from outrider import text

    with pytest.raises(Incompatible, match="encoder-decoder"):
        text.load(t5())
    with pytest.raises(Incompatible, match="encoder-decoder"):
        t5().generate(torch.tensor([[7, 8, 9]]), max_new_tokens=4, custom_generate=custom_generate)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=97, decoder_start_token_id=0, **sizes))
