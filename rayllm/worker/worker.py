"""`Worker`: one rank: its part of the model, its KV pools, its runner. In process, or inside a Ray actor."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from rayllm.api.types import DeviceMemory, KVCosts, RankReady, StepPlan, StepResult
from rayllm.config.model_spec import ModelSpec
from rayllm.config.options import EngineConfig
from rayllm.errors import ConfigError
from rayllm.layers.attention import KVCache
from rayllm.layers.batch import ForwardBatch
from rayllm.models.loader import load_model
from rayllm.parallel.tp_group import TPGroup
from rayllm.sampling.sampling_table import SamplingTable
from rayllm.worker.cache import CacheEngine, block_bytes
from rayllm.worker.chunk_graph import CHUNK_SIZES, MAX_CHUNKS, MIXED_SIZES
from rayllm.worker.copy_stream import staging_blocks
from rayllm.worker.cuda_graph import graph_sizes
from rayllm.worker.inputs import PersistentBatch
from rayllm.worker.kv_scales import find_scales
from rayllm.worker.pooling import pooling_bytes
from rayllm.worker.runner import CHANGED_ROWS, PROMPT_LOGITS_ROWS, ModelRunner, PendingResult
from rayllm.worker.step_memory import StepMemory, limit_stacks
from rayllm_kernels import ops

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
# By how much the memory of steps may grow after it was measured, because it is cut in other ways. On an H200 it grows
# by 2 MiB at most, over whole workloads, in either mode.
ROOM_FOR_GAPS = 32 * MIB
CPU_POOL_BYTES = GIB  # a rank's pool on a CPU, unless num_gpu_blocks_override says otherwise
# What the costs of computing and moving KV are measured with.
PROBE_TOKENS = {"cuda": 8192, "cpu": 64}
PROBE_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
PROBE_RUNS = 3

logger = logging.getLogger(__name__)


def resolve_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The model's dtype; "auto" is float32 on CPUs, on GPUs the checkpoint's, and bfloat16 for float32 ones."""
    name: str = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16" if spec.dtype == "float32" else spec.dtype
    return getattr(torch, name)


def resolve_kv_dtype(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the KV cache; dtype is the model's. Raises ConfigError for a format that model or device cannot have."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if spec.head_dim % 2:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs an even head_dim; the model's is {spec.head_dim}"
        )
    if config.kv_cache_dtype == "fp8_e5m2":
        return torch.float8_e5m2
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a GPU of compute capability 8.9 or more, and "
            f"{torch.cuda.get_device_name(device)} has less; fp8_e5m2 works there"
        )
    return torch.float8_e4m3fn


