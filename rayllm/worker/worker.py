"""`Worker`: one rank: its part of the model, its KV pools, its runner. In process, or inside a Ray actor."""

from __future__ import annotations

import logging
from collections import deque

import torch

from rayllm.config import EngineConfig
from rayllm.errors import ConfigError
from rayllm.layers.batch import ForwardBatch
from rayllm.model_spec import ModelSpec
from rayllm.models.loader import load_model
from rayllm.parallel.tp_group import TPGroup
from rayllm.sample.sampling_table import SamplingTable
from rayllm.types import StepPlan, StepResult
from rayllm.worker.cache_engine import CacheEngine, block_bytes
from rayllm.worker.input_batch import PersistentBatch
from rayllm.worker.model_runner import ModelRunner, PendingResult

GIB = 1 << 30
CPU_POOL_BYTES = GIB  # a rank's pool on a CPU, unless num_gpu_blocks_override says otherwise

logger = logging.getLogger(__name__)


def resolve_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The model's dtype; "auto" is float32 on CPUs, on GPUs the checkpoint's, and bfloat16 for float32 ones."""
    name: str = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16" if spec.dtype == "float32" else spec.dtype
    return getattr(torch, name)


def model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens a sequence may have as far as the model goes. Raises ConfigError if more are configured."""
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the model's limit of {spec.max_model_len}")
    return config.max_model_len or spec.max_model_len


class Worker:
    """Life: load_model, determine_num_blocks, init_cache, warm_up; then submit and collect, in order; close."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, tp: TPGroup, device: torch.device):
        self._config, self._spec, self._tp, self._device = config, spec, tp, device
        self._dtype = resolve_dtype(config, spec, device)
        self._max_model_len = model_len(config, spec)
        self._block_bytes = block_bytes(
            spec.num_layers, spec.kv_heads_per_rank(tp.size), config.block_size, spec.head_dim, self._dtype
        )
        self._pending: deque[PendingResult] = deque()

    def load_model(self) -> None:
        """Load this rank's weights. Raises ModelError."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._model = load_model(self._spec, self._config, self._tp, self._device, self._dtype)

    def determine_num_blocks(self) -> tuple[int, int]:
        """Blocks that fit on the device and in swap_space. On CUDA the largest batch runs once to see its memory."""
        num_cpu_blocks = int(self._config.swap_space * GIB) // self._block_bytes
        if self._config.num_gpu_blocks_override is not None:
            return self._config.num_gpu_blocks_override, num_cpu_blocks
        if self._device.type == "cpu":
            most = self._config.max_num_seqs * -(-self._max_model_len // self._config.block_size)
            return max(1, min(most, CPU_POOL_BYTES // self._block_bytes)), num_cpu_blocks
        return self._measure_blocks(), num_cpu_blocks

    def init_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocate the pool and everything that executes plans."""
        self._cache = CacheEngine(
            num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks, num_layers=self._spec.num_layers,
            num_kv_heads=self._model.num_kv_heads_per_rank, block_size=self._config.block_size,
            head_dim=self._model.head_dim, dtype=self._dtype, device=self._device,
        )  # fmt: skip
        state = PersistentBatch(self._config.max_num_seqs, self._max_model_len, self._config.block_size, self._device)
        table = SamplingTable(self._config.max_num_seqs, self._spec.vocab_size, self._spec.eos_token_ids)
        self._runner = ModelRunner(self._model, self._cache.layers, state, table, self._device)

    def warm_up(self) -> None:
        """On CUDA: compile the kernels and, unless enforce_eager, capture the decode graphs."""
        if self._device.type == "cuda":
            self._run_largest_batch(self._cache)
            if not self._config.enforce_eager:
                self._runner.capture_graphs(self._config.max_num_seqs, self._config.max_num_batched_tokens)
            torch.cuda.synchronize()

    def submit(self, plan: StepPlan) -> None:
        """Start a step; its result comes from `collect`."""
        if plan.copies:
            self._cache.copy(plan.copies)
        self._pending.append(self._runner.submit(plan))

    def collect(self) -> StepResult:
        """The result of the oldest submitted step, once it is on the host."""
        return self._pending.popleft().wait()

    def close(self) -> None:
        """Let go of the device's memory."""
        self._pending.clear()
        for name in ("_runner", "_cache", "_model"):
            if hasattr(self, name):
                delattr(self, name)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure_blocks(self) -> int:
        """Blocks in gpu_memory_utilization of the device, less all else that the engine and others use at most."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        spare = CacheEngine(
            num_gpu_blocks=1, num_cpu_blocks=0, num_layers=self._spec.num_layers,
            num_kv_heads=self._model.num_kv_heads_per_rank, block_size=self._config.block_size,
            head_dim=self._model.head_dim, dtype=self._dtype, device=self._device,
        )  # fmt: skip
        self._run_largest_batch(spare)
        del spare
        activations = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        tables = self._config.max_num_seqs * self._max_model_len * 5  # token and block tables, see PersistentBatch
        usable = total * self._config.gpu_memory_utilization - (total - free) - activations - tables - GRAPH_BYTES
        blocks = int(usable) // self._block_bytes
        if blocks < 1:
            raise ConfigError(
                f"gpu_memory_utilization {self._config.gpu_memory_utilization} of {total / GIB:.1f} GiB leaves no "
                f"memory for the KV cache: {(total - free) / GIB:.1f} GiB are in use, "
                f"{activations / GIB:.1f} GiB are needed for activations"
            )
        return blocks

    @torch.inference_mode()
    def _run_largest_batch(self, cache: CacheEngine) -> None:
        """One forward pass over max_num_batched_tokens tokens that writes no KV, with logits for max_num_seqs rows."""
        config, device = self._config, self._device
        total = config.max_num_batched_tokens
        length = min(total, self._max_model_len)
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
            logit_rows=torch.arange(min(config.max_num_seqs, total), device=device),
            num_decodes=0,
            max_query_len=length,
            max_seq_len=length,
        )
        hidden = self._model(batch, cache.layers)
        logits = self._model.compute_logits(hidden[batch.logit_rows])
        logits.softmax(-1)  # sampling holds a few tensors of this size
        torch.cuda.synchronize()


GRAPH_BYTES = GIB  # allowance for captured graphs and libraries beyond the profiled batch; an estimate, not measured
