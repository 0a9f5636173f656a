from __future__ import annotations

import pytest
import torch

from outrider.core.errors import OutriderError
from outrider.core.kernels import native
from outrider.core.training.losses import LOSSES, acceptance, adaptive, cross_entropy, jsd, kl, resolve, reverse_kl, tv


@pytest.fixture
def distributions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A draft head's logits, a teacher's log-distribution, and tokens, in float64."""
    generator = torch.Generator().manual_seed(0)
    draft_head = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    teacher = (2 * torch.randn(6, 9, generator=generator, dtype=torch.float64)).log_softmax(-1)
    return draft_head, teacher, torch.tensor([0, 3, -1, 8, 2, 2])


def test_each_loss_is_its_definition(distributions: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    draft_head, teacher, token = distributions
    p, q = teacher.exp(), draft_head.softmax(-1)
    close = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(kl(draft_head, teacher, token), (p * (p / q).log()).sum(-1), **close)
    torch.testing.assert_close(reverse_kl(draft_head, teacher, token), (q * (q / p).log()).sum(-1), **close)
    middle = 0.3 * p + 0.7 * q
    wanted = 0.3 * (p * (p / middle).log()).sum(-1) + 0.7 * (q * (q / middle).log()).sum(-1)
    torch.testing.assert_close(jsd(draft_head, teacher, token, blend=0.3), wanted, **close)
    torch.testing.assert_close(tv(draft_head, teacher, token), (p - q).abs().sum(-1) / 2, **close)
    overlap = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(acceptance(draft_head, teacher, token), -overlap.log(), **close)
    torch.testing.assert_close(1 - tv(draft_head, teacher, token), overlap, **close)
    share = torch.exp(-3 * overlap)
    wanted = share * (p * (p / q).log()).sum(-1) + (1 - share) * (1 - overlap)
    torch.testing.assert_close(adaptive(draft_head, teacher, token), wanted, **close)
    wanted = torch.where(token < 0, 0, -q.log().gather(1, token.clamp(min=0)[:, None])[:, 0])
    torch.testing.assert_close(cross_entropy(draft_head, teacher, token), wanted, **close)


def test_a_temperature_softens_both_distributions(
    distributions: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    draft_head, teacher, token = distributions
    p, q = (teacher / 2).softmax(-1), (draft_head / 2).softmax(-1)
    found = kl(draft_head, teacher, token, temperature=2.0)
    torch.testing.assert_close(found, 4 * (p * (p / q).log()).sum(-1), atol=1e-5, rtol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(
    name: str, distributions: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    draft_head, teacher, token = distributions
    draft_head = draft_head.float().requires_grad_()
    loss = resolve(name)
    (found,) = torch.autograd.grad(loss(draft_head, teacher.float(), token).sum(), draft_head)
    if name == "adaptive":  # its weights count as constants
        p, q = teacher.exp(), draft_head.detach().double().softmax(-1)
        share = torch.exp(-3 * torch.minimum(p, q).sum(-1))
        whole = draft_head.detach().clone().requires_grad_()
        parts = share.float() * kl(whole, teacher.float(), token) + (1 - share).float() * tv(
            whole, teacher.float(), token
        )
        (wanted,) = torch.autograd.grad(parts.sum(), whole)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        return
    step = 1e-2
    for row, column in ((0, 0), (1, 4), (4, 2), (5, 8)):
        moved = torch.zeros_like(draft_head)
        moved[row, column] = step
        with torch.no_grad():
            up, down = (loss(draft_head + sign * moved, teacher.float(), token).sum() for sign in (1, -1))
        assert float(found[row, column]) == pytest.approx(float((up - down) / (2 * step)), abs=2e-3)


@pytest.mark.parametrize("name", [one for one in LOSSES if one != "cross-entropy"])
def test_losses_are_zero_at_the_teachers_distribution(name: str) -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    same = LOSSES[name](logits, logits.log_softmax(-1), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(same, torch.zeros(4), atol=1e-6, rtol=0)


def test_sums_of_losses_are_written_out(distributions: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    found = resolve("kl + 0.1 cross-entropy")(*distributions)
    torch.testing.assert_close(found, kl(*distributions) + 0.1 * cross_entropy(*distributions))
    torch.testing.assert_close(resolve("2 tv")(*distributions), 2 * tv(*distributions))
    with pytest.raises(OutriderError, match="kl"):
        resolve("lk")
    with pytest.raises(OutriderError, match="weight"):
        resolve("much kl")
    with pytest.raises(OutriderError, match="temperature"):
        kl(*distributions, temperature=0)


@pytest.mark.parametrize("code", [True, False])
def test_losses_of_16_bit_logits_agree_with_32_bits(code: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not code:
        monkeypatch.setattr(native, "library", lambda: None)
    generator = torch.Generator().manual_seed(1)
    logits = (6 * torch.randn(5, 4096, generator=generator)).bfloat16()
    teacher = (5 * torch.randn(5, 4096, generator=generator)).log_softmax(-1)
    teacher[3] = (40 * torch.randn(4096, generator=generator)).log_softmax(-1)
    token = torch.zeros(5, dtype=torch.long)
    wide = logits.double().requires_grad_()
    narrow = logits.clone().requires_grad_()
    each, wanted = kl(narrow, teacher, token), (teacher.double().exp() * (teacher - wide.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(each.double(), wanted, atol=1e-4, rtol=1e-5)
    (each * torch.arange(1, 6)).sum().backward()
    (wanted * torch.arange(1, 6)).sum().backward()
    assert narrow.grad is not None and wide.grad is not None
    torch.testing.assert_close(narrow.grad.double(), wide.grad, atol=1e-5, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kl", "kl + 0.5 cross-entropy"])
def test_the_divergence_in_triton_is_the_plain_one(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    z, known = (torch.randn(33, 5000, generator=generator).mul(4) for _ in range(2))
    log_p, token = known.log_softmax(-1), torch.arange(-1, 32) * 150
    token[0] = -1
    results = []
    for device in ("cpu", "cuda"):
        logits = z.to(device, copy=True).requires_grad_()
        each = resolve(name)(logits, log_p.to(device), token.to(device))
        each.sum().backward()
        assert logits.grad is not None
        results.append((each.detach().cpu(), logits.grad.cpu()))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-4)
