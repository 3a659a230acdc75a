"""`EngineCore`: the engine loop. Requests go in, one step at a time runs, token deltas come out.

    schedule() -> executor.submit(plan) ... executor.collect() -> update(result) -> deltas

The same core runs behind the offline API, the HTTP deployment and any test; it is not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta, slowest
from rayllm.api.validation import validate_request
from rayllm.config.model_spec import ModelSpec, check_parallel, load_model_spec
from rayllm.config.options import EngineConfig
from rayllm.core.scheduler import Scheduler
from rayllm.core.window import KVWindow
from rayllm.errors import ConfigError, InvalidRequestError
from rayllm.executor.base import Executor
from rayllm.text.grammar import Grammar, bad_grammar
from rayllm.text.grammar_compiler import GrammarCompiler
from rayllm.worker.gc_pauses import freeze_heap, thaw_heap

MASK_WAIT_S = 0.05  # at most, before the loop looks at its inbox again

logger = logging.getLogger(__name__)


class EngineCore:
    """A scheduler and an executor that has been started with `num_blocks` blocks.

    depth: plans in flight, 1 or 2. With 2, the next step is scheduled while one computes. grammars: None if the engine
    has no tokenizer. num_cpu_blocks: of the host pool.
    Raises ConfigError if max_model_len is configured but the pool cannot hold one such sequence, or its window where
    all layers have one (if it is not configured, the pool limits it), and if preemption is to be by swap and the host
    pool holds no block.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        executor: Executor,
        num_blocks: int,
        depth: int,
        grammars: GrammarCompiler | None,
        num_cpu_blocks: int = 0,
    ):
        pool_tokens = num_blocks * config.block_size
        longest = KVWindow(spec.kv_window, config.block_size).longest(num_blocks)
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len {config.max_model_len} does not fit into the KV cache of {pool_tokens} tokens "
                f"({num_blocks} blocks of {config.block_size})"
            )
        max_model_len = min(config.max_model_len or spec.max_model_len, longest)
        if config.max_model_len is None and max_model_len < spec.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens: sequences are limited to that, not to the model's %d",
                pool_tokens,
                spec.max_model_len,
            )
        if config.preemption_mode == "swap" and not num_cpu_blocks:
            raise ConfigError(f'preemption_mode "swap": swap_space {config.swap_space:g} GiB is less than a block')
        self.info = EngineInfo(
            model=config.model,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            num_kv_tokens=pool_tokens,
            eos_token_ids=spec.eos_token_ids,
            start=executor.report,
            hidden_size=spec.hidden_size,
            kv_cache_dtype=config.kv_cache_dtype,
            max_num_seqs=config.max_num_seqs,
        )
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=spec.eos_token_ids,
            policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            seed=config.seed,
            num_cpu_blocks=num_cpu_blocks,
            preemption_mode=config.preemption_mode,
            costs=slowest(executor.report.kv_costs),
            sliding_window=spec.kv_window,
            target_itl=None if config.target_itl_ms is None else config.target_itl_ms / 1e3,
            step_costs=executor.report.ready[0].step_costs if executor.report.ready else None,
            clock=time.monotonic,
        )
        self._executor = executor
        self._depth = depth
        self._grammars = grammars

    def compile(self, request: GenerationRequest) -> Future[Grammar]:
        """Start compiling the grammar of a request that has structured_outputs; `add` needs it.

        Returns at once. Raises InvalidRequestError, also as the result, for a request that cannot be served.
        """
        validate_request(request, self.info)
        if request.params.structured_outputs is None:
            raise ValueError("only requests with structured_outputs have a grammar")
        if self._grammars is None:
            raise bad_grammar("needs a tokenizer, and skip_tokenizer_init left it out")
        return self._grammars.compile(request.params.structured_outputs, self.has_work())

    def add(self, request: GenerationRequest, grammar: Grammar | None = None) -> None:
        """Queue a request. Raises InvalidRequestError if it can never be served or its id is in use.

        grammar: from `compile`, for a request that has structured_outputs, and for no other.
        """
        if (grammar is None) != (request.params.structured_outputs is None):
            raise ValueError("a request has a grammar if it has structured_outputs, and only then")
        validate_request(request, self.info)
        if request.request_id in self.scheduler.groups:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", "request_id")
        self.scheduler.add(request, grammar)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once; no more deltas come for them. Unknown ids are ignored."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """True while a request lives or a step is in flight."""
        return self.scheduler.has_work()

    def step(self) -> list[TokenDelta]:
        """Schedule and submit one plan, take in the oldest result if enough are in flight. Blocks for at most one step.

        Raises EngineDeadError if a worker failed.
        """
        plan = self.scheduler.schedule()
        deltas = [TokenDelta(request_id, 0, []) for request_id in self.scheduler.to_report]
        if plan is not None:
            self._executor.submit(plan)
        if plan is None or len(self.scheduler.in_flight) >= self._depth:
            if self.scheduler.in_flight:
                return deltas + self.scheduler.update(self._executor.collect())
            deltas += self.scheduler.take_failed()
            if self.scheduler.awaited_masks:
                assert self._grammars is not None  # who made the constraints
                self._grammars.threads.wait(MASK_WAIT_S)
            elif self.scheduler.has_work() and not deltas:
                raise RuntimeError("requests wait, but none can be scheduled and none is in flight")
        return deltas

    def stats(self) -> EngineStats:
        """A snapshot for metrics and health."""
        return self.scheduler.stats()

    def check_health(self) -> None:
        """Raise EngineDeadError if the workers cannot go on. Cheap, and safe from any thread."""
        self._executor.check_health()

    def check_integrity(self) -> None:
        """Raise AssertionError if the driver's records contradict each other."""
        self.scheduler.check_integrity()

    def shutdown(self) -> None:
        """Stop the workers; idempotent."""
        if self._grammars is not None:
            self._grammars.close()
        self._executor.shutdown()
        thaw_heap()


def build_engine_core(config: EngineConfig) -> EngineCore:
    """Read the model's config, start the workers and return a core ready for requests.

    Raises ConfigError or ModelError for what cannot work as configured, StartupError if the workers don't come up.
    """
    from rayllm.executor import make_executor

    spec = load_model_spec(config.model)
    check_parallel(spec, config.tensor_parallel_size)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the model's limit of {spec.max_model_len}")
    started = time.monotonic()
    grammars = None
    if not config.skip_tokenizer_init:
        grammars = GrammarCompiler(config.model, spec.vocab_size, spec.eos_token_ids)
    executor = make_executor(config, spec)
    try:
        limits = executor.start()
        core = EngineCore(
            config, spec, executor, limits.num_gpu_blocks, executor.max_in_flight, grammars, limits.num_cpu_blocks
        )
    except BaseException:
        if grammars is not None:
            grammars.close()
        executor.shutdown()
        raise
    freeze_heap()
    logger.info("engine ready in %.1f s, %d KV tokens", time.monotonic() - started, core.info.num_kv_tokens)
    return core
