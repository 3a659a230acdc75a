"""The kernels of an engine, compiled for GPUs that are not there: whole steps over tensors without memory (meta).

Which kernels with which tiles is for the engine to say: these are its own model, captured steps, sampling and cache.
For a process of its own, in which `triton.runtime.driver` names the target (tests/kernels/conftest.py).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from rayllm.api.types import KVBlocks
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.layers.layer import BuildContext
from rayllm.models.registry import MODEL_CLASSES
from rayllm.parallel.tp_group import TPGroup
from rayllm.sampling.sampling_table import SamplingTable
from rayllm.worker.cache import CacheEngine, lay_out_blocks
from rayllm.worker.graphs import DecodeGraphs, RunContext, step_graphs
from rayllm.worker.inputs import PersistentBatch
from rayllm.worker.runner import sample_all_ways
from rayllm_kernels import dispatch, ops
from rayllm_kernels.device import Hardware, assumed
from rayllm_kernels.ops import KVScales, PeerBuffers, latent_cache

META = torch.device("meta")
MAX_MODEL_LEN = 8192

# One GPU of each compute capability, by NVIDIA's tables: multiprocessors, and shared memory that a block may opt in to.
GPUS = {
    "A100": Hardware(108, 163 << 10, (8, 0)),
    "A10G": Hardware(80, 99 << 10, (8, 6)),
    "L4": Hardware(58, 99 << 10, (8, 9)),
    "L40S": Hardware(142, 99 << 10, (8, 9)),
    "H200": Hardware(132, 227 << 10, (9, 0)),
    "B200": Hardware(148, 227 << 10, (10, 0)),
    "RTX5090": Hardware(170, 99 << 10, (12, 0)),
}


def _llama(architecture: str, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **rest: Any) -> dict:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 128256,
        "max_position_embeddings": MAX_MODEL_LEN,
        **rest,
    }


def _opt(hidden: int, heads: int) -> dict:
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "num_attention_heads": heads, "vocab_size": 50272}
    return {"architectures": ["OPTForCausalLM"], "num_hidden_layers": 3, "max_position_embeddings": 2048, **sizes}


def _bloom(hidden: int, heads: int) -> dict:
    return {"architectures": ["BloomForCausalLM"], "hidden_size": hidden, "n_layer": 3, "n_head": heads}


def _deepseek(heads: int) -> dict:
    sizes = {"n_routed_experts": 16, "n_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 129280,
        "max_position_embeddings": MAX_MODEL_LEN,
        **sizes,
    }


# config.json of models of which each stands for a head size, a number of query heads a KV head, or a kind of attention.
MODELS = {
    "llama-3.1-8b": _llama("Llama", 4096, 14336, 32, 8, 128),
    "llama-3.2-1b": _llama("Llama", 2048, 8192, 32, 8, 64),
    "qwen2.5-0.5b": _llama("Qwen2", 896, 4864, 14, 2, 64),
    "qwen3-0.6b": _llama("Qwen3", 1024, 3072, 16, 8, 128),
    "mistral-7b-v0.1": _llama("Mistral", 4096, 14336, 32, 8, 128, sliding_window=4096),
    "heads-of-16": _llama("Llama", 128, 256, 8, 4, 16),
    "heads-of-32": _llama("Llama", 256, 640, 8, 4, 32),
    "heads-of-96": _llama("Llama", 3072, 8192, 32, 32, 96),
    "heads-of-192": _llama("Llama", 3072, 8192, 16, 4, 192),
    "heads-of-256": _llama("Llama", 2048, 16384, 64, 1, 256),
    "heads-of-512": _llama("Llama", 2048, 8192, 32, 4, 512),
    "one-kv-head-of-512": _llama("Llama", 2048, 8192, 64, 1, 512),
    "gemma-2-9b": _llama("Gemma2", 3584, 14336, 16, 8, 256, sliding_window=4096),
    "gemma-4-e2b": _llama(
        *("Gemma4", 1536, 6144, 8, 1, 256),
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
    ),
    "gemma-4-26b-a4b": _llama(
        *("Gemma4", 2816, 2112, 16, 8, 256),
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "one-kv-head": _llama("Llama", 8192, 8192, 64, 1, 128),
    "qwen3-30b-a3b": _llama("Qwen3Moe", 2048, 6144, 32, 4, 128, moe_intermediate_size=768, norm_topk_prob=True),
    "qwen3.5-35b-a3b": _llama(
        "Qwen3_5Moe", 2048, 512, 16, 2, 256, moe_intermediate_size=512, full_attention_interval=2
    ),
    "mixtral-8x7b": _llama("Mixtral", 4096, 14336, 32, 8, 128),
    "deepseek-v3": _deepseek(128),
    "deepseek-v3, a rank of 8": _deepseek(16),
    "opt-125m": _opt(768, 12),
    "opt-2.7b": _opt(2560, 32),
    "bloom-560m": _bloom(1024, 16),
    "bloom-7b1": _bloom(4096, 32),
}


@torch.inference_mode()
def run_engine(model: str, max_tokens: int, max_num_seqs: int, *, sampling: bool, **options: Any) -> None:
    """Steps of all sizes of one model's engine, on META. options: of the engine."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        config = resolve(EngineConfig(model=folder, device="cpu", load_format="dummy", **options), 0)
    spec, dtype, block_size = config.spec, getattr(torch, config.dtype), config.block_size
    context = BuildContext(TPGroup.single(), META, dtype, config.max_model_len, config.options.deterministic)
    rank = MODEL_CLASSES[spec.architecture](context, spec).eval()
    scales = None
    if config.kv_dtype != config.dtype:
        heads = [spec.kv_shape(layer, 1)[0] for layer in range(spec.num_layers)]
        scales = [KVScales(*torch.ones(2, count, device=META)) for count in heads]
    places = lay_out_blocks(spec, 1, block_size)
    cache = CacheEngine(KVBlocks(64, 0), places, getattr(torch, config.kv_dtype), META, scales)
    num_groups = 1 + max(place.group for place in places)
    state = PersistentBatch(max_num_seqs, MAX_MODEL_LEN, block_size, META, num_groups)
    run = RunContext(rank, cache.layers, state, split_decodes=not context.deterministic)
    room = torch.empty(max_num_seqs, rank.lm_head.num_tokens, dtype=dtype, device=META)
    for graphs in (*step_graphs(run, max_tokens, room), DecodeGraphs(run, room)):
        graphs.run_all(cache.layers)
    cache.copy([(0, 0)])
    if sampling:
        sample_all_ways(run, SamplingTable(max_num_seqs, spec.vocab_size, spec.eos_token_ids))


