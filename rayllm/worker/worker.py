"""`RankModel` and `Worker`: one rank, before and after its KV cache is sized. In process, or inside a Ray actor.

Executors need no more of a rank than what is public here and marked so: tests hand them stand-ins.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from rayllm.api.types import DeviceMemory, KVBlocks, KVCosts, Phases, RankReady, StepPlan, StepResult, timed
from rayllm.config.resolved import ResolvedConfig
from rayllm.errors import ConfigError
from rayllm.layers.batch import ChunkLengths, ForwardBatch
from rayllm.models.base import Cache
from rayllm.models.loader import load_model
from rayllm.parallel.shared_weights import SharedWeights
from rayllm.parallel.tp_group import TPGroup
from rayllm.sampling.sampling_table import SamplingTable
from rayllm.worker.adapters import AdapterStore
from rayllm.worker.cache import CacheEngine, block_bytes, lay_out_blocks, staging_blocks
from rayllm.worker.graphs import RunContext, StepGraphs, capture_graphs, graph_bytes, make_graphs, table_bytes
from rayllm.worker.inputs import PersistentBatch, StepLayout, build
from rayllm.worker.kv_scales import find_scales, pack_scales, unpack_scales
from rayllm.worker.memory import StepMemory, limit_stacks
from rayllm.worker.runner import CHANGED_ROWS, PROMPT_LOGITS_ROWS, ModelRunner, PendingResult, sample_all_ways
from rayllm_kernels import ops
from rayllm_kernels.device import hardware

GIB, MIB = 1 << 30, 1 << 20
# By how much the memory of steps may grow after it was measured, because it is cut in other ways. On an H200 it grows
# by 2 MiB at most, over whole workloads, in either mode.
ROOM_FOR_GAPS = 32 * MIB
SEQS_SHARE = 1 / 32  # of the memory for KV, that the most sequences at once may cost
CPU_POOL_BYTES = GIB  # a rank's pool on a CPU, unless num_gpu_blocks_override says otherwise
# What the costs of computing and moving KV are measured with.
PROBE_TOKENS = {"cuda": 8192, "cpu": 64}
PROBE_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
PROBE_RUNS = 3

logger = logging.getLogger(__name__)


class RankModel:
    """This rank's part of the model on its device, whose KV cache is not sized yet: all ranks have to agree on that.

    For executors: the constructor, `count_blocks` and `build`. weights: as for `load_model`; their note has the scales
    of the KV cache. Raises ModelError or ConfigError.
    """

    def __init__(self, config: ResolvedConfig, tp: TPGroup, device: torch.device, weights: SharedWeights | None = None):
        self.config, self.device = config, device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, config.kv_dtype)
        self.phases: Phases = []  # of the start so far
        _check_kv_dtype(self.kv_dtype, config, device)
        with timed(self.phases, "load model"):
            if device.type == "cuda":
                torch.cuda.set_device(device)
                limit_stacks(device)
            ops.prepare(device)  # now, because steps allocate from a pool in which nothing may last
            self.memory = StepMemory(device)
            tp = tp.with_symmetric_memory(config.spec.hidden_size, self.dtype)
            self.model = load_model(config, tp, device, weights)
            self.synchronize()  # steps run on another stream
            if weights is not None and weights.is_filled:
                self.scales = unpack_scales(weights.note, device)
            else:
                self.scales = find_scales(self.model, self.kv_dtype, config.block_size, self._run_once)
                if weights is not None:
                    weights.note = pack_scales(self.scales)
        self.places = lay_out_blocks(config.spec, config.tp, config.block_size)
        self.block_bytes = block_bytes(self.places, self.kv_dtype)
        self.num_groups = 1 + max(place.group for place in self.places)
        self.max_num_seqs = config.num_seqs_choices[0]
        if len(config.num_seqs_choices) > 1:
            self.max_num_seqs = most_seqs(config.num_seqs_choices, self.bytes_for_seqs, self._bytes_left())

    def count_blocks(self) -> KVBlocks:
        """Blocks that fit on the device and in swap_space. On CUDA the largest batch runs once to see its memory.

        No host blocks if neither preemption nor a prefix cache would use them.
        """
        options = self.config.options
        num_cpu_blocks = int(options.swap_space * GIB) // self.block_bytes
        if options.preemption_mode == "recompute" and not options.enable_prefix_caching:
            num_cpu_blocks = 0
        if options.num_gpu_blocks_override is not None:
            return KVBlocks(options.num_gpu_blocks_override, num_cpu_blocks, self.max_num_seqs)
        if self.device.type == "cpu":
            most = self.num_groups * self.max_num_seqs * -(-self.config.max_model_len // self.config.block_size)
            num_blocks = max(1, min(most, CPU_POOL_BYTES // self.block_bytes))
            return KVBlocks(num_blocks, num_cpu_blocks, self.max_num_seqs)
        with timed(self.phases, "size KV cache"):
            return KVBlocks(self._measure_blocks(num_cpu_blocks), num_cpu_blocks, self.max_num_seqs)

    def build(self, blocks: KVBlocks, *, resumes: bool = False) -> Worker:
        """The rank with its KV cache. To be called on all ranks together, once.

        resumes: requests wait that other ranks served before. So nothing is compiled, captured or measured first: steps
        begin at once, kernel by kernel, and those that come again are captured between them.
        """
        self.max_num_seqs = blocks.max_num_seqs
        return Worker(self, blocks, resumes=resumes)

    def bytes_for_seqs(self, num_seqs: int) -> int:
        """Device memory that sequences take beside their KV if so many run at once: tables, graphs and logits."""
        options, spec = self.config.options, self.config.spec
        tables = table_bytes(num_seqs, self.config.max_model_len, self.config.block_size, self.num_groups)
        tables += 8 * num_seqs * spec.hidden_size  # the pooler's sums
        logits = num_seqs * self.model.lm_head.num_tokens * self.dtype.itemsize
        kinds = 2 if options.enable_lora else 1  # of graphs: steps with adapters have their own
        return kinds * tables + (
            0 if options.enforce_eager else kinds * graph_bytes(num_seqs, spec.num_layers) + logits
        )

    def new_cache(self, blocks: KVBlocks) -> CacheEngine:
        """Pools of these sizes for this model."""
        return CacheEngine(blocks, self.places, self.kv_dtype, self.device, self.scales)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def run_batch(self, caches: list[Cache], total: int, length: int | None = None, *, adapted: bool = False) -> None:
        """A pass over `total` tokens by the layers of `caches`: no KV is written, as many rows get logits as may.

        length: of a sequence, 1 for decodes; None for as long as can be. adapted: tokens may have adapters.
        """
        options, device = self.config.options, self.device
        length = min(total, self.config.max_model_len, length or total)
        decodes = length == 1 and not options.deterministic
        borders = [*range(0, total, length), total]
        starts = torch.tensor(borders, dtype=torch.int32, device=device)
        positions = torch.arange(total, device=device) % length
        num_seqs = len(starts) - 1
        tables = torch.zeros(num_seqs, -(-length // self.config.block_size), dtype=torch.int32, device=device)
        slots = torch.full((total,), -1, dtype=torch.int64, device=device)
        batch = ForwardBatch(
            input_ids=torch.zeros(total, dtype=torch.int64, device=device),
            positions=positions,
            slot_mappings=(slots,) * self.num_groups,
            block_tables=(tables,) * self.num_groups,
            seq_lens=starts.diff(),
            query_start_loc=starts,
            logit_rows=torch.arange(min(max(self.max_num_seqs, PROMPT_LOGITS_ROWS), total), device=device),
            num_decodes=num_seqs if decodes else 0,
            max_query_len=0 if decodes else length,
            chunks=None if decodes else ChunkLengths(np.zeros(num_seqs, np.int64), np.diff(borders)),
            adapter_slots=torch.full((total,), -1, dtype=torch.int32, device=device) if adapted else None,
        )
        hidden = self.model(batch, caches)
        logits = self.model.compute_logits(hidden)
        # What sampling holds beside them: changed logits, and counts of tokens.
        _held = [logits[:CHANGED_ROWS].to(torch.float32, copy=True) for _ in range(2)]
        self.synchronize()

    @torch.inference_mode()
    def _run_once(self, batch: ForwardBatch, caches: list[Cache]) -> None:
        """A forward pass before there is a runner, to its end on the device."""
        with self.memory.active():
            if self.device.type == "cuda":
                with ops.compile_only():
                    self.model(batch, caches)
            self.model(batch, caches)
        self.synchronize()

    def _measure_blocks(self, num_cpu_blocks: int) -> int:
        """Blocks in gpu_memory_utilization of the device, less all else that the engine and others use at most."""
        options, spec = self.config.options, self.config.spec
        spare = self.new_cache(KVBlocks(1, 0))
        with self.memory.active():
            caches = spare.layers[: spec.num_distinct_layers]  # the others use the same memory again
            adapted = options.enable_lora  # such steps take the most
            with ops.compile_only():
                self.run_batch(caches, self.config.max_num_batched_tokens, adapted=adapted)
            # How memory is cut depends on the steps that came before: on one long prompt, and on many short ones.
            for length in (None, 1024, None, 128):
                self.run_batch(caches, self.config.max_num_batched_tokens, length, adapted=adapted)
        del spare, caches
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        beside = self.bytes_for_seqs(self.max_num_seqs) + ROOM_FOR_GAPS
        blocks = int(self._bytes_left() - beside) // self.block_bytes - staging_blocks(self.block_bytes, num_cpu_blocks)
        if blocks < 1:
            raise ConfigError(
                f"gpu_memory_utilization {options.gpu_memory_utilization} of {total / GIB:.1f} GiB leaves no memory "
                f"for the KV cache: weights and the largest step take {(total - free) / GIB:.1f} GiB, tables, graphs "
                f"and room for gaps {beside / GIB:.1f} GiB"
            )
        return blocks

    def _bytes_left(self) -> float:
        """What gpu_memory_utilization leaves of the device's memory now."""
        free, total = torch.cuda.mem_get_info()
        return total * self.config.options.gpu_memory_utilization - (total - free)


