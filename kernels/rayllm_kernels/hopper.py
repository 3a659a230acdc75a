"""What the Hopper kernels share beside `compat`."""

# mypy: allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import copy_async

WHOLE_ROWS = 64  # of tokens, up to which a tile's are one copy: two cost more than what is past the end mostly does
ROW_BOX = 32  # rows of larger tiles that a copy takes: smaller ones take longer


def row_box(tile_tokens: int) -> int:
    """How many rows of a tile's tokens a tensor copy takes at a time, for `copy_rows`."""
    return tile_tokens if tile_tokens <= WHOLE_ROWS else ROW_BOX


# Of fp32: one exponential and one reciprocal, without the steps for tiny and huge numbers that `gl.exp` and a division
# have. A multiprocessor makes 16 of either a clock.
SIGMOID = gl.constexpr(
    "{ mul.ftz.f32 $0, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, $0;"
    " add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0; }"
)


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of fp32, as exact as the exponential of the hardware is; 0 below -87."""
    return gl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(x, ACT: gl.constexpr):
    """As `activation.activate`, which is Triton's."""
    if ACT == "silu":
        return x * sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@gluon.jit
def barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers in shared memory; a phase of one is complete after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=arrivals)
    return found


@gluon.jit
def expect_rows(barrier, rows, descriptor, TILE_ROWS: gl.constexpr, MORE: gl.constexpr):
    """Expect what `copy_rows` asks for, and MORE bytes. rows: of the tile or beyond it that there are, one at least."""
    BOX: gl.constexpr = descriptor.block_type.shape[0]
    BYTES: gl.constexpr = descriptor.block_type.nbytes
    BOXES: gl.constexpr = TILE_ROWS // BOX
    boxes = gl.minimum((rows + BOX - 1) // BOX, BOXES)
    for count in gl.static_range(1, BOXES + 1):
        mbarrier.expect(barrier, MORE + count * BYTES, pred=boxes == count)


@gluon.jit
def copy_rows(descriptor, row, column, rows, barrier, boxes, number, TILE_ROWS: gl.constexpr):
    """Start copies of those boxes of a tile's rows that have any, of `rows` from `row` on.

    The others keep what is in shared memory: a tensor copy takes far longer for rows past the end, which it fills with
    zeros, than for those that it reads. boxes: shared memory, in which the tile's are number `number` and following.
    """
    BOX: gl.constexpr = descriptor.block_type.shape[0]
    for i in gl.static_range(TILE_ROWS // BOX):
        copy_async(descriptor, [row + i * BOX, column], barrier, boxes.index(number + i), pred=i * BOX < rows)
