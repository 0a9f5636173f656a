"""Loss functions: the distance of a draft head's distribution from its teacher's, per position.

Each takes the draft head's logits, the teacher's log-probabilities over the same tokens, and the next token; nothing
else is known about the draft head. `resolve` returns them by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.errors import InvalidOption, unknown
from outrider.core.kernels import gpu, native

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # draft head [N, V], teacher [N, V], token [N] (-1: not in V) -> [N]

_ROWS = (64, 1 << 14)  # per chunk, on a CPU and elsewhere


class _Divergence(torch.autograd.Function):
    """sum p (log p - log softmax(z)) and its gradient softmax(z) - p, computed together: by compiled kernels, else in
    chunks of rows, which on a CPU fit into its cache."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, log_p: Tensor) -> Tensor:
        if _kernel_supports(z, log_p):
            each, back = native.divergence(z, log_p)
            ctx.save_for_backward(back)
            return each
        each, back = log_p.new_empty(len(z)), torch.empty_like(z)
        size = _ROWS[z.device.type != "cpu"]
        for start in range(0, len(z), size):
            rows = slice(start, start + size)
            known = log_p[rows]
            log_q, p = z[rows].float().log_softmax(-1), known.exp()
            each[rows] = torch.linalg.vecdot(p, known - log_q)
            back[rows] = log_q.exp_().sub_(p)
        ctx.save_for_backward(back)
        return each

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return back * grad[:, None].to(back.dtype), None


class _Fused(torch.autograd.Function):  # pragma: CUDA
    """The divergence plus `hard` times the cross-entropy, in Triton."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, log_p: Tensor, token: Tensor, hard: float) -> Tensor:
        fused = _triton()
        assert fused is not None
        each, back = fused(z, log_p, token, hard)
        ctx.save_for_backward(back)
        return each

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return back * grad[:, None].to(back.dtype), None, None, None


@functools.cache
def _triton() -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] | None:
    """The divergence in Triton, where that is installed."""
    if gpu.hindrance() is not None:
        return None
    from outrider.core.kernels.triton_divergence import divergence  # pragma: CUDA

    return divergence  # pragma: CUDA


def _kernel_supports(z: Tensor, log_p: Tensor) -> bool:
    """Whether the compiled kernel supports these tensors."""
    if z.device.type != "cpu" or z.dtype != torch.bfloat16 or log_p.dtype != torch.float32 or z.shape[-1] % 16:
        return False
    return native.library() is not None


def cross_entropy(draft_head: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """Cross-entropy of the next token; on the teacher's own answers, sequence-level distillation (Kim & Rush, arXiv
    1606.07947). Tokens outside the draft head's vocabulary are ignored."""
    return F.cross_entropy(draft_head.float(), token, reduction="none", ignore_index=-1)


def kl(draft_head: Tensor, teacher: Tensor, token: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || draft head) at a temperature, times the temperature squared, so that gradients keep their scale
    (Hinton et al., arXiv 1503.02531)."""
    log_p = _cooled(teacher, temperature)
    cooled = draft_head / temperature if temperature != 1 else draft_head
    if cooled.is_cuda and _triton() is not None:  # pragma: CUDA
        each: Tensor = _Fused.apply(cooled, log_p, token, 0.0)  # type: ignore[no-untyped-call]
    else:
        each = _Divergence.apply(cooled, log_p)  # type: ignore[no-untyped-call]
    return each * temperature**2


def kl_and_token(draft_head: Tensor, teacher: Tensor, token: Tensor, hard: float) -> Tensor:
    """KL(teacher || draft head) + `hard` times the cross-entropy of the next token."""
    if draft_head.is_cuda and _triton() is not None:  # pragma: CUDA
        each: Tensor = _Fused.apply(draft_head, teacher.float(), token, hard)  # type: ignore[no-untyped-call]
        return each
    return kl(draft_head, teacher, token) + hard * cross_entropy(draft_head, teacher, token)


def reverse_kl(draft_head: Tensor, teacher: Tensor, token: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(draft head || teacher), which avoids tokens that are improbable under the teacher (MiniLLM, arXiv
    2306.08543)."""
    _, log_p, log_q = _distributions(draft_head, teacher, temperature)
    return (log_q.exp() * (log_q - log_p)).sum(-1) * temperature**2


