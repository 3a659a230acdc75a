"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

A small kernel spends much of its time starting and filling the memory pipeline. Launched with `launch_pdl`, it may do
so, and read what no other kernel writes (the weights), before its predecessor is done; `wait_for_predecessor` then
holds it until all earlier results are visible.

Every program waits exactly once, before it reads a result and before it writes anything. It lets the next kernel start
after that. Short kernels between two long ones (norms, the rotation of heads, the router's choice, the merge of
attention) do so before: the second may then read its weights while the first still runs. It waits for the short one,
which waits for the first, so nothing else of the three overlaps.

Of what kernels write, too, a program may read before it waits what was written before the first of the three began:
the inputs of the step, attention's schedule, the experts of the pairs that a second product adds up. Results of the
kernel just before are not even visible to one that starts after its end, unless it waits.

`Hardware.can_overlap` says which devices can do so. Kernels get its answer at compile time, as OVERLAP.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def announce_and_wait(OVERLAP: tl.constexpr):
    """`wait_for_predecessor` of a short kernel, whose successor may start before its predecessor is done."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
