"""What the Hopper kernels share beside `compat`."""

# mypy: allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def activate(x, ACT: gl.constexpr):
    """As `activation.activate`, which is Triton's."""
    if ACT == "silu":
        return x / (1.0 + gl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@gluon.jit
def barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers in shared memory; a phase of one is complete after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=arrivals)
    return found
