"""Which modules of a checkpoint a projection is, and what a rank has of an adapter's matrices for them."""

from __future__ import annotations

import torch
from support.thread_group import ThreadGroup

from rayllm.layers.layer import BuildContext, Heads
from rayllm.layers.linear import ColumnLinear, InterleavedQKVLinear, Part, RowLinear, qkv_parts
from rayllm.layers.lora import AdapterState, HostMatrices


def context(rank: int = 0, size: int = 1, **options) -> BuildContext:
    tp = ThreadGroup.make(size)[rank]
    adapters = AdapterState(2, 4)
    return BuildContext(tp, torch.device("cpu"), torch.float32, 64, prefix="layer.", adapters=adapters, **options)


def test_each_projection_is_a_module():
    build = context(1, 2)
    linear = ColumnLinear(build, 8, qkv_parts(build, Heads(4, 2, 2)), bias=False)
    rows = torch.arange(8)[:, None]
    found = [
        (m.name, m.inputs, m.outputs, m.rows(rows[: m.outputs]).flatten().tolist()) for m in linear.adapters.modules
    ]
    assert found == [
        ("layer.q_proj", 8, 8, [4, 5, 6, 7]),
        ("layer.k_proj", 8, 4, [2, 3]),
        ("layer.v_proj", 8, 4, [2, 3]),
    ]


def test_parts_that_are_stored_as_one_are_one_module():
    parts = [Part("qkv", 12, 2, 3), Part("qkv", 12, 8, 2), Part("gate", 6, 0, 6)]
    linear = ColumnLinear(context(), 8, parts, bias=False)
    fused, gate = linear.adapters.modules
    assert (fused.name, fused.outputs, fused.num_rows, gate.num_rows) == ("layer.qkv", 12, 5, 6)
    assert fused.rows(torch.arange(12)[:, None]).flatten().tolist() == [2, 3, 4, 8, 9]


def test_interleaved_heads():
    (module,) = InterleavedQKVLinear(context(1, 2), 4, Heads(4, 4, 1), bias=False).adapters.modules
    assert (module.name, module.outputs, module.num_rows) == ("layer", 12, 6)
    assert module.rows(torch.arange(12)[:, None]).flatten().tolist() == [6, 9, 7, 10, 8, 11]


def test_inputs_of_a_row_parallel_projection():
    (module,) = RowLinear(context(1, 2), 8, 6, bias=False).adapters.modules
    assert (module.name, module.inputs, module.outputs, module.num_rows) == ("layer", 8, 6, 6)
    assert module.columns == slice(4, 8)


def test_without_slots_there_is_nothing():
    build = BuildContext(ThreadGroup.make(1)[0], torch.device("cpu"), torch.float32, 64, prefix="layer.")
    assert RowLinear(build, 8, 6, bias=False).adapters is None


@torch.inference_mode()
def test_a_slot_is_overwritten_whole():
    """What a larger adapter left beyond the rank of a smaller one has no effect."""
    linear = RowLinear(context(), 8, 6, bias=False)
    linear.weight.data.zero_()
    a, b = torch.randn(4, 8), torch.randn(6, 4)
    linear.adapters.put(1, [HostMatrices(0, a, b)], torch.tensor([4], dtype=torch.int32))
    linear.adapters.put(1, [HostMatrices(0, a[:2], b[:, :2])], torch.tensor([2], dtype=torch.int32))
    x = torch.randn(3, 8)
    linear.adapters.state.begin(torch.tensor([1, -1, 0], dtype=torch.int32), None)
    expected = torch.zeros(3, 6)
    expected[0] = b[:, :2] @ (a[:2] @ x[0])
    torch.testing.assert_close(linear(x), expected)
    linear.adapters.put(1, [], torch.tensor([0], dtype=torch.int32))
    assert not linear(x).any()