def model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens a sequence may have as far as the model goes. Raises ConfigError if more are configured."""
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the model's limit of {spec.max_model_len}")
    return config.max_model_len or spec.max_model_len


def table_bytes(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Of the token table and of the block tables that eager and captured steps read, on the device."""
    block_tables = 4 * max_num_seqs + MAX_CHUNKS
    return 4 * (max_num_seqs + 1) * max_model_len + 4 * block_tables * -(-max_model_len // block_size)


def graph_bytes(max_num_seqs: int, num_layers: int) -> int:
    """What captured graphs take of the driver's memory. Measured on H200: 33 to 40 KiB a layer and graph."""
    return 48 * KIB * num_layers * (len(graph_sizes(max_num_seqs)) + len(CHUNK_SIZES) + len(MIXED_SIZES))


def growing(most: int) -> list[int]:
    """1 to `most`, each a quarter more than the one before: kernels change at larger distances."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, sizes[-1] // 4)))
    return sizes


class Worker:
    """Life: load_model, determine_num_blocks, init_cache, warm_up, measure_costs; then submit and collect; close."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, tp: TPGroup, device: torch.device):
        self._config, self._spec, self._tp, self._device = config, spec, tp, device
        self._dtype = resolve_dtype(config, spec, device)
        self._max_model_len = model_len(config, spec)
        self._kv_dtype = resolve_kv_dtype(config, spec, self._dtype, device)
        self._block_bytes = block_bytes(
            spec.num_layers, spec.kv_heads_per_rank(tp.size), config.block_size, spec.head_dim, self._kv_dtype
        )
        self._memory = StepMemory(device)
        self._pending: deque[PendingResult] = deque()

    def load_model(self) -> None:
        """Load this rank's weights. Raises ModelError."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            limit_stacks(self._device)
        ops.prepare(self._device)  # now, because steps allocate from a pool in which nothing may last
        self._tp = self._tp.with_symmetric_memory(self._spec.hidden_size, self._dtype)
        self._model = load_model(self._spec, self._config, self._tp, self._device, self._dtype)
        self._finish_loading()
        self._scales = find_scales(
            self._model, self._kv_dtype, self._dtype, self._device, self._config.block_size, self._run_once
        )

    def determine_num_blocks(self) -> tuple[int, int]:
        """Blocks that fit on the device and in swap_space. On CUDA the largest batch runs once to see its memory.

        No host blocks if neither preemption nor a prefix cache would use them.
        """
        num_cpu_blocks = int(self._config.swap_space * GIB) // self._block_bytes
        if self._config.preemption_mode == "recompute" and not self._config.enable_prefix_caching:
            num_cpu_blocks = 0
        if self._config.num_gpu_blocks_override is not None:
            return self._config.num_gpu_blocks_override, num_cpu_blocks
        if self._device.type == "cpu":
            most = self._config.max_num_seqs * -(-self._max_model_len // self._config.block_size)
            return max(1, min(most, CPU_POOL_BYTES // self._block_bytes)), num_cpu_blocks
        return self._measure_blocks(num_cpu_blocks), num_cpu_blocks

    def init_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocate the pool and everything that executes plans."""
        self._cache = self._new_cache(num_gpu_blocks, num_cpu_blocks)
        state = PersistentBatch(self._config.max_num_seqs, self._max_model_len, self._config.block_size, self._device)
        table = SamplingTable(self._config.max_num_seqs, self._spec.vocab_size, self._spec.eos_token_ids)
        split_decodes = not self._config.deterministic
        self._runner = ModelRunner(self._model, self._cache.layers, state, table, self._device, split_decodes)
        self._finish_loading()

    def _new_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> CacheEngine:
        return CacheEngine(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            num_layers=self._spec.num_layers,
            num_kv_heads=self._model.num_kv_heads_per_rank,
            block_size=self._config.block_size,
            head_dim=self._model.head_dim,
            dtype=self._kv_dtype,
            device=self._device,
            scales=self._scales,
        )

    def warm_up(self) -> RankReady:
        """On CUDA: compile all kernels and, unless enforce_eager, capture graphs."""
        if self._device.type == "cuda":
            config = self._config
            telling = self._cache.layers[: self._spec.num_telling_layers]
            with self._memory.active():
                with ops.compile_only():
                    self._run_all_sizes(telling)
                    self._runner.sample_all_ways()
                    self._cache.copy([(0, 0)])
                self._run_batch(telling, config.max_num_batched_tokens)
            if not config.enforce_eager:
                self._runner.capture_graphs(config.max_num_seqs, config.max_num_batched_tokens, self._memory)
            torch.cuda.synchronize()
        costs = {} if self._config.target_itl_ms is None else self._runner.step_costs()
        return RankReady(self._memory_taken(), costs)

    def measure_costs(self) -> KVCosts | None:
        """What computing and moving KV takes, for whoever chooses between them; None without a host pool.

        To be called on all ranks together, before the first step. What it moves are zeros.
        """
        cache = self._cache
        num_blocks = min(cache.pool.shape[0], cache.host_pool.shape[0])
        if not num_blocks:
            return None
        num_tokens = min(self._config.max_num_batched_tokens, PROBE_TOKENS[self._device.type])
        many = min(num_blocks, max(1, PROBE_BYTES[self._device.type] // self._block_bytes))
        pairs = [(block, block) for block in range(many)]
        with self._memory.active():
            prefill = self._seconds(partial(self._run_batch, cache.layers, num_tokens))
            out, into = (self._seconds(partial(move, pairs)) for move in (cache.swap_out, cache.swap_in))
            least = min(self._seconds(partial(move, pairs[:1])) for move in (cache.swap_out, cache.swap_in))
        beside = max(0.0, least - min(out, into) / many)
        costs = KVCosts(prefill / num_tokens, out / many, into / many, beside)
        logger.info(
            "prefill %.0f tokens/s, swap out %.2f GB/s, in %.2f GB/s, %.0f us a transfer",
            num_tokens / prefill,
            many * self._block_bytes / out / 1e9,
            many * self._block_bytes / into / 1e9,
            least * 1e6,
        )
        return costs

    def _seconds(self, run: Callable[[], None]) -> float:
        """The least that a run takes, to its end on the device, after one that is not measured."""
        taken = []
        for _ in range(PROBE_RUNS + 1):
            started = time.perf_counter()
            run()
            self._cache.join_swap_ins()
            self._synchronize()
            taken.append(time.perf_counter() - started)
        return min(taken[1:])

    def submit(self, plan: StepPlan) -> None:
        """Start a step; its result comes from `collect`."""
        with self._memory.active():
            self._move_blocks(plan)
            if plan.copies:
                self._cache.copy(plan.copies)
            self._pending.append(self._runner.submit(plan))

    def _move_blocks(self, plan: StepPlan) -> None:
        """Start the plan's moves. Swap-ins of earlier plans have to be there, those of this one only if it says so."""
        self._cache.join_swap_ins()
        if plan.await_write_backs >= 0:
            self._cache.join_write_backs(plan.await_write_backs)
        if plan.swap_outs:
            self._cache.swap_out(plan.swap_outs)
        if plan.swap_ins:
            self._cache.swap_in(plan.swap_ins)
            if plan.await_swap_ins:
                self._cache.join_swap_ins()
        if plan.write_backs:
            self._cache.write_back(plan.write_backs, plan.step_id)

    def collect(self) -> StepResult:
        """The result of the oldest submitted step, once it is on the host."""
        return self._pending.popleft().wait()

    def close(self) -> None:
        """Let go of the device's memory."""
        self._pending.clear()
        if hasattr(self, "_cache"):
            self._cache.close()
        for name in ("_runner", "_cache", "_model", "_memory", "_tp"):
            if hasattr(self, name):
                delattr(self, name)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _finish_loading(self) -> None:
        self._synchronize()  # steps run on another stream

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _measure_blocks(self, num_cpu_blocks: int) -> int:
        """Blocks in gpu_memory_utilization of the device, less all else that the engine and others use at most."""
        config = self._config
        spare = self._new_cache(1, 0)
        with self._memory.active():
            telling = spare.layers[: self._spec.num_telling_layers]  # the others use the same memory again
            with ops.compile_only():
                self._run_batch(telling, config.max_num_batched_tokens)
            # How memory is cut depends on the steps that came before: on one long prompt, and on many short ones.
            for length in (None, 1024, None, 128):
                self._run_batch(telling, config.max_num_batched_tokens, length)
        del spare
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        tables = table_bytes(config.max_num_seqs, self._max_model_len, config.block_size)
        tables += pooling_bytes(config.max_num_seqs, self._spec.hidden_size)
        logits = config.max_num_seqs * self._model.lm_head.num_tokens * self._dtype.itemsize
        graphs = 0 if config.enforce_eager else graph_bytes(config.max_num_seqs, self._spec.num_layers) + logits
        usable = total * config.gpu_memory_utilization - (total - free) - tables - graphs - ROOM_FOR_GAPS
        blocks = int(usable) // self._block_bytes - staging_blocks(self._block_bytes, num_cpu_blocks)
        if blocks < 1:
            raise ConfigError(
                f"gpu_memory_utilization {config.gpu_memory_utilization} of {total / GIB:.1f} GiB leaves no memory for "
                f"the KV cache: weights and the largest step take {(total - free) / GIB:.1f} GiB, tables, graphs "
                f"and room for gaps {(tables + graphs + ROOM_FOR_GAPS) / GIB:.1f} GiB"
            )
        return blocks

    def _memory_taken(self) -> DeviceMemory:
        weights = sum(parameter.nbytes for parameter in self._model.parameters())
        kv_cache = self._cache.pool.nbytes
        if self._device.type == "cpu":
            return DeviceMemory(weights, kv_cache)
        free, total = torch.cuda.mem_get_info()
        allowed = int(total * self._config.gpu_memory_utilization)
        if total - free > allowed and self._config.num_gpu_blocks_override is None:
            logger.warning(
                "%.2f GiB of the device are in use, more than gpu_memory_utilization %g allows (%.2f GiB)",
                (total - free) / GIB,
                self._config.gpu_memory_utilization,
                allowed / GIB,
            )
        return DeviceMemory(weights, kv_cache, total - free, allowed)

    @torch.inference_mode()
    def _run_once(self, batch: ForwardBatch, caches: list[KVCache]) -> None:
        """A forward pass before there is a runner, to its end on the device."""
        self._synchronize()
        with self._memory.active():
            if self._device.type == "cuda":
                with ops.compile_only():
                    self._model(batch, caches)
            self._model(batch, caches)
        self._synchronize()

    def _run_all_sizes(self, caches: list[KVCache]) -> None:
        """Prompts and decodes of all sizes, by the layers of `caches`: which kernels run depends on the size."""
        for total in growing(self._config.max_num_batched_tokens):
            self._run_batch(caches, total)
        for total in growing(self._config.max_num_seqs):
            self._run_batch(caches, total, length=1)

    @torch.inference_mode()
    def _run_batch(self, caches: list[KVCache], total: int, length: int | None = None) -> None:
        """A pass over `total` tokens by the layers of `caches`: no KV is written, as many rows get logits as may.

        length: of a sequence, 1 for decodes; None for as long as can be.
        """
        config, device = self._config, self._device
        length = min(total, self._max_model_len, length or total)
        decodes = length == 1 and not config.deterministic
        starts = torch.tensor([*range(0, total, length), total], dtype=torch.int32, device=device)
        positions = torch.arange(total, device=device) % length
        num_seqs = len(starts) - 1
        tables = torch.zeros(num_seqs, -(-length // config.block_size), dtype=torch.int32, device=device)
        batch = ForwardBatch(
            input_ids=torch.zeros(total, dtype=torch.int64, device=device),
            positions=positions,
            slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
            block_tables=tables,
            seq_lens=starts.diff(),
            query_start_loc=starts,
            logit_rows=torch.arange(min(max(config.max_num_seqs, PROMPT_LOGITS_ROWS), total), device=device),
            num_decodes=num_seqs if decodes else 0,
            max_query_len=0 if decodes else length,
        )
        hidden = self._model(batch, caches)
        logits = self._model.compute_logits(hidden)
        # What sampling holds beside them: changed logits, and counts of tokens.
        _held = [logits[:CHANGED_ROWS].to(torch.float32, copy=True) for _ in range(2)]
        self._synchronize()