def jsd(draft_head: Tensor, teacher: Tensor, token: Tensor, blend: float = 0.5) -> Tensor:
    """The generalised Jensen-Shannon divergence, with weight `blend` of the teacher in the mixture (arXiv
    2306.13649)."""
    if not 0 < blend < 1:
        raise InvalidOption(f"blend is {blend}; it must be between 0 and 1; use kl or reverse-kl for the ends")
    p, log_p, log_q = _distributions(draft_head, teacher)
    q = log_q.exp()
    middle = (blend * p + (1 - blend) * q).clamp(min=torch.finfo(p.dtype).tiny).log()
    return blend * (p * (log_p - middle)).sum(-1) + (1 - blend) * (q * (log_q - middle)).sum(-1)


def tv(draft_head: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """The total variation, the probability that a drafted token is rejected (DistillSpec, arXiv 2310.08461)."""
    p, _, log_q = _distributions(draft_head, teacher)
    return (p - log_q.exp()).abs().sum(-1) / 2


def acceptance(draft_head: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """-log of the probability that a drafted token is accepted, sum_x min(p, q); its gradient does not vanish where
    that of `tv` does."""
    p, _, log_q = _distributions(draft_head, teacher)
    return -torch.minimum(p, log_q.exp()).sum(-1).clamp(min=1e-6).log()


def adaptive(draft_head: Tensor, teacher: Tensor, token: Tensor, steep: float = 3.0) -> Tensor:
    """KL with weight w = exp(-steep a), total variation with weight 1 - w, for the acceptance probability a (without a
    gradient through w): KL trains a poor draft head faster, and total variation is the objective in the end."""
    p, log_p, log_q = _distributions(draft_head, teacher)
    far = (p - log_q.exp()).abs().sum(-1) / 2
    share = torch.exp(-steep * (1 - far)).detach()
    return share * (p * (log_p - log_q)).sum(-1) + (1 - share) * far


def _cooled(teacher: Tensor, temperature: float) -> Tensor:
    """The teacher's log-probabilities at a temperature."""
    if not temperature > 0:
        raise InvalidOption(f"the temperature of a loss is {temperature}; it must be above 0")
    return teacher.float() if temperature == 1 else F.log_softmax(teacher.float() / temperature, -1)


def _distributions(draft_head: Tensor, teacher: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's probabilities and log-probabilities, and the draft head's log-probabilities."""
    log_p = _cooled(teacher, temperature)
    return log_p.exp(), log_p, F.log_softmax(draft_head.float() / temperature, -1)


LOSSES: Mapping[str, Loss] = {
    "cross-entropy": cross_entropy,
    "kl": kl,
    "reverse-kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "acceptance": acceptance,
    "adaptive": adaptive,
}


def resolve(name: str, **options: float) -> Loss:
    """A loss by name, with options; or a weighted sum such as "kl + 0.1 cross-entropy"."""
    parts = [part.strip() for part in name.split("+")]
    if len(parts) > 1:
        terms = [_weighted(part) for part in parts]
        if options:
            raise InvalidOption("options are for a single loss; for a sum, pass a function instead of a name")
        if [loss for _, loss in terms] == [kl, cross_entropy] and terms[0][0] == 1:
            return partial(kl_and_token, hard=terms[1][0])
        return lambda draft_head, teacher, token: sum(  # type: ignore[return-value]
            weight * loss(draft_head, teacher, token) for weight, loss in terms
        )
    weight, loss = _weighted(parts[0])
    chosen: Loss = partial(loss, **options) if options else loss
    return chosen if weight == 1 else lambda draft_head, teacher, token: weight * chosen(draft_head, teacher, token)


def _weighted(part: str) -> tuple[float, Loss]:
    number, _, name = part.rpartition(" ")
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    try:
        return float(number or 1), LOSSES[name]
    except ValueError:
        raise InvalidOption(f"'{number}' is not a weight; write a sum of losses as 'kl + 0.1 cross-entropy'") from None