def run_collectives(dtype: torch.dtype) -> None:
    """Sums over 8 ranks, on META."""
    peers, uses = torch.zeros(8, dtype=torch.int64, device=META), torch.zeros(8, dtype=torch.int32, device=META)
    buffers = PeerBuffers(0, 8, 4096, dtype, 8, 64, peers, uses)
    x, weight = torch.empty(8, 4096, dtype=dtype, device=META), torch.empty(4096, dtype=dtype, device=META)
    for two_shot in (False, True):
        ops.all_reduce(x, buffers, two_shot=two_shot)
        for each in (weight, weight.float()):
            ops.all_reduce_add_rms_norm(x, x, each, 1e-5, buffers, two_shot=two_shot)
    ops.all_gather_small(x[0, :32], buffers)


def run_adapters(dtype: torch.dtype) -> None:
    """Adapters of a group of projections and of one, on META, beside their products and inside."""
    for inputs, rows in ((4096, (4096, 1024, 1024)), (14336, (4096,))):
        a = torch.empty(8, len(rows), 64, inputs, dtype=dtype, device=META)
        b = torch.empty(sum(rows), 8, 64, dtype=dtype, device=META)
        weights = ops.AdapterSlots(a, b, torch.empty(8, len(rows), dtype=torch.int32, device=META), rows)
        for tokens in (1, 100):
            x, y = (torch.empty(tokens, size, dtype=dtype, device=META) for size in (inputs, sum(rows)))
            adapters = ops.TokenAdapters(torch.empty(tokens, dtype=torch.int32, device=META), weights)
            ops.add_adapters(x, y, *adapters)
            matrix = torch.empty(sum(rows), inputs, dtype=dtype, device=META)
            ops.linear(x, matrix, adapters=adapters)
            ops.add_rms_norm_linear(x, x, x[0], 1e-6, matrix, adapters=adapters)
            ops.add_rms_norm_linear(x, x, x[0], 1e-6, matrix, act="silu", adapters=adapters)


