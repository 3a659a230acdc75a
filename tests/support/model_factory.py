"""Tiny random checkpoints in the Hugging Face format, and a harness that steps a rayllm model over a paged cache."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.kinds import CONFIGS

KINDS = tuple(CONFIGS)


def make_model(
    folder: str | Path,
    kind: str,
    *,
    seed: int = 0,
    max_shard_size: str | None = None,
    dtype: str = "float32",
    **overrides: Any,
) -> str:
    """Write a seeded checkpoint of `kind` (one of KINDS) to `folder` with transformers' classes; returns the folder.

    overrides: fields of the config, of its text_config if it has one.
    max_shard_size, such as "100KB": splits the weights over several files.
    """
    import transformers

    architecture, options = deepcopy(CONFIGS[kind])  # transformers adds to dicts that it is given
    sees = "text_config" in options
    options = {**options, "text_config": options["text_config"] | overrides} if sees else {**options, **overrides}
    model_class = getattr(transformers, architecture + ("ForConditionalGeneration" if sees else "ForCausalLM"))
    config = model_class.config_class(**deepcopy(options))  # some classes add to what they are handed
    torch.manual_seed(seed)
    model = model_class(config)
    randomise(model, seed)
    model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(str(folder), **shards)
    return str(folder)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough for sharp attention and logits far apart: greedy text of the default inits repeats."""
    generator = torch.Generator().manual_seed(seed + 1)
    # Of a model with recurrent layers, whose norms add 1 to their weight, but for those of these layers' output. With
    # gains of 2 in all of them it would amplify the last bit of a state to more than the tests tolerate.
    adds_one = hasattr(model.config.get_text_config(), "linear_num_key_heads")
    corrections = [entry for entry in model.named_buffers() if entry[0].endswith(("correction_bias", "layer_scalar"))]
    for name, parameter in [*model.named_parameters(), *corrections]:
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if name.endswith(("norm.weight", "ln_f.weight", "layer_scalar")):
                parameter.copy_((0.0 if adds_one and "linear_attn" not in name else 1.0) + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "embed" in name or name.startswith("lm_head"):
                parameter.copy_(0.3 * noise)
            else:
                # With tied embeddings a token predicts itself unless the layers outweigh its embedding.
                parameter.copy_(0.25 * noise)


def load(folder: str | Path, tp: Any = None, dtype: str = "float32", **options: Any) -> Any:
    """The model in `folder`, or the part of it that the rank of `tp` has, on the CPU."""
    from rayllm.config.options import EngineConfig
    from rayllm.config.resolved import resolve
    from rayllm.models.loader import load_model
    from rayllm.parallel.tp_group import TPGroup

    config = resolve(EngineConfig(model=str(folder), device="cpu", dtype=dtype, **options), 0)
    return load_model(config, tp or TPGroup.single(), torch.device("cpu"))


def run_context(
    model: Any,
    caches: list[Any],
    max_num_seqs: int,
    *,
    split_decodes: bool = True,
    max_model_len: int = 512,
    block_size: int = 8,
    num_groups: int = 1,
) -> tuple[Any, torch.Tensor]:
    """What a model's captured steps run on, with a batch of its own, and room for their logits."""
    from rayllm.worker.graphs import RunContext
    from rayllm.worker.inputs import PersistentBatch

    weight = model.lm_head.weight
    batch = PersistentBatch(max_num_seqs, max_model_len, block_size, weight.device, num_groups)
    room = torch.empty(max_num_seqs, model.lm_head.num_tokens, dtype=weight.dtype, device=weight.device)
    return RunContext(model, caches, batch, split_decodes), room


class PagedRunner:
    """Sequences of one model over a paged cache, stepped by hand. Unwritten slots hold NaN, so a stray read shows.

    num_groups: of layers with block tables of their own, which take turns.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        num_groups: int = 1,
    ):
        from rayllm.layers.attention import KVCache, LayerCache
        from rayllm.layers.gated_delta import LayerState
        from rayllm_kernels.ops import StateCache, latent_cache

        self.model, self.block_size, self.num_groups = model, block_size, num_groups
        self.caches: list[LayerCache] = []
        for layer in range(model.spec.num_layers):
            if (source := model.spec.kv_layer(layer)) != layer:
                self.caches.append(self.caches[source])
                continue
            if model.spec.is_recurrent(layer):
                delta, tp = model.spec.gated_delta, model.tp.size
                conv = torch.full((num_blocks, *delta.conv_shape(tp)), float("nan"), dtype=dtype)
                recurrent = torch.full((num_blocks, *delta.state_shape(tp)), float("nan"))
                self.caches.append(LayerState(StateCache(conv, recurrent, block_size), layer % num_groups))
                continue
            heads, head_dim = model.spec.kv_shape(layer, model.tp.size)
            k, v = torch.full((2, num_blocks, heads, block_size, head_dim), float("nan"), dtype=dtype)
            latent = model.spec.latent
            cache = KVCache(k, v) if latent is None else latent_cache(k, latent.kv_rank)
            self.caches.append(LayerCache(cache, layer % num_groups))
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.tables: dict[str, list[list[int]]] = {}  # by group
        self.lengths: dict[str, int] = {}
        self.rows: dict[str, int] = {}

    def step(self, work: list[tuple[str, list[int]]], *, num_decodes: int = 0, padding: int = 0) -> list[torch.Tensor]:
        """Compute (sequence, next tokens) of each item -> its logits [tokens, vocab].

        The first `num_decodes` items have one token each. padding: dummy decodes after the last item, as a captured
        graph has them; only if all items are decodes.
        """
        batch = replace(self.batch(work, num_decodes, padding), logit_rows=None)
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model(batch, self.caches))
        sizes = [len(tokens) for _, tokens in work]
        return list(logits[: sum(sizes)].split(sizes))

    def batch(self, work: list[tuple[str, list[int]]], num_decodes: int, padding: int) -> Any:
        """The ForwardBatch of a step, whose tokens count as computed from here on."""
        from rayllm.layers.batch import ChunkLengths, ForwardBatch

        groups = range(self.num_groups)
        ids, positions, starts = [], [], [0]
        slots: list[list[int]] = [[] for _ in groups]
        for name, tokens in work:
            own, first = self.tables.setdefault(name, [[] for _ in groups]), self.lengths.get(name, 0)
            self.lengths[name] = first + len(tokens)
            positions += range(first, self.lengths[name])
            for table, places in zip(own, slots, strict=True):
                while len(table) * self.block_size < self.lengths[name]:
                    table.append(self.free.pop())
                for position in range(first, self.lengths[name]):
                    places.append(table[position // self.block_size] * self.block_size + position % self.block_size)
            ids += tokens
            starts.append(len(ids))
        lengths = [self.lengths[name] for name, _ in work]
        width = max(len(self.tables[name][0]) for name, _ in work) + 1
        tables = [[self.tables[name][group] for name, _ in work] + [[]] * padding for group in groups]
        tables = [[table + [0] * (width - len(table)) for table in part] for part in tables]
        for _ in range(padding):
            ids, positions, lengths, starts = [*ids, 0], [*positions, 0], [*lengths, 0], [*starts, len(ids) + 1]
            slots = [[*part, -1] for part in slots]
        chunks = np.array([len(tokens) for _, tokens in work[num_decodes:]], np.int64)
        contexts = np.array([self.lengths[name] for name, _ in work[num_decodes:]], np.int64) - chunks
        return ForwardBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mappings=torch.tensor(slots).unbind(),
            block_tables=torch.tensor(tables, dtype=torch.int32).unbind(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            logit_rows=torch.tensor([end - 1 for end in starts[1:]]),
            num_decodes=num_decodes + padding,
            max_query_len=int(chunks.max(initial=0)),
            chunks=None if padding else ChunkLengths(contexts, chunks),
        )

    def layout(self, state: Any, work: list[tuple[str, list[int]]], num_decodes: int) -> Any:
        """The StepLayout of a step whose logits all items want, of rows that get into `state`; as for `batch`."""
        from rayllm.worker.inputs import StepLayout

        starts = [self.lengths.get(name, 0) for name, _ in work]
        self.batch(work, num_decodes, 0)
        rows = [self.rows.setdefault(name, len(self.rows)) for name, _ in work]
        for row, start, (name, tokens) in zip(rows, starts, work, strict=True):
            state.token_table[row, start : start + len(tokens)] = torch.tensor(tokens)
            state.block_tables[:, row, : len(self.tables[name][0])] = torch.tensor(self.tables[name])
        counts = [len(tokens) for _, tokens in work]
        return StepLayout(*(np.array(column, np.int64) for column in (rows, counts, starts)), num_decodes, len(work))
