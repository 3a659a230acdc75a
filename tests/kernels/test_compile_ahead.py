"""Kernels compiled ahead: side by side, none launched, all there at the end. Needs no GPU, only the compiler."""

from __future__ import annotations

import os

# A driver that knows for what to compile; whoever launches a kernel finds no launcher.
SCRIPT = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
from rayllm_kernels import ops, triton_kernels

launch = JITFunction.run
with ops.compile_only():
    for dim in (256, 256, 512, 1024):
        x, weight = torch.ones(4, dim), torch.ones(dim)
        y = triton_kernels.rms_norm(x, weight, 1e-5)
        assert y.shape == x.shape
    assert triton_kernels.silu_and_mul(torch.ones(4, 512)).shape == (4, 256)
assert JITFunction.run is launch

try:
    with ops.compile_only():
        raise KeyError("a step that fails")
except KeyError:
    assert JITFunction.run is launch
else:
    raise AssertionError("nothing was raised")
print("passed")
"""


def test_kernels_are_compiled_and_not_run(run_compiler, tmp_path):
    assert run_compiler(SCRIPT, TRITON_CACHE_DIR=str(tmp_path)).strip() == "passed"
    compiled = sorted(path.stem for path in tmp_path.rglob("*.cubin"))
    assert compiled == ["_rms_norm_kernel"] * 3 + ["_silu_and_mul_kernel"]


def test_children_share_the_jobs_and_leave_nothing(tmp_path):
    from rayllm_kernels.compile_ahead import compile_in_children

    def job(number: int) -> None:
        if number % 7 == 3:
            raise ValueError("a kernel that cannot be compiled")
        (tmp_path / str(number)).write_text(str(os.getpid()))

    compile_in_children([lambda number=number: job(number) for number in range(40)])
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [i for i in range(40) if i % 7 != 3]
    writers = {int(path.read_text()) for path in tmp_path.iterdir()}
    assert os.getpid() not in writers
    assert not any(os.path.exists(f"/proc/{pid}") for pid in writers)
    compile_in_children([])