def run_quantised(gpu: Hardware, dtype: torch.dtype, tokens: tuple[int, ...], *, deterministic: bool) -> None:
    """Projections with weights in fewer bits, of so many tokens, on META."""
    inputs, outputs = 4096, 6144
    bias, static = torch.empty(outputs, dtype=dtype, device=META), torch.empty(1, device=META)
    norm = torch.empty(inputs, dtype=dtype, device=META)
    for count in tokens:
        x = torch.empty(count, inputs, dtype=dtype, device=META)
        for rows, group in ((1, None), (128, 128)):
            values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=META)
            scales = torch.empty(outputs // rows, inputs // (group or inputs), device=META)
            weight = ops.Fp8Weight(values, scales, rows, group)
            ops.linear_fp8_weight(x, weight, bias, deterministic=deterministic)
            if not deterministic:
                ops.fused_linear_fp8_weight(x, weight, bias, norm=(norm, 1e-5), residual=x)
                ops.fused_linear_fp8_weight(x, weight, norm=(norm, 1e-5), residual=x, act="silu")
            if gpu.has_e4m3:
                rounding = ops.Rounding(group)
                ops.rms_norm_fp8(x, x, norm, 1e-5, rounding)
                ops.act_and_mul_fp8(torch.empty(count, 2 * inputs, dtype=dtype, device=META), rounding, "silu")
                tokens_in_fp8 = ops.to_fp8(x, rounding if group else ops.Rounding(None, static))
                ops.linear_fp8(tokens_in_fp8, weight, bias, dtype, deterministic=deterministic)
                if not deterministic:
                    ops.linear_rounding_fp8(x, rounding, weight, bias, norm=(norm, 1e-5), residual=x)
                    ops.linear_rounding_fp8(x, rounding, weight, norm=(norm, 1e-5), residual=x, act="silu")
        for group, symmetric in ((32, True), (128, False)):
            codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=META)
            scales = torch.empty(inputs // group, outputs, device=META)
            zeros = None if symmetric else scales.to(torch.uint8)
            weight = ops.Int4Weight(codes, scales, zeros, inputs, group)
            ops.linear_int4(x, weight, bias, deterministic=deterministic)
            if not deterministic:
                ops.fused_linear_int4(x, weight, bias, norm=(norm, 1e-5), residual=x)
                ops.fused_linear_int4(x, weight, norm=(norm, 1e-5), act="silu")


# Widths of experts, and inputs and outputs that share a scale, in gate and up, and in down: a scale a channel; a rank's
# part of blocks of 128; blocks that end within a tile.
FP8_EXPERTS = ((768, ((None, 1), (None, 1))), (192, ((128, 64), (64, 128))), (704, ((128, 64), (128, 128))))


def run_quantised_experts(gpu: Hardware, dtype: torch.dtype, tokens: tuple[int, ...], *, deterministic: bool) -> None:
    """Experts with weights in fewer bits, of so many tokens, on META: all, and those of a rank."""
    count, hidden, inner, top_k = 32, 2048, 768, 4

    def weight(kind: str, rows: int, inputs: int, group: int | None, own_rows: int = 1) -> ops.ExpertWeight:
        codes = torch.empty(count, rows, inputs if kind == "fp8" else inputs // 2, dtype=torch.uint8, device=META)
        scales = torch.empty(count, rows // own_rows, -(-inputs // (group or inputs)), device=META)
        zeros = scales.to(torch.uint8) if kind == "int4" else None
        scales = scales.to(torch.uint8) if kind == "mxfp4" else scales
        return ops.ExpertWeight(kind, codes, scales, zeros, inputs, group, own_rows)

    for number in tokens:
        x = torch.empty(number, hidden, dtype=dtype, device=META)
        weights = torch.empty(number, top_k, device=META)
        for kind, group in (("fp8", 128), ("int4", 128), ("int4", 32), ("mxfp4", 32)):
            own_rows = 128 if kind == "fp8" else 1
            projections = weight(kind, 2 * inner, hidden, group, own_rows), weight(kind, hidden, inner, group, own_rows)
            chosen, options = weights.to(torch.int32), {"deterministic": deterministic}
            ops.experts_quantised(x, weights, chosen, *projections, **options)
            if kind == "fp8" and gpu.has_e4m3:
                ops.experts_quantised(x, weights, chosen, *projections, fp8_tokens=True, **options)
                owned = ops.ExpertRange(count, 4 * count)
                ops.experts_quantised(x, weights, chosen, *projections, fp8_tokens=True, owned=owned, **options)
                for width, (first, last) in FP8_EXPERTS if len(tokens) > 1 else ():
                    own = weight("fp8", 2 * width, hidden, *first), weight("fp8", hidden, width, *last)
                    ops.experts_quantised(x, weights, chosen, *own, fp8_tokens=True, **options)


def compile_quantised(gpu: str, tokens: tuple[int, ...], dtypes: tuple[str, ...], modes: tuple[bool, ...]) -> None:
    """Compile for one of GPUS what `run_quantised` runs, in these modes, deterministic or not."""
    with assumed(META, GPUS[gpu]), dispatch.forced(triton=True), ops.compile_only():
        for dtype in dtypes:
            for deterministic in modes:
                run_quantised(GPUS[gpu], getattr(torch, dtype), tokens, deterministic=deterministic)
                run_quantised_experts(GPUS[gpu], getattr(torch, dtype), tokens, deterministic=deterministic)


def run_own_experts(dtype: torch.dtype) -> None:
    """A rank's 16 of 128 experts, for tokens that are too few to be sorted, few and many, on META."""
    gate_up, down = (torch.empty(16, *shape, dtype=dtype, device=META) for shape in ((1536, 2048), (2048, 768)))
    for tokens in (1, 200, 2000):
        x = torch.empty(tokens, 2048, dtype=dtype, device=META)
        weights = torch.empty(tokens, 8, device=META)
        chosen = torch.empty(tokens, 8, dtype=torch.int32, device=META)
        ops.experts(x, weights, chosen, gate_up, down, owned=ops.ExpertRange(32, 128))


def run_expanded_attention(dtype: torch.dtype) -> None:
    """A long chunk of a prompt over a cache of latents, of DeepSeek-V3's sizes and of GLM-4.7-Flash's, on META."""
    tokens, heads = 1024, 16
    lens, starts = (torch.empty(count, dtype=torch.int32, device=META) for count in (1, 2))
    rows, bounds = torch.empty(tokens, dtype=torch.int64, device=META), starts.new_empty(1, 3)
    cache = latent_cache(torch.empty(64, 1, 16, 576, dtype=dtype, device=META), 512)
    for key_dim, value_dim in ((128, 128), (192, 256)):
        q, weight = torch.empty(tokens, heads, key_dim + 64), torch.empty(heads, key_dim + value_dim, 512)
        out = torch.empty(tokens, heads, value_dim, dtype=dtype, device=META)
        piece = ops.KeyPiece(rows, bounds, lens, starts, tokens)
        ops.expanded_prefill_attention(q.to(META, dtype), cache, weight.to(META, dtype), 0.1, [piece], tokens, out)


def compile_engines(gpu: str, engines: list[dict[str, Any]]) -> None:
    """Compile for one of GPUS what `run_engine` runs with each of these arguments, collectives and adapters."""
    with assumed(META, GPUS[gpu]), dispatch.forced(triton=True):
        with ops.compile_only():
            run_collectives(torch.bfloat16)
            run_adapters(torch.bfloat16)
            if any(arguments["model"] == "qwen3-30b-a3b" for arguments in engines):
                run_own_experts(torch.bfloat16)
            if any(arguments["model"] in ("heads-of-512", "deepseek-v3") for arguments in engines):
                run_expanded_attention(torch.bfloat16)
        for arguments in engines:
            with ops.compile_only():
                run_engine(**arguments)
