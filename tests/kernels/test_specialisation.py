"""Triton compiles a kernel anew for an integer argument that is 1, or a multiple of 16, and for one that is not.

Arguments that differ from step to step must be exempt: a server would stop for seconds when such a step first comes.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rayllm_kernels

MODULES = sorted(Path(rayllm_kernels.__file__).parent.glob("*.py"))
CHANGING = {"batch", "tokens", "num_tokens", "num_rows", "num_seqs", "rows", "count", "x_inner", "residual_inner",
            "num_slices", "elements", "stride_table", "units", "token_tiles"}  # fmt: skip
# A table of fixed width, not one made for a step.
FIXED = {("penalise", "stride_table"), ("decode_inputs", "stride_table")}
# It takes one or two tokens, both met at start.
EXEMPT = {("linear_rows", "tokens")}


def kernels(path: Path):
    """(kernel, its run-time arguments, those that it does not specialise on) of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            function = call.func if call else decorator
            if isinstance(function, ast.Attribute) and function.attr == "jit":
                exempt = [k.value for k in call.keywords if k.arg == "do_not_specialize"] if call else []
                names = [arg.arg for arg in node.args.args if arg.annotation is None]
                yield node.name, names, ast.literal_eval(exempt[0]) if exempt else []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_kernel_is_compiled_anew_for_a_number_of_tokens(path):
    for name, arguments, exempt in kernels(path):
        assert set(exempt) <= set(arguments), name
        missing = (CHANGING & set(arguments)) - set(exempt)
        assert not {n for n in missing if (path.stem, n) not in FIXED | EXEMPT}, name


def test_kernels_are_found():
    found = [name for path in MODULES for name, *_ in kernels(path)]
    assert len(found) > 20
    assert "_decode_kernel" in found
