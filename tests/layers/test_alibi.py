"""ALiBi's slopes: the paper's, for any number of heads, and each rank's part of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from rayllm.layers.alibi import alibi_slopes, rank_slopes
from rayllm.layers.layer import BuildContext
from rayllm.parallel.tp_group import TPGroup

CPU = torch.device("cpu")


def test_slopes_of_the_paper():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16) == [2.0 ** (-i / 2) for i in range(1, 17)]
    assert alibi_slopes(12) == [2.0**-i for i in range(1, 9)] + [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]
    assert alibi_slopes(1) == [2.0**-8]


@given(st.integers(1, 300))
def test_any_number_of_heads(heads):
    slopes = alibi_slopes(heads)
    assert len(set(slopes)) == len(slopes) == heads
    assert all(0 < slope < 1 for slope in slopes)
    torch.testing.assert_close(torch.tensor(slopes), _get_alibi_slopes(heads, CPU), rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_slopes_as_they_share_the_heads(size):
    def slopes(tp):
        return rank_slopes(BuildContext(tp, CPU, torch.bfloat16, 64), 12)

    parts = [slopes(TPGroup(rank, size, object())) for rank in range(size)]
    assert torch.cat(parts).tolist() == slopes(TPGroup.single()).tolist()
    assert parts[0].dtype == torch.float32
