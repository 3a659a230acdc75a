"""Mistakes made on purpose, one at a time, in copies of the kernels: each has to fail a test of its kernel.

`python tests/support/mutants.py [NUMBER...]` runs them in the interpreter, in forks of one process that has imported
what takes long, and prints a line of JSON for each: its number, what pytest returned (1: a test failed), its output.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "rayllm_kernels"
TESTS = Path("tests/kernels")
CPU_SECONDS = 300  # of one mistake's tests, which mostly take a few
OPTIONS = ["-x", "--full-matrix", "--timeout=0", "-p", "no:cacheprovider", "-W", "ignore"]


class Mutant(NamedTuple):
    """Code of a kernel's module, what it becomes, and the test that has to notice."""

    file: str
    test: str
    code: str
    becomes: str


# (module, test) -> mistakes: edges of tiles that are off by one, and sums, factors and comparisons that are wrong.
MISTAKES = {
    ("attention/decode_kernel.py", "attention/test_decode.py::test_borders_of_ranges"): [
        ("valid = (key < seq_len) &", "valid = (key < seq_len - 1) &"),
        ("last = position + 1 == origin + tiles", "last = position == origin + tiles"),
    ],
    # Of a sequence in more parts than are merged at once.
    ("attention/decode_kernel.py", "attention/test_decode.py::test_borders_of_ranges[seq_lens9-23-None]"): [
        ("total = total * decay + tl.sum(weights, 0)", "total = total + tl.sum(weights, 0)"),
        ("weights = tl.exp2(lse - new_peak)", "weights = tl.exp2(lse - peak)"),
    ],
    ("attention/decode_kernel.py", "attention/test_decode.py::test_options"): [
        ("(key >= first_key)", "(key > first_key)"),
        ("products, distance, slopes", "products, distance // 64, slopes"),
    ],
    ("attention/decode_kernel.py", "attention/test_decode.py::test_caps_and_sinks"): [
        ("whole = last & (this_origin >= range_first)", "whole = last"),
        ("total += sink_weights(sinks, head, True, peak)", "total += 0.0"),
    ],
    ("attention/device_functions.py", "attention/test_decode.py::test_caps_and_sinks"): [
        ("(2.0 * softcap) / (1.0 + power)", "softcap / (1.0 + power)"),
        ("sink * LOG2E - peak", "sink - peak"),
    ],
    ("attention/schedule_kernel.py", "attention/test_decode.py::test_borders_of_ranges"): [
        ("tl.minimum(first + quota, total)", "tl.minimum(first + quota, total - 1)"),
        ("(end - 1) // quota - first_range + 1", "(end - 1) // quota - first_range"),
    ],
    ("attention/prefill_kernel.py", "attention/test_prefill.py::test_edges_of_tiles"): [
        ("visible = (distance <= 0)", "visible = (distance < 0)"),
        ("(distance > -window)", "(distance >= -window)"),
        ("whole_high = (first_pos + 1) // KEYS", "whole_high = (first_pos + 2) // KEYS"),
        ("last_pos - window + 1, 0), KEYS)", "last_pos - window, 0), KEYS)"),
        ("high = tl.cdiv(last_pos + 1, KEYS)", "high = tl.cdiv(last_pos, KEYS)"),
    ],
    ("attention/prefill_kernel.py", "attention/test_prefill.py::test_caps_and_sinks"): [
        ("total += sink_weights(sinks, head, row_valid, peak)", "total += 0.0")
    ],
    ("attention/prefill_kernel.py", "attention/test_prefill.py::test_shapes"): [
        ("total = total * decay + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)")
    ],
    ("attention/decode_kernel.py", "attention/test_latent.py::test_decodes"): [
        ("q_ptr + HEAD_DIM, sequence", "q_ptr + HEAD_DIM - 1, sequence")
    ],
    ("attention/prefill_kernel.py", "attention/test_latent.py::test_prefills"): [
        ("cache.k + SHAPE.head_dim, offsets", "cache.k + SHAPE.head_dim - 1, offsets")
    ],
    ("attention/prefill_kernel.py", "attention/test_expanded.py::test_shapes"): [
        ("tl.where(end < seq_len, 0, query_len)", "tl.where(end < seq_len, 0, query_len - 1)"),
        ("k_rest = load_tile(places[0], row *", "k_rest = load_tile(places[0], key *"),
        ("mask=goes_on, other=0.0", "mask=is_done, other=0.0"),
    ],
    ("attention/device_functions.py", "attention/test_prefill.py::test_shapes"): [
        ("(dims[None, :] < HEAD_DIM), other", "(dims[None, :] < HEAD_DIM - 1), other")
    ],
    ("attention/device_functions.py", "attention/test_prefill.py::test_options"): [
        ("slopes[:, None] * distance", "slopes[:, None] * (distance + distance // 64)")
    ],
    ("cache/fp8.py", "attention/test_fp8.py::test_attention"): [
        ("(pairs >> 8).to(tl.int8)", "(pairs >> 7).to(tl.int8)")
    ],
    ("linear/rows_kernel.py", "linear/test_linear.py::test_linear"): [
        (
            "weight_ptr + rows + at + DEPTH, mask=at + DEPTH < inputs",
            "weight_ptr + rows + at + DEPTH, mask=at + DEPTH < inputs - 1",
        ),
        ("& (column < outputs))", "& (column < outputs - 1))"),
    ],
    ("linear/rows_kernel.py", "linear/test_linear.py::test_add_rms_norm_linear"): [
        ("tl.sum(squares, 2) / inputs", "tl.sum(squares, 2) / DEPTH")
    ],
    ("linear/rows_adapters.py", "lora/test_in_products.py::test_linear"): [
        ("mask=begin + depth < a_end", "mask=begin + depth < a_end - 1"),
        (
            "mask=at < end, other=0.0)\n            if residual",
            "mask=at < end - 1, other=0.0)\n            if residual",
        ),
        ("(rank < num_ranks)", "(rank < num_ranks - 1)"),
        ("(token < tokens) & (output < outputs)", "(token < tokens) & (output < outputs - 1)"),
    ],
    ("linear/shrink_kernel.py", "linear/test_hopper_adapters.py::test_shrinks"): [
        ("mask=mine[:, None] & inside[None, :]", "mask=(token < tokens)[:, None] & inside[None, :]"),
        ("mask = (rank < num_ranks)[:, None]", "mask = (rank < FORM.most)[:, None]"),
        ("first + num_ranks - 1) // GROUP", "first + num_ranks) // GROUP"),
        ("tl.where(has_ranks, PARTS - 1, 0)", "PARTS - 1"),
        ("within < tl.where(has_ranks, TOKENS * RANKS, 0)", "within < TOKENS * RANKS - 1"),
        ("tl.store(counter_ptr, 0)", "tl.store(counter_ptr, 1)"),
        ("range(0, PROJECTIONS)", "range(0, 1)"),
        ("has_ranks | (part == 0)", "has_ranks"),
    ],
    ("linear/tiles_kernel.py", "linear/test_linear.py::test_every_tile_that_may_be_chosen"): [
        (
            "weights = tl.load(weights_ptr + at, mask=at < inputs",
            "weights = tl.load(weights_ptr + at, mask=at < inputs - 1",
        ),
        ("(token[:, None] < tokens) &", "(token[:, None] < tokens - 1) &"),
    ],
    ("linear/device_functions.py", "linear/test_linear.py::test_linear"): [
        ("mask=column < outputs, other=0.0", "mask=column < outputs - 1, other=0.0")
    ],
    ("linear/invariant_kernel.py", "linear/test_invariant.py::test_values"): [
        ("real & (start + depth < inputs)", "real & (start + depth < inputs - 1)"),
        ("inside % width, inside // width", "inside // width, inside % width"),
    ],
    ("experts/route_kernel.py", "experts/test_route.py::test_kernel_and_reference_choose_alike"): [
        ("            best += tl.max(", "            best = tl.max("),
        ("weights / (tl.sum(weights, 0) + _TINY)", "weights / tl.sum(scores, 0)"),
        ("choice += tl.load(correction_ptr", "scores += tl.load(correction_ptr"),
    ],
    ("experts/group_kernel.py", "experts/test_experts.py::test_groups"): [
        ("tl.cumsum(found.to(tl.int32), 0) - 1", "tl.sum(found.to(tl.int32), 0) - tl.cumsum(found.to(tl.int32), 0)"),
        ("tiles_ptr + first_tile + tile", "tiles_ptr + first_tile + tile + mine // 2"),
        ("tl.where(chunk < mine, counts, 0)", "tl.where(chunk < mine - 1, counts, 0)"),
        ("in range(0, chunks, COUNTED)", "in range(0, COUNTED, COUNTED)"),
        ("* CHUNK + lane)\n", "* CHUNK + CHUNK - 1 - lane)\n"),
    ],
    ("experts/group_kernel.py", "experts/test_experts.py::test_uneven_groups"): [
        ("num_tiles, chunks * TILES)", "num_tiles, chunks * TILES * 2)"),
        ("& (tile[:, None] < end_tile[None, :])", "& (tile[:, None] <= end_tile[None, :])"),
    ],
    ("experts/group_kernel.py", "experts/test_experts.py::test_groups_of_the_experts_that_are_here"): [
        ("expert -= first_expert", "expert -= 0"),
        ("tl.where(inside, expert, BINS)", "tl.where(inside, expert, 0)"),
    ],
    ("experts/device_functions.py", "experts/test_experts.py::test_values"): [
        ("source, target = place, pair", "source, target = pair, pair"),
        ("real = place < end", "real = place < end - 1"),
    ],
    ("experts/device_functions.py", "experts/test_experts.py::test_tokens_lie_at_the_places_of_their_pairs"): [
        ("y_ptr + place * columns", "y_ptr + pair * columns")
    ],
    ("experts/device_functions.py", "experts/test_pair_sum.py::test_norms"): [
        ("onto_ptr + token * stride_onto", "onto_ptr + token * columns"),
        ("tl.load(weights_ptr + pair) * outputs", "tl.load(weights_ptr + pair) + outputs"),
    ],
    ("experts/products_kernel.py", "experts/test_experts.py::test_values"): [
        ("mask=real[:, None] & (at < inputs)", "mask=real[:, None] & (at < inputs - 1)")
    ],
    ("experts/pairs_kernel.py", "experts/test_experts.py::test_values"): [
        ("(depth < FORM.inputs)", "(depth < FORM.inputs - 1)"),
        ("weights[:, None] * result", "weights[:, None] + result"),
    ],
    ("experts/pairs_kernel.py", "experts/test_experts.py::test_experts_of_several_ranks_add_up"): [
        ("tl.where(real, expert - owned[0], 0)", "tl.where(real, expert, 0)")
    ],
    ("experts/pairs_kernel.py", "experts/test_experts.py::test_biases_and_the_clamped_activation"): [
        ("up_bias = tl.load(pointers + outputs,", "up_bias = tl.load(pointers,")
    ],
    ("experts/device_functions.py", "experts/test_experts.py::test_biases_and_the_clamped_activation"): [
        ("(up + 1.0) * (gate", "up * (gate")
    ],
    ("experts/products_kernel.py", "experts/test_experts.py::test_biases_and_the_clamped_activation"): [
        ("            bias_ptr += outputs\n", "            bias_ptr += 0\n")
    ],
    ("quantised/fp8_product_kernel.py", "quantised/test_fp8.py::test_products"): [
        ("mask=token < tokens, other=0.0)[:, None]", "mask=token < tokens - 1, other=0.0)[:, None]"),
        ("// FORM.rows * weight_stride", "// FORM.rows"),
    ],
    ("e4m3.py", "quantised/test_fp8.py::test_every_code_becomes_its_number"): [("0x87F00000 -", "0x07F00000 -")],
    ("e4m3.py", "quantised/test_fp8.py::test_one_token_as_it_is"): [
        ("values.dtype == tl.uint8", "values.dtype == tl.int8")
    ],
    ("quantised/fp8_rows_kernel.py", "quantised/test_fp8.py::test_rounding"): [
        ("codes, mask=element < FORM.dim)", "codes, mask=element < FORM.dim - 1)")
    ],
    ("quantised/fp8_rows_kernel.py", "quantised/test_fp8.py::test_rows_longer_than_a_tile_are_read_twice"): [
        ("peak = tl.maximum(peak, _peaks(", "peak = tl.minimum(peak, _peaks(")
    ],
    ("quantised/fp8_vector_kernel.py", "quantised/test_fp8.py::test_one_token_as_it_is"): [
        ("inside = depth < FORM.inputs", "inside = depth < FORM.inputs - 1"),
        ("tl.minimum(output, outputs - 1)", "tl.minimum(output, outputs - 2)"),
        ("tl.sum(wide * wide, 0) / FORM.inputs", "tl.sum(wide * wide, 0) / FORM.padded"),
        ("scales_ptr, outputs + first, outputs + row", "scales_ptr, first, row"),
    ],
    ("quantised/fp8_dequantise_kernel.py", "quantised/test_fp8.py::test_by_dequantised_weights"): [
        ("(at < inputs)", "(at < inputs - 1)"),
        ("row < rows, other=0.0", "row < rows - 1, other=0.0"),
        ("(first_row + row) // WEIGHT_ROWS", "row // WEIGHT_ROWS"),
        ("// WEIGHT_ROWS * groups + group", "// WEIGHT_ROWS * groups"),
        ("% tiles * PARTS", "% tiles"),
    ],
    ("quantised/int4_product_kernel.py", "quantised/test_int4.py::test_products"): [
        ("zeros_ptr, half + start, inputs, outputs, FORM)", "zeros_ptr, start, inputs, outputs, FORM)"),
        ("(half + at < inputs)", "(half + at < inputs - 1)"),
    ],
    ("quantised/dequantise_kernel.py", "quantised/test_int4.py::test_by_dequantised_weights"): [
        ("mask=inside & (k < inputs)", "mask=inside & (k < inputs - 1)"),
        ("first = upper * half + start", "first = start"),
        ("(first_row + row) * strides[1]", "row * strides[1]"),
    ],
    ("quantised/dequantise_kernel.py", "quantised/test_dequantised_experts.py::test_numbers_of_some_experts"): [
        ("if E2M1:", "if not E2M1:")
    ],
    ("e2m1.py", "quantised/test_dequantised_experts.py::test_numbers_of_some_experts"): [("bits << 23", "bits << 22")],
    ("quantised/int4_vector_kernel.py", "quantised/test_int4.py::test_one_token"): [
        ("(at < FORM.inputs)\n", "(at < FORM.inputs - 1)\n"),
        ("tl.sum(wide * wide, 0) / FORM.inputs", "tl.sum(wide * wide, 0) / (4 * FORM.padded * 8)"),
        ("* -total[None, :]", "* total[None, :]"),
        ("tl.minimum(output, outputs - 1)", "tl.minimum(output, outputs - 2)"),
    ],
    ("quantised/int4_vector_kernel.py", "quantised/test_int4.py::test_programs_share_one_token_s_tiles"): [
        ("tile + tl.num_programs(0), tiles", "tile + 1, tiles")
    ],
    ("quantised/int4_vector_kernel.py", "quantised/test_int4.py::test_every_number_at_every_place"): [
        ("words[word] >> 8", "words[word]")
    ],
    ("norm/rms_norm_kernel.py", "norm/test_rms_norm.py::test_rms_norm"): [
        ("(dims < DIM)\n", "(dims < DIM - 1)\n"),
        ("tl.sum(x * x, 1) / DIM", "tl.sum(x * x, 1) / FORM.dim_padded"),
    ],
    ("norm/token_gate_kernel.py", "norm/test_token_gate.py::test_token_gate"): [
        ("mask = first + place < INPUTS", "mask = first + place < INPUTS - 1"),
        ("strides[1] + first + place", "strides[0] + first + place"),
        ("y_ptr + row * DIM + first", "y_ptr + row * (DIM - 1) + first"),
    ],
    ("norm/act_and_mul_kernel.py", "norm/test_act_and_mul.py::test_act_and_mul"): [
        ("mask = element < DIM", "mask = element < DIM - 1"),
        ("gate = tl.load(x_ptr + element", "gate = tl.load(x_ptr + (element ^ 1)"),
    ],
    ("norm/qk_norm_rope_cache_kernel.py", "norm/test_qk_norm_rope_cache.py::test_equals_the_sequence"): [
        ("b * cos + a * sin", "b * cos - a * sin"),
        ("squares += tl.sum(rest", "squares -= tl.sum(rest"),
        ("else FORM.half + pair", "else FORM.half - pair"),
        (
            "tl.where(slot >= 0, num_kv_heads, 0)\n            scale = tl.load(cache.scales.k",
            "tl.where(slot >= 0, num_kv_heads - 1, 0)\n            scale = tl.load(cache.scales.k",
        ),
    ],
    ("gated_delta/causal_conv_kernel.py", "gated_delta/test_causal_conv.py::test_causal_conv"): [
        ("(place + begin >= 0)", "(place + begin > 0)"),
        ("inputs[row + i]", "inputs[row + i - 1]"),
        ("tl.where(first + row < count", "tl.where(first + row < count - 1"),
    ],
    ("norm/latent_norm_rope_cache_kernel.py", "norm/test_latent_norm_rope_cache.py::test_kernel_and_reference"): [
        ("mask = dims < FORM.rank", "mask = dims < FORM.rank - 1"),
        ("b * cos + a * sin", "b * cos - a * sin"),
    ],
    ("linear/heads_kernel.py", "linear/test_heads.py::test_products"): [
        ("real = start + depth < inputs", "real = start + depth < inputs - 1")
    ],
    ("norm/qk_norm_rope_cache_kernel.py", "norm/test_qk_norm_rope_cache.py::test_normed_values"): [
        ("v = (wide * norm)", "v = (wide + norm)")
    ],
    ("cache/copy_blocks_kernel.py", "cache/test_copy_blocks.py"): [
        ("mask = element < block_elements", "mask = element < block_elements - 1")
    ],
    ("cache/decode_inputs_kernel.py", "cache/test_decode_inputs.py"): [
        ("position // block_size + 1, 0)", "(position + 1) // block_size, 0)")
    ],
    ("cache/token_inputs_kernel.py", "cache/test_token_inputs.py"): [
        ("inside = index < count", "inside = index < count - 1"),
        ("position % block_size, -1)", "position % block_size, 0)"),
    ],
    ("cache/reshape_and_cache_kernel.py", "cache/test_reshape_and_cache.py"): [("if slot < 0", "if slot <= 0")],
    ("cache/fp8.py", "cache/test_kv_cache.py::test_borders_between_numbers_are_written_to_the_bit"): [
        ("+ ((bits >> DROPPED) & 1)", "")
    ],
    ("sampling/noise_kernel.py", "sampling/test_draw.py"): [
        ("mask=token < vocab_size, other", "mask=token < vocab_size - 1, other"),
        ("(top == best) & (first < best_token)", "(top == best) & (first > best_token)"),
    ],
    ("sampling/row_selection.py", "sampling/test_logprobs.py::test_logprobs_of_few_tokens_rank_all_of_them"): [
        ("mask=token < vocab_size, other", "mask=token < vocab_size - 1, other")
    ],
    ("sampling/logprobs_kernel.py", "sampling/test_logprobs.py::test_logprobs_of_few_tokens_rank_all_of_them"): [
        ("(x > chosen)", "(x >= chosen)")
    ],
    ("sampling/truncation_kernel.py", "sampling/test_truncation.py::test_draws_follow_the_truncated_distribution"): [
        ("above += tl.where(x > value, weight, 0)", "above += tl.where(x > value, 1, 0)")
    ],
    ("sampling/penalties_kernel.py", "sampling/test_penalties.py"): [
        ("tl.where(count > 1, once", "tl.where(count > 0, once")
    ],
    ("collectives/all_reduce_kernel.py", "collectives/test_all_reduce.py::test_calls_of_all_kinds"): [
        ("high += residual_high", "high += residual_low"),
        ("mask = column < WORDS", "mask = column < WORDS - 1"),
    ],
    ("gated_delta/chunk_kernel.py", "gated_delta/test_delta_rule.py::test_gated_delta_rule"): [
        (" + (1 << 12)) & -(1 << 13)", ") & -(1 << 13)"),  # what tensor cores do to fp32 that nobody rounds
        ("(x - high.to(tl.float32)).to(dtype)", "(x - x).to(dtype)"),
        ("tl.dot(high, a_low, tl.dot(low, a_high, total))", "tl.dot(high, a_low, total)"),
        ("for level in tl.static_range(4)", "for level in tl.static_range(3)"),
        ("-corner, tile_ptr", "corner, tile_ptr"),
        ("tl.exp(total - sums) * of_k", "tl.exp(total) * of_k"),
    ],
}
MUTANTS = [Mutant(*where, *mistake) for where, mistakes in MISTAKES.items() for mistake in mistakes]


