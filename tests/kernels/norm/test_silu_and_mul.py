"""The gated activation: Triton against the reference, and that against float64."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (3, 10), (2, 3, 48), (1, 2), (2, 2400)])
def test_silu_and_mul(randn, kernels, reference, shape, dtype):
    x = 4 * randn(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = reference.silu_and_mul(x)
    check_close(expected, (gate / (1 + torch.exp(-gate)) * up).to(dtype))
    check_close(kernels.silu_and_mul(x), expected)
    part = x[..., : shape[-1] // 4 * 2]
    check_close(kernels.silu_and_mul(part), reference.silu_and_mul(part))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_saturates_without_nan(kernels, reference, device):
    x = torch.tensor([[-3e4, -100.0, 0.0, 3e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert torch.equal(kernels.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize("act", ["silu", "relu", "gelu", "gelu_new"])
@pytest.mark.parametrize("dim", [20, 96, 3072])
def test_rows_do_not_know_of_other_rows(randn, assert_rows_independent, act, dim):
    """As the deterministic mode asks, of all activations that models have."""
    from rayllm.layers.activation import activation, gated_activation
    from rayllm.layers.layer import BuildContext
    from rayllm.parallel.tp_group import TPGroup

    context = BuildContext(TPGroup.single(), torch.device("cpu"), torch.float32, 64, deterministic=True)
    x = randn(300, 2 * dim, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    assert_rows_independent(lambda x: (gated_activation(act, context)(x),), x)
    assert_rows_independent(lambda x: (activation(act, context)(x),), x)
