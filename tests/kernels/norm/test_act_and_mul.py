"""The gated activation: Triton against the reference, and that against float64."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close, unit_of

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def in_float64(x, act):
    gate, up = x.double().chunk(2, dim=-1)
    if act == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if act == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * up
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (3, 10), (2, 3, 48), (1, 2), (2, 2400)])
def test_act_and_mul(randn, kernels, reference, shape, dtype, act):
    x = 4 * randn(*shape, dtype=dtype)
    expected = reference.act_and_mul(x, act)
    if act == "silu":
        check_close(expected, in_float64(x, act).to(dtype))
        check_close(kernels.act_and_mul(x, act), expected)
    else:  # of a negative gate, 1 + erf and 1 + tanh have few digits left
        exact, (gate, up) = in_float64(x, act), x.double().chunk(2, dim=-1)
        for found in (expected, kernels.act_and_mul(x, act)):
            assert found.dtype == dtype
            assert ((found.double() - exact).abs() <= 6 * unit_of(dtype) * (gate * up).abs() + 1e-7).all()
    part = x[..., : shape[-1] // 4 * 2]
    check_close(kernels.act_and_mul(part, "silu"), reference.act_and_mul(part, "silu"))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new"])
def test_activations_saturate_without_nan(kernels, reference, device, act):
    x = torch.tensor([[-3e4, -100.0, 0.0, 3e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert torch.equal(kernels.act_and_mul(x, act), reference.act_and_mul(x, act))


@pytest.mark.parametrize("act", ["silu", "relu", "gelu", "gelu_new"])
@pytest.mark.parametrize("dim", [20, 96, 3072])
def test_rows_do_not_know_of_other_rows(randn, assert_rows_independent, act, dim):
    """As the deterministic mode asks, of all activations that models have."""
    from rayllm.layers.activation import activation, gated_activation
    from rayllm.layers.layer import BuildContext
    from rayllm.parallel.tp_group import TPGroup

    context = BuildContext(TPGroup.single(), torch.device("cpu"), torch.float32, 64, deterministic=True)
    x = randn(300, 2 * dim, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    if act != "relu":
        assert_rows_independent(lambda x: (gated_activation(act, context)(x),), x)
    assert_rows_independent(lambda x: (activation(act, context)(x),), x)
