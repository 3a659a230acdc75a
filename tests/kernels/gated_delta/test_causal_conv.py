"""The causal convolution over several steps: Triton against the reference, and that against all tokens at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.closeness import check_close
from support.states import CHANNELS, STEPS, WIDTH

from rayllm_kernels.ops import Chunks, Contexts, StateCache

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", STEPS)
def test_causal_conv(randn, kernels, reference, state_case, step, dtype):
    ours = state_case(*step, dtype=dtype)
    theirs = ours.copy()
    x = randn(ours.num_rows, CHANNELS + 8, dtype=dtype)[:, :CHANNELS]
    weight = randn(WIDTH, CHANNELS, dtype=dtype)
    results = []
    for case, module in ((ours, kernels), (theirs, reference)):
        out = torch.full_like(x, 7.0).contiguous()
        module.causal_conv(x, weight, case.cache, case.chunks, out)
        results.append(out)
    check_close(*results, terms=WIDTH)
    torch.testing.assert_close(ours.cache.conv, theirs.cache.conv, rtol=0, atol=0, equal_nan=True)


def test_a_width_of_1_is_refused(randn, each, device):
    x, tables = randn(2, CHANNELS), torch.zeros(2, 1, dtype=torch.int32, device=device)
    cache = StateCache(torch.empty(1, 0, CHANNELS, device=device), torch.empty(0), 4)
    chunks = Chunks(Contexts(tables, torch.ones(2, dtype=torch.int32, device=device)), None, 1)
    with pytest.raises(ValueError, match=r"^weight must have a width of 2 or more"):
        each.causal_conv(x, randn(1, CHANNELS), cache, chunks, torch.empty_like(x))


def test_in_steps_as_at_once(randn, each, device):
    """However a sequence is cut into steps; the blocks hold the inputs before their ends."""
    x, weight, size = randn(23, CHANNELS), randn(WIDTH, CHANNELS), 4
    padded = F.pad(x.T[None].double(), (WIDTH - 1, 0))
    expected = F.silu(F.conv1d(padded, weight.T[:, None].double(), groups=CHANNELS))[0].T.float()
    for steps in ([23], [1] * 23, [2, 9, 1, 11], [3, 1, 4, 15]):
        cache = StateCache(torch.full((6, WIDTH - 1, CHANNELS), float("nan"), device=device), torch.empty(0), size)
        tables, out, done = torch.arange(5, -1, -1, dtype=torch.int32, device=device)[None], torch.empty_like(x), 0
        for count in steps:
            lens = torch.tensor([done + count], dtype=torch.int32, device=device)
            starts = torch.tensor([0, count], dtype=torch.int32, device=device) if count > 1 else None
            chunks = Chunks(Contexts(tables, lens), starts, count)
            each.causal_conv(x[done : done + count], weight, cache, chunks, out[done : done + count])
            done += count
        check_close(out, expected, terms=WIDTH)
        for block in range(6):
            end = min(23, (block + 1) * size)
            assert torch.equal(cache.conv[5 - block], x[end - WIDTH + 1 : end])
