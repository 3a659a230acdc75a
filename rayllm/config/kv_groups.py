"""`kv_groups`: which layers of a model keep their KV in the same blocks.

A block of the pool holds block_size tokens of the layers of one group. All layers of a group forget at the same
distance, so a group with a window lets go of the blocks behind it while others keep theirs. Blocks of all groups are of
the same size and come from one pool, so memory moves freely between the groups.

A layer that attends to the keys and values of another is in no group: it has the cache of that one.

Layers of the same window and of the same shape of keys and values make a group, or several, because the groups have to
be of about the same size. What a group lacks to a whole block is lost. docs/decisions/kv_groups.md explains the choice.

Layers that keep a recurrent state have groups of their own. A block of such a group holds their states after the last
of its tokens that is computed, so a token needs the block of the token before it, and its own: such a group forgets as
one with a window of two tokens does. docs/decisions/recurrent_state.md explains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from rayllm.config.model_spec import ModelSpec

CONTEXT = 32768  # tokens of a sequence for which what is lost is weighed, unless the model has fewer
MOST_LOST = 0.05  # of what the layers need: with fewer groups a step has less to do
STATE_WINDOW = 2  # tokens: the state after the token before, and the one after the token itself
STATE_SHARE = 2  # a block has room for the keys and values of so many times as many layers as for states


class KVGroup(NamedTuple):
    """Layers that keep their KV in the same blocks."""

    # Tokens that a query sees at most, counting itself, in the layer that sees most; None for all.
    window: int | None
    # Ascending.
    layers: tuple[int, ...]
    # They keep a recurrent state.
    recurrent: bool = False


class _Kind(NamedTuple):
    """Layers that are alike."""

    window: int | None
    # Numbers of the keys of one token in one layer; there are as many of values.
    width: int
    layers: list[int]


def kv_groups(spec: ModelSpec, tp: int) -> tuple[KVGroup, ...]:
    """The groups of a model on `tp` ranks, in which each layer with keys of its own occurs once. One if all are alike.

    Those of layers with a recurrent state come last, each of half as many layers as the largest of the others.

    Of all ways to size a block, those lose least for a sequence of CONTEXT tokens that have at most MOST_LOST of what
    the layers need; of these it is the one with the fewest groups. One group for all layers, whose windows then do not
    matter, is one of the ways.
    """
    kinds = _kinds(spec, tp)
    context = min(CONTEXT, spec.max_model_len)
    needed = sum(kind.width * len(kind.layers) * _held(kind.window, context) for kind in kinds)

    def lost(way: tuple[int, list[KVGroup]]) -> float:
        width, groups = way
        return width * sum(_held(group.window, context) for group in groups) / needed - 1

    def rank(way: tuple[int, list[KVGroup]]) -> tuple[bool, float, float]:
        share = lost(way)
        return (False, len(way[1]), share) if share <= MOST_LOST else (True, share, len(way[1]))

    _width, groups = min(_ways(kinds), key=rank)
    if spec.gated_delta is not None:
        states = [layer for layer, is_recurrent in enumerate(spec.gated_delta.layers) if is_recurrent]
        size = max(1, max(len(group.layers) for group in groups) // STATE_SHARE)
        parts = [tuple(states[begin : begin + size]) for begin in range(0, len(states), size)]
        groups += [KVGroup(STATE_WINDOW, layers, recurrent=True) for layers in parts]
    return tuple(groups)


def block_tokens(spec: ModelSpec, tp: int, step: int, *, dtype_bytes: int, kv_bytes: int) -> int:
    """Tokens of a block: `step`, or the least multiple of it for which a block has room for a group's states.

    With fewer tokens a block of keys and values would be as large as one of states, and mostly empty.
    dtype_bytes, kv_bytes: of a number of the model's dtype, and of the cache's.
    """
    if spec.gated_delta is None:
        return step
    groups = kv_groups(spec, tp)
    states = max((len(group.layers) for group in groups if group.recurrent), default=0)
    of_token = max(
        sum(2 * prod(spec.kv_shape(layer, tp)) for layer in group.layers) for group in groups if not group.recurrent
    )
    needed = states * spec.gated_delta.state_bytes(tp, dtype_bytes)
    return max(1, -(-needed // (of_token * kv_bytes * step))) * step


def _kinds(spec: ModelSpec, tp: int) -> list[_Kind]:
    kinds: dict[tuple[int | None, int], _Kind] = {}
    for layer, window in enumerate(spec.sliding_windows):
        is_recurrent = spec.gated_delta is not None and spec.gated_delta.layers[layer]
        if is_recurrent or spec.kv_layer(layer) != layer:
            continue
        num_heads, head_dim = spec.kv_shape(layer, tp)
        kind = (window, num_heads * head_dim)
        kinds.setdefault(kind, _Kind(*kind, [])).layers.append(layer)
    return list(kinds.values())


def _held(window: int | None, context: int) -> int:
    """Tokens that a layer keeps of a sequence."""
    return context if window is None else min(window, context)


def _ways(kinds: list[_Kind]) -> Iterator[tuple[int, list[KVGroup]]]:
    """(numbers of one token's keys that a block has room for, the groups with such blocks)."""
    if len({kind.width for kind in kinds}) == 1:
        layers = sorted(layer for kind in kinds for layer in kind.layers)
        windows = [kind.window for kind in kinds if kind.window is not None]
        yield (
            kinds[0].width * len(layers),
            [KVGroup(max(windows) if len(windows) == len(kinds) else None, tuple(layers))],
        )
    for width in sorted({kind.width * count for kind in kinds for count in range(1, len(kind.layers) + 1)}):
        if width >= max(kind.width for kind in kinds):
            yield width, [group for kind in kinds for group in _split(kind, width // kind.width)]


def _split(kind: _Kind, size: int) -> list[KVGroup]:
    """A kind's layers in groups of at most `size`."""
    layers = kind.layers
    return [KVGroup(kind.window, tuple(layers[begin : begin + size])) for begin in range(0, len(layers), size)]