def mutated(mutant: Mutant) -> str:
    """The source of its module with the mistake."""
    source = (KERNELS / mutant.file).read_text()
    if source.count(mutant.code) != 1:
        raise ValueError(f"{mutant.file} has {mutant.code!r} {source.count(mutant.code)} times")
    return source.replace(mutant.code, mutant.becomes)


def mutate(mutant: Mutant, folder: Path) -> None:
    """A copy of the kernels with the mistake, as `folder`/rayllm_kernels."""
    copy = folder / "rayllm_kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / mutant.file).write_text(mutated(mutant))


def _test(mutant: Mutant, folder: Path) -> None:
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.path.insert(0, str(folder))
        code = pytest.main([*OPTIONS, str(TESTS / mutant.test)])
        sys.stdout.flush()
    os._exit(int(code))


def run(number: int) -> dict[str, object]:
    """What became of one of MUTANTS."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mutate(MUTANTS[number], folder)
        child = multiprocessing.get_context("fork").Process(target=_test, args=(MUTANTS[number], folder))
        child.start()
        child.join()
        return {"number": number, "code": child.exitcode, "output": (folder / "output").read_text()[-3000:]}


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    os.chdir(ROOT)
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import triton.language  # noqa: F401

    torch.set_num_threads(1)  # threads do not outlive a fork
    for number in map(int, sys.argv[1:]) if sys.argv[1:] else range(len(MUTANTS)):
        print(json.dumps(run(number)), flush=True)
