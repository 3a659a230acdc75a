"""Which layers share blocks, and what a long sequence of such a model holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler import Harness

from rayllm.config.kv_groups import CONTEXT, KVGroup, block_tokens, kv_groups
from rayllm.config.model_spec import GatedDeltaSpec
from rayllm.core.memory import KVWindow, longest, most_blocks

SIZE = 16


@dataclass
class Shape:
    """As much of a `ModelSpec` as groups depend on. widths: heads of each layer, of 8 numbers."""

    sliding_windows: tuple[int | None, ...]
    widths: tuple[int, ...] = ()
    max_model_len: int = 131072
    kv_layers: tuple[int, ...] = ()
    gated_delta: GatedDeltaSpec | None = None

    def kv_layer(self, layer: int) -> int:
        return self.kv_layers[layer] if self.kv_layers else layer

    def kv_shape(self, layer: int, tp: int) -> tuple[int, int]:
        return max(1, (self.widths[layer] if self.widths else 8) // tp), 8


def gemma3(num_layers: int, window: int) -> Shape:
    return Shape(tuple(None if layer % 6 == 5 else window for layer in range(num_layers)))


def sizes(shape: Shape) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in kv_groups(shape, 1)]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None,) * 32, [(None, 32)]),
        ((4096,) * 32, [(4096, 32)]),
        ((128, None) * 18, [(128, 18), (None, 18)]),
        ((None,) * 28 + (4096,) * 8, [(None, 14), (None, 14), (4096, 8)]),
        ((None,) * 27 + (4096,), [(None, 28)]),
        ((4096,) * 27 + (4000,), [(4096, 28)]),
        ((None,) * 2 + (128,) * 4 + (1024,) * 2, [(None, 2), (128, 2), (128, 2), (1024, 2)]),
        (gemma3(62, 1024).sliding_windows, [(1024, 10)] * 5 + [(1024, 2), (None, 10)]),
    ],
)
def test_groups_of_known_models(windows, expected):
    assert sizes(Shape(windows)) == expected


def hybrid(num_layers: int, key_heads: int = 16, value_heads: int = 32, kv_heads: int = 2) -> Shape:
    """Qwen3.5's: three layers with a state to one that attends, whose heads are of 256 numbers."""
    layers = tuple(layer % 4 != 3 for layer in range(num_layers))
    delta = GatedDeltaSpec(layers, key_heads, value_heads, 128, 128, 4)
    return Shape((None,) * num_layers, (32 * kv_heads,) * num_layers, gated_delta=delta)


def test_states_have_groups_of_their_own():
    groups = kv_groups(hybrid(40), 1)
    assert [(group.window, len(group.layers), group.recurrent) for group in groups] == [
        (None, 10, False),
        *[(2, 5, True)] * 6,
    ]
    assert groups[0].layers == tuple(range(3, 40, 4))
    assert groups[1].layers == (0, 1, 2, 4, 5)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(40))
    assert [len(group.layers) for group in kv_groups(hybrid(4), 1)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("shape", "tp", "kv_bytes", "expected"),
    [
        (hybrid(40), 1, 2, 528),
        (hybrid(40), 2, 2, 528),
        (hybrid(40), 4, 2, 528),
        (hybrid(40), 1, 4, 272),
        (hybrid(32, kv_heads=4), 1, 2, 272),
        (Shape((None,) * 40), 1, 2, 16),
    ],
)
def test_a_block_has_room_for_states(shape, tp, kv_bytes, expected):
    tokens = block_tokens(shape, tp, 16, dtype_bytes=2, kv_bytes=kv_bytes)
    assert tokens == expected
    assert block_tokens(shape, tp, 100, dtype_bytes=2, kv_bytes=kv_bytes) == -(-tokens // 100) * 100
    if shape.gated_delta is not None:
        groups = kv_groups(shape, tp)
        heads, width = shape.kv_shape(0, tp)
        state = len(groups[1].layers) * shape.gated_delta.state_bytes(tp, 2)
        of_token = len(groups[0].layers) * 2 * heads * width * kv_bytes
        assert (tokens - 16) * of_token < state <= tokens * of_token


def test_a_model_of_short_contexts_has_one_group():
    assert sizes(Shape((4096, None) * 13, max_model_len=4096)) == [(None, 26)]


def test_layers_of_other_shapes_fill_blocks_of_the_same_size():
    """Twice as wide, half as many in a block."""
    assert sizes(Shape((512, 512, 512, 512, None), (4, 4, 4, 4, 8))) == [(512, 2), (512, 2), (None, 1)]
    assert sizes(Shape((512,) * 4 + (None,) * 2, (4, 4, 4, 4, 8, 8))) == [(512, 4), (None, 2)]
    assert kv_groups(Shape((None, 512, None), (4, 8, 4)), 2) == (KVGroup(None, (0, 2)), KVGroup(512, (1,)))


def test_layers_that_read_the_keys_of_others_have_no_blocks():
    """Gemma 4 E2B: 15 layers of 35 have keys of their own, every fifth of them no window and heads twice as large."""
    windows = tuple(None if layer % 5 == 4 else 512 for layer in range(35))
    kv_layers = (*range(15), *(14 if windows[layer] is None else 13 for layer in range(15, 35)))
    groups = kv_groups(Shape(windows, tuple(2 if window is None else 1 for window in windows), 131072, kv_layers), 1)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(15))
    assert [(group.window, len(group.layers)) for group in groups] == [(512, 6), (512, 6), (None, 3)]


