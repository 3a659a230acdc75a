"""The scales of an fp8 KV cache: the checkpoint's, or else measured with random tokens when the engine starts.

A float format is as fine at one scale as at another, so a scale has only to keep numbers inside the format's range.
e5m2 is as precise as it gets from 6e-5 to 57344: a scale of 1 does. e4m3 is so from 2^-6 to 448, and keys of some
models are in the hundreds: there the largest key and value of each head in a forward pass over random tokens are mapped
to between a quarter and a half of 448. The room above is for what other texts and positions bring (rotation alone may
turn the largest of a pair into 1.4 times as much); beyond it numbers saturate. It costs nothing but at the other end:
numbers below 1 / 7,000 to 1 / 14,000 of a head's largest lose precision. Scales are powers of two, so that the last
bits of the pass, which differ between devices and numbers of ranks, do not show, and dividing by them is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import torch

from rayllm.errors import ModelError
from rayllm.layers.attention import KVCache, LayerCache
from rayllm.layers.batch import ForwardBatch
from rayllm.models.base import Cache, CausalLM
from rayllm_kernels.cache.kv_cache import FP8_MAX, KVScales

CALIBRATION_TOKENS = 512
MARGIN = 2.0  # at least, between what was seen and the largest number of the format
SEED = 1

Run = Callable[[ForwardBatch, list[Cache]], None]  # a step, on all ranks together


def find_scales(model: CausalLM, kv_dtype: torch.dtype, block_size: int, run: Run) -> list[KVScales] | None:
    """Scales of each layer of the rank's model, on its device; None if kv_dtype is no fp8 format.

    run: computes a step of the model, on all ranks together; called at most once. Nothing else of the engine's options
    has a part in it, so that they leave results alone. Raises ModelError if the model's keys or values are not finite.
    """
    if kv_dtype not in FP8_MAX:
        return None
    layers = range(model.spec.num_layers)
    found = model.kv_scales
    found = [found[model.spec.kv_layer(layer)] for layer in layers]
    if any(scales is None for scales in found):
        if kv_dtype == torch.float8_e4m3fn:
            measured = _calibrate(model, kv_dtype, block_size, run)
        else:
            heads = [model.spec.kv_shape(layer, model.tp.size)[0] for layer in layers]
            measured = [KVScales(torch.ones(count), torch.ones(count)) for count in heads]
        found = [own or other for own, other in zip(found, measured, strict=True)]
    device = model.lm_head.weight.device
    return [KVScales(scales.k.to(device), scales.v.to(device)) for scales in found if scales is not None]


def pack_scales(scales: list[KVScales] | None) -> bytes:
    """What `unpack_scales` makes the same scales of, to the bit, in another process."""
    return msgspec.msgpack.encode(scales and [(each.k.tolist(), each.v.tolist()) for each in scales])


def unpack_scales(packed: bytes, device: torch.device) -> list[KVScales] | None:
    """The scales on `device`."""
    scales = msgspec.msgpack.decode(packed)
    return scales and [KVScales(torch.tensor(k, device=device), torch.tensor(v, device=device)) for k, v in scales]


def scale_for(largest: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """The least power of two at which `largest` [heads] float32 stays MARGIN below the format's largest number.

    1 for what is next to nothing.
    """
    needed = largest * (MARGIN / FP8_MAX[kv_dtype])
    mantissa, exponent = torch.frexp(needed)  # mantissas are at least a half
    power = torch.ldexp(torch.ones_like(needed), exponent - (mantissa == 0.5).int())
    return torch.where(needed > 2.0**-100, power, 1.0)


def _calibrate(model: CausalLM, kv_dtype: torch.dtype, block_size: int, run: Run) -> list[KVScales]:
    """Scales from the largest keys and values in a cache of the model's own dtype, after one sequence."""
    dtype, device = model.lm_head.weight.dtype, model.lm_head.weight.device
    tokens = min(CALIBRATION_TOKENS, model.build.max_model_len)
    blocks = math.ceil(tokens / block_size)
    caches: list[LayerCache] = []
    for layer in range(model.spec.num_layers):
        if (source := model.spec.kv_layer(layer)) != layer:
            caches.append(caches[source])
            continue
        heads, head_dim = model.spec.kv_shape(layer, model.tp.size)
        keys, values = torch.zeros(2, blocks, heads, block_size, head_dim, dtype=dtype, device=device)
        caches.append(LayerCache(KVCache(keys, values)))
    ids = torch.randint(model.spec.vocab_size, (tokens,), generator=torch.Generator().manual_seed(SEED))
    positions = torch.arange(tokens, device=device)
    run(
        ForwardBatch(
            input_ids=ids.to(device),
            positions=positions,
            slot_mappings=(positions,),
            block_tables=(torch.arange(blocks, dtype=torch.int32, device=device)[None],),
            seq_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
            query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            logit_rows=torch.tensor([tokens - 1], device=device),
            num_decodes=0,
            max_query_len=tokens,
        ),
        [*caches],
    )
    scales = []
    for layer, cache in enumerate(caches):
        largest = torch.stack([part.abs().amax((0, 2, 3)).float() for part in (cache.kv.k, cache.kv.v)]).cpu()
        if not bool(largest.isfinite().all()):
            raise ModelError(f"kv_cache_dtype: keys or values of layer {layer} are not finite for random tokens")
        scales.append(KVScales(*scale_for(largest, kv_dtype)))
    return scales
