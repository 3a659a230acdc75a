"""Linear layers whose weights stay in fewer bits: what they compute, beside a norm, an activation and adapters."""

from __future__ import annotations

import pytest
import torch
from support.thread_group import ThreadGroup

from rayllm.config.quantization import FP8_BY_CHANNEL, WeightFormat
from rayllm.layers.layer import BuildContext, Heads
from rayllm.layers.linear import ColumnLinear, GatedLinear, RowLinear, column_part, qkv_parts
from rayllm.layers.lora import AdapterState, HostMatrices
from rayllm.layers.matrices.plain import PlainMatrix
from rayllm.layers.norm import RMSNorm
from rayllm.models.loader import DummyCheckpoint
from rayllm.models.quantised import QuantisingSource
from rayllm_kernels import ops

CPU = torch.device("cpu")
BLOCKS = WeightFormat("fp8", 8, (32, 32), activations="dynamic")
STATIC = WeightFormat("fp8", 8, (None, None), activations="static")
WEIGHTS_ALONE = WeightFormat("fp8", 8, (1, None))
INT4 = WeightFormat("packed", 4, (1, 32))
FORMATS = [FP8_BY_CHANNEL, BLOCKS, STATIC, WEIGHTS_ALONE, INT4]
HIDDEN, INNER = 64, 96


class Layers:
    """A norm and an MLP of one format on one rank, with dummy weights. options: of the context."""

    def __init__(self, found, rank=0, size=1, dtype=torch.float32, **options):
        formats = found if callable(found) else lambda _module: found
        tp = ThreadGroup.make(size)[rank]
        build = self.build = BuildContext(tp, CPU, dtype, 64, formats=formats, **options)
        parts = [column_part(build, name, INNER) for name in ("gate", "up")]
        self.norm = RMSNorm(build.at("norm"), HIDDEN, 1e-5)
        self.gate_up = GatedLinear(build, HIDDEN, parts, "silu", bias=False)
        self.down = RowLinear(build.at("down"), INNER, HIDDEN, bias=False)
        self.qkv = ColumnLinear(build, HIDDEN, qkv_parts(build, Heads(4, 2, 20)), bias=True)
        self.gate_up.feeds(self.down)
        self.source = QuantisingSource(DummyCheckpoint(1, CPU, dtype), formats, CPU)
        for layer in (self.norm, self.gate_up, self.down, self.qkv):
            layer.load(self.source)
        assert not any(map(self.source.unwritten, (self.norm, self.gate_up, self.down, self.qkv)))


def multiplied(linear, x):
    """x W^T + bias in float64, x rounded as the layer's matrix takes it."""
    takes, weight = linear.matrix.takes, linear.matrix._operand.dequantised().double()
    x = x.double() if takes is None else ops.to_fp8(x, takes).dequantised().double()
    y = x @ weight.T
    return y if linear.bias is None else y + linear.bias.double()


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("found", FORMATS, ids=str)
@torch.inference_mode()
def test_products_are_those_of_the_numbers(found):
    layers, x, residual = Layers(found), torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    close(layers.qkv(x), multiplied(layers.qkv, x))
    y, total = layers.qkv.after_norm(x, residual, layers.norm)
    assert torch.equal(total, x + residual)
    close(y, multiplied(layers.qkv, layers.norm(total)))
    gate, up = multiplied(layers.gate_up, layers.norm(total)).chunk(2, dim=1)
    inner = (torch.nn.functional.silu(gate) * up).float()
    rows, total = layers.gate_up.after_norm(x, residual, layers.norm)
    assert isinstance(rows, ops.Fp8Rows) == (layers.down.matrix.takes is not None)
    summand, left = layers.down.onto(rows, total)
    assert left is total
    torch.testing.assert_close(summand.double(), multiplied(layers.down, inner), rtol=1e-3, atol=1e-3)
    close(layers.down(inner), multiplied(layers.down, inner))


