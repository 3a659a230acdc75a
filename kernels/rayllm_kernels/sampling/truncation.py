"""min_p, top_k and top_p as one number a row: the smallest logit that is kept.

All three keep the most likely tokens, so together they are a cutoff, and tokens of equal logit are kept or dropped
together: the result cannot depend on how a sort orders ties.

    min_p   keeps tokens with logit >= highest + temperature * log(min_p): probability >= min_p * the highest one
    top_k   keeps the k highest logits, and what ties with the last of them (as transformers and vLLM do)
    top_p   of what those two keep, renormalised, keeps the fewest tokens whose probabilities sum to at least p
            (Holtzman et al. 2020, "The curious case of neural text degeneration"), and what ties with the last. In
            other words, a token is kept if the tokens of higher logit have less than p together

Probabilities are summed as integers, in units of 2^-40 of the row's highest (`weights`). Integer sums are exact in any
order, and the integers are made of float32 operations that are rounded alike everywhere, so what is kept is the same
in every batch, by every way of finding it and on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_vectors
from ..dispatch import TritonModule, on_triton
from .draw import DrawRows
from .noise import gumbel_noise

LOG2E = 1.4426950408889634
# 2^r = 1 + r * (c1 + r * (c2 + r * (c3 + r * c4))) for r in [0, 1): least squares of the relative error, which is at
# most 3.5e-6, with exact ends; in float32 it rises with r and stays below 2.
EXP2_COEFFICIENTS = (0.6930321455001831, 0.2413797676563263, 0.05203237384557724, 0.013555744662880898)
_LOWEST = torch.finfo(torch.float32).min


_kernel = TritonModule("rayllm_kernels.sampling.truncation_kernel")


class CutRows(NamedTuple):
    """The C rows of a batch that use top_k, top_p or min_p."""

    rows: Tensor  # [C] int64, theirs in the batch, none twice
    top_k: Tensor  # [C] int64, 1 to V, or 0 for all
    top_p: Tensor  # [C] fp32, 1 for all
    log_min_p: Tensor  # [C] fp32, log of min_p; -inf for all

    def check(self, token_ids: Tensor, logits: Tensor, draw: DrawRows) -> None:
        """Raise ValueError unless these and the arguments are as `truncate_draws` wants them."""
        draw.check(logits)
        count, device = self.rows.numel(), logits.device
        check_vectors(logits.shape[0], torch.int64, device, token_ids=token_ids)
        check_vectors(count, torch.int64, device, rows=self.rows, top_k=self.top_k)
        check_vectors(count, torch.float32, device, top_p=self.top_p, log_min_p=self.log_min_p)


def truncate_draws(token_ids: Tensor, logits: Tensor, draw: DrawRows, cut: CutRows) -> None:
    """Make tokens drawn by `gumbel_argmax` draws from what top_k, top_p and min_p keep of their rows, in place.

    token_ids: [N] int64, its result. logits, draw: its arguments; noise_scale was 1 in the rows that are cut. Each of
    the three keeps tokens of equal logit together, and always the most likely ones. A row with neutral values keeps
    its token.
    """
    cut.check(token_ids, logits, draw)
    rows, top_k, top_p, log_min_p = cut
    if not rows.shape[0]:
        return
    if on_triton(logits):
        _kernel.truncate_draws(token_ids, logits, draw, cut)
        return
    # Looks at values to compute only what is needed: a token that is kept was the argmax of more, and stands.
    wanted = logits.index_select(0, rows).float()
    cutoffs = cutoff(wanted, draw.temperature[rows], top_k, top_p, log_min_p)
    dropped = (wanted.gather(1, token_ids[rows][:, None])[:, 0] < cutoffs).nonzero()[:, 0]
    wanted, cutoffs, rows = wanted[dropped], cutoffs[dropped], rows[dropped]
    scores = wanted * (1.0 / draw.temperature[rows])[:, None]
    scores.add_(gumbel_noise(draw.seeds[rows], draw.positions[rows], logits.shape[1]))
    scores.masked_fill_(wanted < cutoffs[:, None], float("-inf"))
    token_ids[rows] = scores.argmax(dim=1)


def cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """The smallest logit of each row that is kept: [C] float32. It never exceeds the row's maximum.

    logits: [C, V] float32, -inf allowed. temperature: [C] float32. top_k: [C] int64, 1 to V, or 0 for all. top_p: [C]
    float32, 1 for all. log_min_p: [C] float32, -inf for all. Reads top_k and top_p on the host: not for CUDA.
    """
    highest = logits.amax(dim=1)
    floor = highest + temperature * log_min_p
    nucleus_asked = top_p < 1.0
    # How many of the highest logits have to be looked at: all if a row has top_p without top_k.
    top_p_alone = bool((nucleus_asked & (top_k == 0)).any())
    num_candidates = logits.shape[1] if top_p_alone else int(top_k.max())
    if num_candidates == 0:
        return floor
    candidates = logits.topk(num_candidates, dim=1).values
    kth = candidates.gather(1, (top_k - 1).clamp_(min=0)[:, None])[:, 0]
    floor = torch.where(top_k > 0, torch.maximum(kth, floor), floor)
    if not bool(nucleus_asked.any()):
        return floor

    # The total is taken over the whole row: ties with the k-th may go on beyond the candidates.
    total = weights(logits, highest, temperature, floor).sum(dim=1)
    target = (top_p.double() * total.double()).ceil_().long()
    reached = weights(candidates, highest, temperature, floor).cumsum(dim=1)
    # Entries before the one that reaches p. If only ties beyond the candidates reach it, the last candidate is one too.
    before = (reached < target[:, None]).sum(dim=1).clamp_(max=candidates.shape[1] - 1)
    nucleus = candidates.gather(1, before[:, None])[:, 0]
    return torch.where(nucleus_asked, torch.maximum(nucleus, floor), floor)


def weights(logits: Tensor, highest: Tensor, temperature: Tensor, floor: Tensor) -> Tensor:
    """floor(2^40 * exp((logits - highest) / temperature)) up to a relative error of 1e-5, 0 where logits < floor.

    logits: [C, X] float32. highest, temperature, floor: [C] float32. Returns [C, X] int64. The exponent to the base 2
    is taken in steps of 2^-17, and 2^fraction from a polynomial: nothing but single float32 operations and integers.
    """
    scale = torch.full_like(temperature, LOG2E) / temperature
    # A row of only -inf has no maximum to subtract.
    exponent = (logits - highest.clamp(min=_LOWEST)[:, None]).mul_(scale[:, None])
    bits = exponent.clamp_(min=-63.0).add_(127.0).view(torch.int32)  # 64 to 127: steps of 2^-17
    r = ((bits & 0x1FFFF) << 6).bitwise_or_(0x3F800000).view(torch.float32).sub_(1.0)
    c1, c2, c3, c4 = EXP2_COEFFICIENTS
    mantissa = (r * c4).add_(c3).mul_(r).add_(c2).mul_(r).add_(c1).mul_(r).add_(1.0)
    integer = mantissa.view(torch.int32).bitwise_and_(0x7FFFFF).bitwise_or_(0x800000).long() << 17
    integer >>= 63 - ((bits >> 17) & 63)
    return integer.masked_fill_(logits < floor[:, None], 0)
