"""Kernels compiled ahead: side by side, none launched, all there at the end. Needs no GPU, only the compiler."""

from __future__ import annotations

import os

SCRIPT = """
with dispatch.forced(triton=True):
    with ops.compile_only():
        for dim in (256, 256, 512, 1024):
            x, weight = torch.ones(4, dim), torch.ones(dim)
            assert ops.rms_norm(x, weight, 1e-5).shape == x.shape
        assert ops.act_and_mul(torch.ones(4, 512), "silu").shape == (4, 256)

    try:
        with ops.compile_only():
            ops.rms_norm(torch.ones(4, 2048), torch.ones(2048), 1e-5)
            raise KeyError("a step that fails")
    except KeyError:
        pass
    else:
        raise AssertionError("nothing was raised")

    try:
        ops.rms_norm(torch.ones(4, 256), torch.ones(256), 1e-5)
    except AttributeError as error:  # the driver has nothing to launch with
        assert "Driver" in str(error), error
    else:
        raise AssertionError("kernels are launched again once the context is left")
print("passed")
"""


def test_kernels_are_compiled_and_not_run(run_compiler, tmp_path):
    assert run_compiler(SCRIPT, TRITON_CACHE_DIR=str(tmp_path)).strip() == "passed"
    compiled = sorted(path.stem for path in tmp_path.rglob("*.cubin"))
    assert compiled == ["_act_and_mul_kernel"] + ["_rms_norm_kernel"] * 3


BROKEN = """
import triton
import triton.language as tl

@triton.jit
def broken(x):
    tl.store(x, tl.no_such_function())
"""

AFTER_AN_ERROR = """
import sys
sys.path.insert(0, {folder!r})
from broken_kernel import broken
from rayllm_kernels.compile_ahead import compile_only, launch

x, weight = torch.ones(4, 256), torch.ones(256)
with dispatch.forced(triton=True):
    try:
        with compile_only():
            launch(broken, (1,))(x)
            ops.rms_norm(x, weight, 1e-5)
    except Exception as error:
        assert "no_such_function" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    with compile_only(ignore_errors=True):
        launch(broken, (1,))(x)
        ops.act_and_mul(torch.ones(4, 512), "silu")
print("passed")
"""


def test_an_error_of_the_compiler_is_raised_and_the_next_kernels_are_compiled(run_compiler, tmp_path):
    (tmp_path / "broken_kernel.py").write_text(BROKEN)
    cache = tmp_path / "cache"
    assert run_compiler(AFTER_AN_ERROR.format(folder=str(tmp_path)), TRITON_CACHE_DIR=str(cache)).strip() == "passed"
    assert sorted(path.stem for path in cache.rglob("*.cubin")) == ["_act_and_mul_kernel", "_rms_norm_kernel"]


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