@pytest.mark.parametrize("found", FORMATS, ids=str)
@torch.inference_mode()
def test_the_deterministic_mode(found):
    """A row is the same in any batch, and what it is otherwise."""
    layers, plain, x = Layers(found, deterministic=True), Layers(found), torch.randn(9, HIDDEN)

    def mlp(layers, x):
        rows, total = layers.gate_up.after_norm(x, None, layers.norm)
        return layers.down.onto(rows, total)[0]

    whole = mlp(layers, x)
    for first, last in ((0, 1), (3, 5), (8, 9)):
        assert torch.equal(mlp(layers, x[first:last]), whole[first:last])
    torch.testing.assert_close(whole, mlp(plain, x), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_adapters_get_tokens_as_they_are():
    state = AdapterState(2, 4)
    layers, x = Layers(FP8_BY_CHANNEL, adapters=state), torch.randn(3, HIDDEN)
    a, b = torch.randn(4, INNER), torch.randn(HIDDEN, 4)
    layers.down.adapters.put(1, [HostMatrices(0, a, b)], torch.tensor([4], dtype=torch.int32))
    state.begin(None, None)
    assert isinstance(layers.gate_up(x), ops.Fp8Rows)
    state.begin(torch.tensor([-1, 1, -1], dtype=torch.int32), None)
    inner = layers.gate_up(x)
    expected = multiplied(layers.down, inner)
    expected[1] += b.double() @ (a.double() @ inner[1].double())
    close(layers.down(inner), expected)
    y, _ = layers.gate_up.after_norm(x, x, layers.norm)
    assert isinstance(y, torch.Tensor)


def test_blocks_are_cut_at_the_borders_of_projections():
    """The largest granule that begins where each projection does, in the checkpoint and in the layer."""
    assert Layers(BLOCKS).qkv.matrix._operand.rows == 8  # 80, 40 and 40 rows
    assert Layers(BLOCKS).gate_up.matrix._operand.rows == 32
    assert Layers(BLOCKS, 1, 2).gate_up.matrix._operand.rows == 16  # from row 48 of 96
    assert isinstance(Layers(BLOCKS, 1, 2).down.matrix, PlainMatrix)  # from input 48
    assert isinstance(Layers(WeightFormat("fp8", 8, (32, 16))).down.matrix, PlainMatrix)
    assert Layers(FP8_BY_CHANNEL, 1, 2).down.matrix.weight_scale.shape == (HIDDEN, 1)


def test_projections_of_one_input_that_differ_are_in_dtype():
    layers = Layers(lambda module: None if module == "up" else FP8_BY_CHANNEL)
    assert isinstance(layers.gate_up.matrix, PlainMatrix)
    assert not isinstance(layers.down.matrix, PlainMatrix)
    layers = Layers(lambda module: INT4 if module == "v_proj" else BLOCKS)
    assert isinstance(layers.qkv.matrix, PlainMatrix)
    assert ColumnLinear(layers.build.unquantised, 8, [column_part(layers.build, "x", 8)], bias=False).matrix.fuses


@torch.inference_mode()
def test_a_plain_product_before_one_in_fp8():
    """The activation is in the first product, and the second rounds what it gets."""
    layers, x = Layers(lambda module: FP8_BY_CHANNEL if module == "down" else None), torch.randn(3, HIDDEN)
    inner = layers.gate_up(x)
    assert isinstance(inner, torch.Tensor)
    close(layers.down(inner), multiplied(layers.down, inner))


def test_memory_is_that_of_the_bits():
    def num_bytes(found):
        return sum(parameter.nbytes for parameter in Layers(found, dtype=torch.bfloat16).gate_up.parameters())

    rows = 2 * INNER
    assert num_bytes(None) == 2 * rows * HIDDEN
    assert num_bytes(BLOCKS) == rows * HIDDEN + 4 * rows * HIDDEN // 32**2
    assert num_bytes(INT4) == rows * HIDDEN // 2 + 4 * rows * HIDDEN // 32