WINDOWS = st.sampled_from([None, None, 128, 1024, 4096])


@given(layers=st.lists(st.tuples(WINDOWS, st.sampled_from([4, 4, 8])), min_size=1, max_size=70), tp=st.integers(1, 4))
def test_each_layer_is_in_one_group_and_little_is_lost(layers, tp):
    shape = Shape(tuple(window for window, _ in layers), tuple(width for _, width in layers))
    groups = kv_groups(shape, tp)
    assert groups == kv_groups(shape, tp)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    for window, members, _recurrent in groups:
        assert list(members) == sorted(members)
        seen = {shape.sliding_windows[layer] for layer in members}
        assert len(groups) == 1 or seen == {window}
        assert window is None if None in seen else window == max(seen)
    widths = [sum(shape.kv_shape(layer, tp)[0] for layer in group.layers) for group in groups]
    held = max(widths) * sum(min(group.window or CONTEXT, CONTEXT) for group in groups)
    needed = sum(shape.kv_shape(i, tp)[0] * min(window or CONTEXT, CONTEXT) for i, (window, _) in enumerate(layers))
    assert held <= 1.05 * needed or len({width for _, width in layers}) > 1


@given(
    windows=st.lists(st.sampled_from([None, 1, 7, 16, 100]), min_size=1, max_size=4),
    size=st.sampled_from([1, 4, 16]),
    num_blocks=st.integers(0, 60),
)
def test_the_longest_sequence_is_the_last_that_fits(windows, size, num_blocks):
    groups = tuple(KVWindow(window, size) for window in windows)
    most = longest(groups, num_blocks)
    if most > 10**6:
        assert None not in windows
        assert most_blocks(groups, 10**6) <= num_blocks
        return
    assert most_blocks(groups, most) <= num_blocks < most_blocks(groups, most + 1)


def tokens_seen(shape: Shape, length: int) -> int:
    """Tokens that the layers of a model see of a sequence, summed over the layers."""
    return sum(length if window is None else min(length, window) for window in shape.sliding_windows)


@pytest.mark.parametrize(("num_layers", "window"), [(26, 512), (34, 1024), (48, 1024), (62, 1024)])
def test_a_long_context_needs_little_more_than_its_windows(num_layers, window):
    """Gemma 3's shapes: 32k tokens, two sequences at once, in a pool of 1.1 times what their layers see of them."""
    shape, length, new = gemma3(num_layers, window), 32768, 40
    groups = kv_groups(shape, 1)
    per_block = SIZE * max(len(group.layers) for group in groups)
    needed = tokens_seen(shape, length)
    harness = Harness(
        num_blocks=int(2 * 1.1 * needed / per_block),
        block_size=SIZE,
        windows=tuple(group.window for group in groups),
        max_num_batched_tokens=8192,
        max_model_len=length,
        caching=False,
    )
    harness.worker = Counting()
    for name in ("a", "b"):
        harness.add(name, [ord(name)] * (length - new), max_tokens=new, seed=0, ignore_eos=True)
    while len(harness.outputs) < 2:
        harness.step()
    while harness.scheduler.has_work():
        running = harness.scheduler.state.running
        if all(seq.decoding for seq in running) and len(running) == 2:
            now = sum(tokens_seen(shape, seq.num_computed) for seq in running)
            assert harness.scheduler.stats().num_used_blocks * per_block <= 1.04 * now
        harness.step()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions == 0
    assert all(len(tokens) == new for tokens in harness.outputs.values())


def chat(harness: Harness, name: str, prompt: list[int]) -> int:
    """Run one request alone; returns how many of its prompt tokens were computed."""
    before = harness.worker.num_tokens_computed
    harness.add(name, prompt, max_tokens=1, seed=0, ignore_eos=True)
    harness.run()
    return harness.worker.num_tokens_computed - before


@pytest.mark.parametrize("num_cpu_blocks", [0, 300])
def test_what_lies_behind_windows_pushes_no_other_prompt_out(num_cpu_blocks):
    """A prompt of 40 tokens keeps 10 + 3 blocks, one of 100 25 + 3; with all that they wrote it would be 20 and 50."""
    harness = Harness(
        num_blocks=60, block_size=4, windows=(9, None), max_num_batched_tokens=16, num_cpu_blocks=num_cpu_blocks
    )
    first, second = list(range(40)), [40 + i % 9 for i in range(100)]
    assert chat(harness, "first", first) == 40
    assert chat(harness, "second", second) == 100
    assert chat(harness, "first again", first) == 4
    assert chat(harness, "second again", second) == 4
    assert not any(plan.swap_outs for plan in harness.plans)
    harness.check_done()


def test_where_prompts_part_windows_are_kept_from_the_second_on():
    harness = Harness(num_blocks=70, block_size=4, windows=(9, None, 5), max_num_batched_tokens=16)
    shared = list(range(40))
    computed = []
    for i in range(4):
        computed.append(chat(harness, f"{i}", shared + [40 + i] * 40))
        chat(harness, f"other {i}", [45 + i % 5] * 60)  # takes what is stale
    assert computed == [80, 80, 40, 40]
    harness.check_done()


class Counting:
    """A worker that computes nothing."""

    def execute(self, plan):
        from rayllm.api.types import StepResult

        return StepResult(plan.step_id, [1] * plan.num_sampled)