class LoadRank(Protocol):
    """As `RankModel` is made."""

    def __call__(
        self, config: ResolvedConfig, tp: TPGroup, device: torch.device, weights: SharedWeights | None = None, /
    ) -> RankModel: ...


class Worker:
    """A rank that serves. For executors: `submit`, `collect`, which may run on another thread, `close` and `ready`.

    ready: how its start went. adapters: on the host; None without enable_lora.
    """

    def __init__(self, rank: RankModel, blocks: KVBlocks, *, resumes: bool = False):
        options, spec, device = rank.config.options, rank.config.spec, rank.device
        self._rank, self._memory = rank, rank.memory
        self._pending: deque[PendingResult] = deque()
        with timed(rank.phases, "allocate KV cache"):
            self._cache = rank.new_cache(blocks)
            state = PersistentBatch(
                rank.max_num_seqs, rank.config.max_model_len, rank.config.block_size, device, rank.num_groups
            )
            table = SamplingTable(rank.max_num_seqs, spec.vocab_size, spec.eos_token_ids)
            context = RunContext(rank.model, self._cache.layers, state, split_decodes=not options.deterministic)
            rank.synchronize()
        self._graphs, step_costs, costs = StepGraphs(), {}, None
        if device.type == "cuda" and resumes and not options.enforce_eager:
            self._graphs = make_graphs(context, rank.config.max_num_batched_tokens)
        with timed(rank.phases, "warm up"):
            if device.type == "cuda" and not resumes:
                self._graphs = self._warm_up(context, table)
            self._runner = ModelRunner(context, table, self._graphs)
            if not resumes:
                step_costs = {} if options.target_itl_ms is None else self._graphs.costs()
                costs = self._measure_costs()
        self.adapters = AdapterStore(rank.model) if options.enable_lora else None
        self.ready = RankReady(self._memory_taken(), step_costs, costs, rank.phases)

    def submit(self, plan: StepPlan) -> None:
        """Start a step; its result comes from `collect`."""
        with self._memory.active():
            self._move_blocks(plan)
            if plan.copies:
                self._cache.copy(plan.copies)
            if self.adapters is not None:
                self.adapters.apply(plan)
            self._pending.append(self._runner.submit(plan))
        if self._graphs.decodes is not None:  # all ranks compute the same plans, so they come to the same sizes
            self._graphs.capture_used(self._memory)

    def collect(self) -> StepResult:
        """The result of the oldest submitted step, once it is on the host."""
        return self._pending.popleft().wait()

    def close(self) -> None:
        """Let go of the device's memory; the worker must not be used any more."""
        self._pending.clear()
        self._cache.close()
        del self._runner, self._graphs, self._cache, self._memory, self.adapters, self._rank.model, self._rank.memory
        if self._rank.device.type == "cuda":
            torch.cuda.empty_cache()

    def _move_blocks(self, plan: StepPlan) -> None:
        """Start the plan's moves. Swap-ins of earlier plans have to be there, those of this one only if it says so."""
        swaps = self._cache.swaps
        swaps.join_swap_ins()
        if plan.await_write_backs is not None:
            swaps.join_write_backs(plan.await_write_backs)
        if plan.swap_outs:
            swaps.swap_out(plan.swap_outs)
        if plan.swap_ins:
            swaps.swap_in(plan.swap_ins)
            if plan.await_swap_ins:
                swaps.join_swap_ins()
        if plan.write_backs:
            swaps.write_back(plan.write_backs, plan.step_id)

    def _warm_up(self, context: RunContext, table: SamplingTable) -> StepGraphs:
        """Compile all kernels and, unless enforce_eager, capture graphs."""
        rank, options = self._rank, self._rank.config.options
        caches = self._cache.layers[: rank.config.spec.num_distinct_layers]
        rank.synchronize()  # tables are zeroed on another stream than steps run on
        with self._memory.active():
            with ops.compile_only():
                # Prompts and decodes of all sizes: which kernels run depends on the size.
                for adapted in (False, True) if options.enable_lora else (False,):
                    for total in _growing(rank.config.max_num_batched_tokens):
                        rank.run_batch(caches, total, adapted=adapted)
                    for total in _growing(rank.max_num_seqs):
                        rank.run_batch(caches, total, length=1, adapted=adapted)
                sample_all_ways(context, table)
                build(
                    context.batch, StepLayout(np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64), 0, 1)
                )
                self._cache.copy([(0, 0)])
            rank.run_batch(caches, rank.config.max_num_batched_tokens)
        graphs = StepGraphs()
        if not options.enforce_eager:
            graphs = capture_graphs(context, rank.config.max_num_batched_tokens, self._memory)
        rank.synchronize()
        return graphs

    def _measure_costs(self) -> KVCosts | None:
        """What computing and moving KV takes; None without a host pool. What is moved are zeros."""
        cache, rank, kind = self._cache, self._rank, self._rank.device.type
        num_blocks = min(cache.pool.shape[0], cache.host_pool.shape[0])
        if not num_blocks:
            return None
        num_tokens = min(rank.config.max_num_batched_tokens, PROBE_TOKENS[kind])
        many = min(num_blocks, max(1, PROBE_BYTES[kind] // rank.block_bytes))
        pairs, moves = [(block, block) for block in range(many)], (cache.swaps.swap_out, cache.swaps.swap_in)
        with self._memory.active():
            prefill = self._seconds(partial(rank.run_batch, cache.layers, num_tokens))
            out, into = (self._seconds(partial(move, pairs)) for move in moves)
            least = min(self._seconds(partial(move, pairs[:1])) for move in moves)
        beside = max(0.0, least - min(out, into) / many)
        logger.info(
            "prefill %.0f tokens/s, swap out %.2f GB/s, in %.2f GB/s, %.0f us a transfer",
            num_tokens / prefill,
            many * rank.block_bytes / out / 1e9,
            many * rank.block_bytes / into / 1e9,
            least * 1e6,
        )
        return KVCosts(prefill / num_tokens, out / many, into / many, beside)

    def _seconds(self, run: Callable[[], None]) -> float:
        """The least that a run takes, to its end on the device, after one that is not measured."""
        taken = []
        for _ in range(PROBE_RUNS + 1):
            started = time.perf_counter()
            run()
            self._cache.swaps.join_swap_ins()
            self._rank.synchronize()
            taken.append(time.perf_counter() - started)
        return min(taken[1:])

    def _memory_taken(self) -> DeviceMemory:
        options = self._rank.config.options
        weights = sum(parameter.nbytes for parameter in self._rank.model.parameters())
        kv_cache = self._cache.pool.nbytes
        if self._rank.device.type == "cpu":
            return DeviceMemory(weights, kv_cache)
        free, total = torch.cuda.mem_get_info()
        allowed = int(total * options.gpu_memory_utilization)
        if total - free > allowed and options.num_gpu_blocks_override is None:
            logger.warning(
                "%.2f GiB of the device are in use, more than gpu_memory_utilization %g allows (%.2f GiB)",
                (total - free) / GIB,
                options.gpu_memory_utilization,
                allowed / GIB,
            )
        return DeviceMemory(weights, kv_cache, total - free, allowed)


def most_seqs(choices: Sequence[int], bytes_for_seqs: Callable[[int], int], bytes_left: float) -> int:
    """Of the choices, ascending, the last that takes a small share of the memory that is left for KV; or the first.

    So each sequence has many times the memory for its KV that its place among those that run takes.
    """
    return max((n for n in choices if bytes_for_seqs(n) <= SEQS_SHARE * bytes_left), default=choices[0])


def _growing(most: int) -> list[int]:
    """1 to `most`, each a quarter more than the one before: kernels change at larger distances."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, sizes[-1] // 4)))
    return sizes


def _check_kv_dtype(kv_dtype: torch.dtype, config: ResolvedConfig, device: torch.device) -> None:
    """Raise ConfigError for a format that the device does not have; only the rank itself knows its device."""
    if kv_dtype != torch.float8_e4m3fn or hardware(device).has_e4m3:
        return
    raise ConfigError(
        f"kv_cache_dtype {config.options.kv_cache_dtype} needs a GPU of compute capability 8.9 or more, and "
        f"{torch.cuda.get_device_name(device)} has less; fp8_e5m2 works there"
    )
