"""What this package uses of Triton, Gluon and PyTorch is as it was: a test fails when a call is renamed or changed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rayllm_kernels

ROOT = Path(rayllm_kernels.__file__).parent


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_tensor_copies_and_barriers_of_gluon():
    from rayllm_kernels import compat

    # The second name of each is that of Triton before 3.9, the third parameter of a copy that of the barrier.
    assert compat.copy_async.__name__ in ("async_load", "async_copy_global_to_shared")
    assert parameters(compat.copy_async)[:4] == ["tensor_desc", "coord", "barrier", "result"]
    assert compat.reinterpret.__name__ in ("reinterpret", "_reinterpret")
    assert parameters(compat.reinterpret)[:4] == ["self", "dtype", "shape", "layout"]
    assert compat.thread_barrier.__name__ in ("barrier", "thread_barrier")
    for name, parameter in inspect.signature(compat.thread_barrier).parameters.items():
        assert parameter.default is not parameter.empty, name


def test_gluon_has_what_the_hopper_kernels_use():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert parameters(gl.warp_specialize)[:3] == ["functions_and_args", "worker_num_warps", "worker_num_regs"]
    assert parameters(gl.NVMMASharedLayout)[:3] == ["swizzle_byte_width", "element_bitwidth", "rank"]
    assert parameters(gl.NVMMADistributedLayout)[:3] == ["version", "warps_per_cta", "instr_shape"]
    assert parameters(hopper.warpgroup_mma)[:5] == ["a", "b", "acc", "use_acc", "precision"]
    assert parameters(hopper.warpgroup_mma_wait)[:2] == ["num_outstanding", "deps"]
    assert parameters(hopper.mbarrier.wait)[:3] == ["mbarrier", "phase", "pred"]
    assert parameters(TensorDescriptor)[:5] == ["base", "shape", "strides", "block_shape", "layout"]


def test_compiling_ahead_is_public():
    """`launch` and `compile_only` stand on these."""
    import triton

    assert parameters(triton.AsyncCompileMode) == ["executor", "ignore_errors"]
    assert parameters(triton.KernelInterface.warmup) == ["self", "args", "grid", "kwargs"]
    assert issubclass(triton.JITFunction, triton.KernelInterface)


def test_hooks_that_tests_use():
    """They see what is compiled, and when."""
    from triton import knobs

    assert hasattr(knobs.runtime, "jit_cache_hook")


def test_descriptors_and_dependent_launches():
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    assert parameters(TensorDescriptor)[:4] == ["base", "shape", "strides", "block_shape"]
    for function in (gdc_launch_dependents, gdc_wait):
        assert not [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_properties_that_the_stubs_lack():
    assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin > 0


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """(file name, node) of the package's code."""
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.name, node


def test_nothing_private_is_used():
    """No name of third parties that begins with an underscore, but for what Python documents of NamedTuples."""
    for name, node in nodes():
        imported: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            imported = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            imported = [part for alias in node.names for part in alias.name.split(".")]
        private = [part for part in imported if part.startswith("_") and part != "__future__"]
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            private += [node.attr] if not own and node.attr not in ("_replace", "_fields", "_asdict", "_exit") else []
        assert not private or name == "compat.py", f"{name}: {private}"


def test_all_launches_can_be_compiled_ahead():
    """kernel[grid](...) stands in `compile_ahead.launch` alone."""
    for name, node in nodes():
        direct = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        assert not direct or name == "compile_ahead.py", f"{name}: {ast.unparse(node)[:80]}"
