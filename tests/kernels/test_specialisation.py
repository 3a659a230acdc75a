"""Triton compiles a kernel anew for an integer argument that is 1, or a multiple of 16, and for one that is not; and
for a pointer that is aligned to 16 bytes, and one that is not.

Arguments that differ from step to step must be exempt: a server would stop for seconds when such a step first comes.
They must be arguments of their own, because Triton does not exempt what is in a tuple. So each kernel is asked here for
steps of several sizes, whose arrays begin anywhere, and must not be compiled for any of them but the first.
"""

from __future__ import annotations

SCRIPT = """
import collections
import importlib
import pkgutil

import rayllm_kernels
from rayllm_kernels.attention import latent_hopper, prefill_hopper
from rayllm_kernels.experts import hopper_kernel as experts_hopper_kernel
from rayllm_kernels.experts.group_kernel import group, group_in_chunks, spread
from rayllm_kernels.experts.plans import HOPPER_ROWS
from rayllm_kernels.linear import gated_hopper_kernel, hopper_kernel
from rayllm_kernels.linear.plans import NARROW
from rayllm_kernels.quantised import fp8_dequantise_kernel, fp8_rows_kernel, fp8_stream_kernel
from rayllm_kernels.quantised import dequantise_kernel, int4_hopper_kernel, int4_stream_kernel
from rayllm_kernels.quantised.plans import Int4StreamPlan, StreamPlan, choose_int4_hopper
from triton import JITFunction, knobs

names = [module.name for module in pkgutil.walk_packages(rayllm_kernels.__path__, "rayllm_kernels.")]
members = [value for name in names for value in vars(importlib.import_module(name)).values()]
kernels = {value.__name__ for value in members if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")}
keys = collections.defaultdict(set)


def note(**compilation):
    keys[compilation["fn"].name].add(compilation["key"])
    return True  # do not compile


knobs.runtime.jit_cache_hook = note
half = torch.bfloat16


def step(rows, begin):
    def array(*shape, dtype=torch.int64):
        # A part of a larger array.
        return torch.zeros(begin + rows, *shape, dtype=dtype)[begin:]

    def tensor(*shape, dtype=half):
        # Made for the step, by PyTorch's allocator.
        return torch.zeros(rows, *shape, dtype=dtype)

    pool = torch.zeros(9, 2, 4, 16, 64, dtype=half)
    cache, scoring = KVCache(pool[:, 0], pool[:, 1]), Scoring(0.1)
    contexts = Contexts(array(rows, dtype=torch.int32)[:, :5], array(dtype=torch.int32))
    starts = torch.zeros(begin + rows + 1, dtype=torch.int32)[begin:]
    q, floats = tensor(8, 64), array(dtype=torch.float32)
    schedule = ops.decode_schedule(q, cache, contexts, scoring, num_ranges=3)
    ops.paged_decode_attention(q, cache, contexts, scoring, schedule=schedule)
    ops.paged_prefill_attention(q, cache, contexts, scoring, starts, 100 + rows)
    prefill_hopper.prefill(q, cache, contexts, 0.1, starts, q)
    ops.reshape_and_cache(q[:, :4], q[:, 4:], cache, array())
    ops.qk_norm_rope_cache(tensor(16 * 64), None, array(), torch.zeros(9, 64), cache, array())
    scales = {"interleaved": True, "query_scale": torch.zeros(9)}
    ops.qk_norm_rope_cache(tensor(16 * 64), None, array(), torch.zeros(9, 64), cache, array(), **scales)
    wide = ops.latent_cache(torch.zeros(9, 1, 16, 192, dtype=half), 128)
    of_latents = ops.decode_schedule(tensor(8, 192), wide, contexts, scoring, num_ranges=3)
    latent_hopper.decode(tensor(8, 192), wide, contexts, 0.1, of_latents, 16, tensor(8, 128))
    latents, queries = ops.latent_cache(torch.zeros(9, 1, 16, 80, dtype=half), 64), tensor(8, 80)
    angles = torch.zeros(9, 16)
    ops.latent_norm_rope_cache(
        q[..., :16], tensor(80), q[0, 0], 1e-6, array(), angles, latents, array(), out=queries[..., 64:]
    )
    ops.linear_heads(q, torch.zeros(8, 64, 64, dtype=half), out=queries[..., :64], deterministic=True)
    ops.paged_decode_attention(queries, latents, contexts, scoring)
    ops.paged_prefill_attention(queries, latents, contexts, scoring, starts, 100 + rows)
    piece = ops.KeyPiece(array(), array(3, dtype=torch.int32), array(dtype=torch.int32), starts, 100 + rows)
    ops.expanded_prefill_attention(q, latents, torch.zeros(8, 96, 64, dtype=half), 0.1, [piece], 256, q[..., :48])
    ops.copy_blocks(pool, array(), array())
    tables = torch.zeros(2, 99, 48, dtype=torch.int32)
    ids, lens = tensor(dtype=torch.int64), tensor(dtype=torch.int32)
    slots = torch.zeros(2, 99, dtype=torch.int64)[:, :rows]
    ops.decode_inputs(ids, ids, tables[0], tables, 16, DecodeInputs(ids, slots, lens, tables[:, :rows]))
    ops.token_inputs(ids, array(dtype=torch.int64), tables[0], tables, 16, ids, torch.zeros(2, rows, dtype=torch.int64))

    x, weight = tensor(128), torch.zeros(256, 128, dtype=half)
    ops.rms_norm(x, x[0], 1e-6)
    ops.rms_norm(q[:, 2:], q[0, 0], 1e-6)
    ops.rms_norm_add(x, x, x[0], 1e-6)
    ops.act_and_mul(x, "silu")
    ops.token_gate(x, x[0], x)
    ops.linear(x, weight)
    ops.linear(x[:1], weight)
    ops.linear_invariant(x, weight)
    ops.linear_invariant(x.repeat(20, 1), weight)
    hopper_kernel.linear_hopper(x, weight, (NARROW[32], 100), act=None)
    gated_hopper_kernel.linear_gated_hopper(x, weight, 2, 100, act="silu")
    weights, experts = ops.route(tensor(16), Routing(4, "softmax"))
    projections = torch.zeros(16, 64, 128, dtype=half), torch.zeros(16, 128, 32, dtype=half)
    ops.experts(x, weights, experts, *projections)
    ops.experts(x[:1], weights[:1], experts[:1], *projections)
    group_in_chunks(experts, 16, 16, None, 16)
    groups, gated = group(experts, 16, HOPPER_ROWS, places=True), ("silu", 0.0, 0.0)
    placed = spread(x, groups.places, experts, None)
    experts_hopper_kernel.multiply(placed, projections[0], None, groups, 4, gated, dtype=half)
    fp8_rows_kernel.to_fp8_places(x, groups.places, experts, None)
    pairs = PairSum(placed, weights, x)
    ops.fused_add_rms_norm(pairs, x, x[0], 1e-6)
    ops.rms_norm_fp8(pairs, x, x[0], 1e-6, Rounding())
    codes, scales = torch.zeros(16, 128, 64, dtype=torch.uint8), torch.ones(16, 128, 1)
    in_int4 = (ExpertWeight("int4", codes[:, :, :size], scales, None, 2 * size, None) for size in (64, 32))
    in_int4 = [each._replace(codes=each.codes.contiguous()) for each in in_int4]
    ops.experts_quantised(x, weights, experts, *in_int4)
    ops.experts_quantised(x[:1], weights[:1], experts[:1], *in_int4)
    in_fp8 = ExpertWeight("fp8", torch.zeros(16, 128, 128, dtype=torch.uint8), scales, None, 128, None)
    in_fp8 = in_fp8, in_fp8._replace(codes=torch.zeros(16, 128, 64, dtype=torch.uint8), inputs=64)
    ops.experts_quantised(x, weights, experts, *in_fp8, fp8_tokens=True)
    ops.experts_quantised(x[:1], weights[:1], experts[:1], *in_fp8, fp8_tokens=True)
    numbers, ones = torch.zeros(256, 128, dtype=torch.float8_e4m3fn), torch.ones(256, 1)
    ops.act_and_mul_fp8(x.repeat(1, 2), Rounding(32), "silu")
    ops.rms_norm_fp8(x, x, x[0], 1e-6, Rounding())
    for tokens in (x, x.repeat(20, 1)):
        ops.linear_fp8(ops.to_fp8(tokens, Rounding()), Fp8Weight(numbers, ones), None, half)
    blocks, by_group = Fp8Weight(numbers, torch.ones(8, 4), 32, 32), {"by_group": True}
    ops.linear_fp8(fp8_rows_kernel.to_fp8(x, Rounding(32), None, **by_group), blocks, None, half)
    fp8_rows_kernel.rms_norm_fp8(x, x, x[0], 1e-6, Rounding(32), **by_group)
    ops.linear_fp8_weight(x, Fp8Weight(numbers, ones))
    fp8_dequantise_kernel.dequantise(Fp8Weight(numbers, ones), begin, torch.zeros(len(x), 128, dtype=half))
    ops.linear_rounding_fp8(x[:1], Rounding(), Fp8Weight(numbers, ones), norm=(x[0], 1e-6), residual=x[1:2])
    fp8_stream_kernel.linear_fp8_stream(x[:1], Fp8Weight(numbers, ones), None, plan=StreamPlan(4, 6, 8, 264))
    four_bits = Int4Weight(torch.zeros(256, 64, dtype=torch.uint8), ones.T, None, 128, None)
    ops.linear_int4(x, four_bits)
    dequantise_kernel.dequantise(four_bits, begin, torch.zeros(len(x), 128, dtype=half))
    int4_hopper_kernel.linear_int4_hopper(x, four_bits, choose_int4_hopper(32, 256, 128, None, 132))
    ops.fused_linear_int4(x[:1], four_bits, norm=(x[0], 1e-6), residual=x[1:2])
    wide = Int4Weight(torch.zeros(256, 128, dtype=torch.uint8), ones.T, None, 256, None)
    before, stream_plan = (x[1:2].repeat(1, 2), x[0].repeat(2), 1e-6), Int4StreamPlan(8, 2, 264, 80)
    int4_stream_kernel.linear_int4_stream(x[:1].repeat(1, 2), before, wide, None, None, plan=stream_plan)
    states = StateCache(torch.zeros(9, 3, 512, dtype=half), torch.zeros(9, 16, 16, 16), 16)
    for chunks in (Chunks(contexts), Chunks(contexts, starts, 100 + rows)):
        ops.causal_conv(tensor(512), torch.zeros(4, 512, dtype=half), states, chunks, tensor(512))
        gates = Gates(tensor(16), tensor(16), torch.zeros(16), torch.zeros(16))
        ops.gated_delta_rule(tensor(512), gates, states, chunks, tensor(16, 16))
    ops.rms_norm_gated(tensor(16, 16), tensor(256), torch.zeros(16, dtype=half), 1e-6)
    a, b, ranks = (torch.zeros(shape) for shape in ((2, 1, 16, 128), (256, 2, 16), (2, 1)))
    adapters = AdapterSlots(a.to(half), b.to(half), ranks.to(torch.int32), (256,))
    ops.add_adapters(x, tensor(256), array(dtype=torch.int32), adapters)
    ops.linear(x[:1], weight, adapters=TokenAdapters(array(dtype=torch.int32)[:1], adapters))
    of_tokens = TokenAdapters(array(dtype=torch.int32), adapters)
    hopper_kernel.linear_hopper(x, weight, (NARROW[32], 100), act=None, adapters=of_tokens)
    buffers = PeerBuffers(0, 2, 128, half, 8, 64, tensor(dtype=torch.int64), tensor(dtype=torch.int32))
    ops.all_reduce(x, buffers, two_shot=True)
    ops.all_gather_small(x[:, 0].contiguous(), buffers)

    logits, table = tensor(5008), torch.zeros(99, 48, dtype=torch.int32)
    draw = DrawRows(array(), array(), floats, floats)
    ops.gumbel_argmax(logits, draw)
    ops.truncate_draws(tensor(dtype=torch.int64), logits, draw, CutRows(array(), array(), floats, floats))
    ops.gather_logprobs(logits, array(), array(), rows % 7)
    ops.soft_cap_(logits, 30.0)
    ops.penalise(logits.float(), table, PenaltyRows(array(), array(), array(), array(), floats, floats, floats))


with dispatch.forced(triton=True), ops.compile_only():
    step(17, 0)
    first = {name: set(found) for name, found in keys.items()}
    for rows, begin in ((18, 1), (32, 0), (20, 3), (31, 0), (23, 1)):
        step(rows, begin)
assert len(kernels) > 20, kernels
assert set(first) == kernels, set(first) ^ kernels
for name, found in keys.items():
    assert found == first[name], f"{name} is compiled anew: {found - first[name]}"
print(len(kernels))
"""


def test_no_kernel_is_compiled_anew_for_another_step(run_compiler):
    assert int(run_compiler(SCRIPT)) > 20
