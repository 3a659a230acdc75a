"""Triton compiles a kernel anew for an integer argument that is 1, or a multiple of 16, and for one that is not; and
for a pointer that is aligned to 16 bytes, and one that is not.

Arguments that differ from step to step must be exempt: a server would stop for seconds when such a step first comes.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rayllm_kernels

MODULES = sorted(Path(rayllm_kernels.__file__).parent.glob("*.py"))
CHANGING = {
    "batch",
    "tokens",
    "num_tokens",
    "num_rows",
    "num_seqs",
    "rows",
    "count",
    "x_inner",
    "residual_inner",
    "num_slices",
    "elements",
    "stride_table",
    "units",
    "token_tiles",
    "num_top",
    "group_k",
}
# What has an entry a row or sequence: often a part of a larger tensor, which begins somewhere else in every step.
MOVING = {
    "rows_ptr",
    "token_ids_ptr",
    "seeds_ptr",
    "positions_ptr",
    "temperature_ptr",
    "noise_scale_ptr",
    "tables_ptr",
    "seq_lens_ptr",
    "starts_ptr",
    "slots_ptr",
    "src_ptr",
    "dst_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "log_min_p_ptr",
    "table_rows_ptr",
    "num_prompt_ptr",
    "num_tokens_ptr",
    "repetition_ptr",
    "presence_ptr",
    "frequency_ptr",
}
# A table of fixed width, not one made for a step.
FIXED = {("penalise", "stride_table"), ("decode_inputs", "stride_table")}
# It takes one or two tokens, both met at start.
EXEMPT = {("linear_rows", "tokens")}
WHOLE = {("truncate_draws", "token_ids_ptr")}  # a tensor of its own, which begins where the allocator says
# Captured for every size, so compiled for every place that they can have.
WHOLE |= {("decode_inputs", name) for name in ("rows_ptr", "positions_ptr", "seq_lens_ptr", "slots_ptr")}


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
        missing = ((CHANGING | MOVING) & set(arguments)) - set(exempt)
        assert not {n for n in missing if (path.stem, n) not in FIXED | EXEMPT | WHOLE}, name


def test_kernels_are_found():
    found = [name for path in MODULES for name, *_ in kernels(path)]
    assert len(found) > 20
    assert "_decode_kernel" in found
