"""`EngineCore`: the engine loop. Requests go in, one step at a time runs, token deltas come out.

    schedule() -> executor.submit(plan) ... executor.collect() -> update(result) -> deltas

The same core runs behind the offline API, the HTTP deployment and any test; it is not thread-safe.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from rayllm.api.types import Abort, EngineInfo, EngineStats, GenerationRequest, KVBlocks, StartReport, TokenDelta
from rayllm.api.validation import validate_request
from rayllm.config.kv_groups import kv_groups
from rayllm.config.resolved import ResolvedConfig
from rayllm.core.adapter_slots import AdapterSlots
from rayllm.core.check import check_scheduler
from rayllm.core.chunk_budget import ChunkBudget
from rayllm.core.memory import KVMemory, KVWindow, WriteBackLimits, longest, most_blocks
from rayllm.core.policy import POLICIES
from rayllm.core.scheduler import Scheduler
from rayllm.core.sequence import MakeConstraint
from rayllm.core.state import SchedulerState
from rayllm.core.token_rules import TokenRules, has_rules
from rayllm.engine.adapters import EngineAdapters, PreparedAdapter, load_adapters
from rayllm.errors import ConfigError, EngineDeadError, InvalidRequestError, OverloadedError
from rayllm.executor.base import Executor
from rayllm.text.grammar import Grammar, bad_grammar
from rayllm.text.grammar_compiler import GrammarCompiler

MASK_WAIT_S = 0.05  # at most, before the loop looks at its inbox again

logger = logging.getLogger(__name__)


class _Compiling(NamedTuple):
    """A request that waits for its grammar."""

    request: GenerationRequest
    grammar: Future[Grammar]
    adapter: int | None


class EngineCore:
    """A scheduler and an executor that has been started.

    blocks: of the pools that the workers allocated. grammars: None if the engine has no tokenizer.
    Raises ConfigError if max_model_len is configured but the pool cannot hold one such sequence (if it is not
    configured, the pool limits it), and if preemption is to be by swap and the host pool holds no block; ModelError for
    an adapter of lora_modules that cannot be served.
    """

    def __init__(
        self, config: ResolvedConfig, executor: Executor, blocks: KVBlocks, grammars: GrammarCompiler | None = None
    ):
        max_model_len = _fitting_length(config, blocks.gpu)
        self.info = EngineInfo(
            model=config.options.model,
            max_model_len=max_model_len,
            vocab_size=config.spec.vocab_size,
            num_kv_tokens=_kv_tokens(config, blocks.gpu, max_model_len),
            eos_token_ids=config.spec.eos_token_ids,
            start=executor.report,
            hidden_size=config.spec.hidden_size,
            kv_cache_dtype=config.options.kv_cache_dtype,
            max_num_seqs=blocks.max_num_seqs,
            seed=config.options.seed,
            sampling_defaults=config.sampling_defaults,
        )
        self.scheduler = _make_scheduler(config, self.info.max_model_len, blocks, executor.report)
        # New workers are being started in place of some that failed.
        self.is_recovering = False
        # Called on another thread when a request that waited for its grammar can go on: `step` has something to do.
        self.on_compiled: Callable[[], None] = lambda: None
        self._executor = executor
        self._grammars = grammars
        # Requests that are not queued yet, in the order in which they came, and their grammars.
        self._compiling: dict[str, _Compiling] = {}
        self._adapters = EngineAdapters(
            config.options, executor, self.scheduler.state.adapters, lambda: self.on_compiled()
        )
        load_adapters(config.options.adapters, self._adapters)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it can never be served or its id is in use.

        One with structured_outputs is queued when its grammar is compiled, which others need not wait for; if that
        fails, a delta says so. Raises OverloadedError if too many grammars wait.
        """
        validate_request(request, self.info)
        if request.request_id in self.scheduler.state.groups or request.request_id in self._compiling:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", "request_id")
        adapter, structure = self._adapters.id_of(request.adapter), request.params.structured_outputs
        if structure is None:
            self.scheduler.add(request, self._constraint(request), adapter)
            return
        if self._grammars is None:
            raise bad_grammar("needs a tokenizer, and skip_tokenizer_init left it out")
        # One that another engine had is not refused: its client may have half of the answer.
        client = None if request.num_deaths or request.emitted is not None else request.client
        grammar = self._grammars.compile(structure, client, gently=self.has_work())
        self._compiling[request.request_id] = _Compiling(request, grammar, adapter)
        grammar.add_done_callback(lambda _: self.on_compiled())

    def abort(self, aborts: Iterable[Abort]) -> None:
        """End requests, or completions of them, at once; no more deltas come for them. Unknown ones are ignored."""
        for abort in aborts:
            if abort.index is None and (waiting := self._compiling.pop(abort.request_id, None)) is not None:
                grammar = waiting.grammar
                if all(grammar is not other.grammar for other in self._compiling.values()):
                    grammar.cancel()
            self.scheduler.abort(abort.request_id, abort.index)
        self._drop_adapters()

    def has_work(self) -> bool:
        """True while `step` has something to do."""
        compiled = any(waiting.grammar.done() for waiting in self._compiling.values())
        return self.scheduler.has_work() or compiled or self._adapters.is_ready

    @property
    def is_compiling(self) -> bool:
        """True while a grammar is being compiled. From any thread."""
        return any(not waiting.grammar.done() for waiting in list(self._compiling.values()))

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may ask for."""
        return self._adapters.names

    def prepare_adapter(self, name: str, path: str) -> PreparedAdapter:
        """Read an adapter from its folder, on another thread if steps are to go on. `add_adapter` takes the result.

        Raises InvalidRequestError, and ModelError for a folder that cannot be served.
        """
        return self._adapters.prepare(name, path)

    def add_adapter(self, prepared: PreparedAdapter) -> None:
        """Let requests ask for an adapter. Raises InvalidRequestError."""
        try:
            self._adapters.add(*prepared)
        finally:
            self._drop_adapters()

    def remove_adapter(self, name: str) -> None:
        """Let no request ask for an adapter any more; those that have it go on. Raises InvalidRequestError."""
        self._adapters.remove(name)
        self._drop_adapters()

    def step(self) -> list[TokenDelta]:
        """Schedule and submit one plan, take in the oldest result if enough are in flight. Blocks for at most one step.

        Requests whose grammars cannot be used end first, in a step in which nothing is scheduled. If a worker failed,
        new ones take over, and requests go on where they were; raises EngineDeadError if that can't be done.
        """
        if ended := self._take_compiled() + self._take_adapters():
            return ended
        plan = self.scheduler.schedule()
        deltas = self.scheduler.new_deltas
        in_flight = self.scheduler.in_flight
        try:
            if plan is not None:
                self._executor.submit(plan)
            if plan is not None and len(in_flight) < self._executor.max_in_flight:
                return deltas
            result = self._executor.collect() if in_flight else None
        except EngineDeadError as error:
            return deltas + self._recover(error)
        if result is not None:
            deltas = deltas + self.scheduler.update(result)
            self._drop_adapters()
            return deltas
        if self.scheduler.state.awaiting_mask:
            assert self._grammars is not None  # who made the constraints
            self._grammars.threads.wait(MASK_WAIT_S)
        elif self._adapters.is_loading:
            self._adapters.wait(MASK_WAIT_S)
        elif self.scheduler.has_work() and not deltas:
            raise RuntimeError("requests wait, but none can be scheduled and none is in flight")
        return deltas

    def stats(self) -> EngineStats:
        """A snapshot for metrics and health."""
        return self.scheduler.stats()

    def watch(self) -> list[TokenDelta]:
        """Replace workers that failed while there was nothing to do, as `step` does. Cheap if there are none."""
        try:
            self._executor.check_health()
        except EngineDeadError as error:
            return self._recover(error)
        return []

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker failed that cannot be replaced. Cheap, and safe from any thread."""
        if not self._executor.can_recover:
            self._executor.check_health()

    def check_integrity(self) -> None:
        """Raise AssertionError if the driver's records contradict each other."""
        check_scheduler(self.scheduler)

    def shutdown(self) -> None:
        """Stop the workers; idempotent."""
        if self._grammars is not None:
            self._grammars.close()
        self._adapters.close()
        self._executor.shutdown()
        gc.unfreeze()

    def _recover(self, error: EngineDeadError) -> list[TokenDelta]:
        """Have new workers take over. Raises EngineDeadError."""
        logger.warning("starting new workers: %s", error)
        started, self.is_recovering = time.monotonic(), True
        try:
            self._executor.recover()
        finally:
            self.is_recovering = False
        seconds, report = time.monotonic() - started, self._executor.report
        self._adapters.restart()
        deltas = self.scheduler.restart(seconds)
        phases = ", ".join(f"{name} {taken:.2f} s" for name, taken in report.phases)
        num_requests = len(self.scheduler.state.groups)
        logger.warning("new workers took over in %.2f s (%s); %d requests go on", seconds, phases, num_requests)
        return deltas

    def _constraint(self, request: GenerationRequest, grammar: Grammar | None = None) -> MakeConstraint | None:
        """What makes the constraints of a request's completions, if it has any. Raises InvalidRequestError."""
        if not has_rules(request):
            return grammar
        return TokenRules(request, self.info.vocab_size, self.info.eos_token_ids, grammar)

    def _drop_adapters(self) -> None:
        """Have the workers forget adapters that nobody needs any more."""
        self._adapters.drop_unused(self._used_adapters, idle=not self.scheduler.in_flight)

    def _used_adapters(self) -> set[int | None]:
        """Those of all requests that live."""
        live = {group.adapter for group in self.scheduler.state.groups.values()}
        return live | {waiting.adapter for waiting in self._compiling.values()}

    def _take_adapters(self) -> list[TokenDelta]:
        """Take the adapters that new workers have read, and end requests whose adapter they cannot read."""
        if not self._adapters.is_ready:
            return []
        lost = self._adapters.take_ready()
        self._drop_adapters()
        requests = [group.request for group in self.scheduler.state.groups.values() if group.adapter in lost]
        requests += [waiting.request for waiting in self._compiling.values() if waiting.adapter in lost]
        self.abort(Abort(request.request_id) for request in requests)
        message = "the workers were lost, and the new ones cannot read the request's adapter"
        return [delta for each in requests for delta in failures(each.request_id, each.live_indices, message)]

    def _take_compiled(self) -> list[TokenDelta]:
        """Queue the requests whose grammars have become ready; end those whose grammars cannot be used.

        Refusals come before other ends.
        """
        refused: list[TokenDelta] = []
        failed: list[TokenDelta] = []
        done = [waiting for waiting in self._compiling.values() if waiting.grammar.done()]
        for request, grammar, adapter in done:
            del self._compiling[request.request_id]
            error = grammar.exception()
            try:
                if error is None:
                    self.scheduler.add(request, self._constraint(request, grammar.result()), adapter)
                    continue
            except InvalidRequestError as nothing_left:
                error = nothing_left
            if isinstance(error, InvalidRequestError):
                refused.append(refusal(request.request_id, error))
            else:  # the library's panics are no Exceptions; they too end this request alone
                logger.error("the grammar of request %s could not be compiled", request.request_id, exc_info=error)
                indices = request.live_indices
                failed += failures(request.request_id, indices, f"internal error while compiling its grammar: {error}")
        return refused + failed


def refusal(request_id: str, error: InvalidRequestError) -> TokenDelta:
    """The only delta of a request that the engine does not take."""
    return TokenDelta(
        request_id,
        0,
        [],
        finish_reason="error",
        stop_reason=str(error),
        bad_param=error.param or "request",
        try_again=isinstance(error, OverloadedError),
    )


def failures(request_id: str, indices: Iterable[int], message: str) -> list[TokenDelta]:
    """The last deltas of these completions of a request, which end by no fault of the request."""
    return [TokenDelta(request_id, index, [], finish_reason="error", stop_reason=message) for index in sorted(indices)]


def _windows(config: ResolvedConfig) -> tuple[KVWindow, ...]:
    """Of each group of layers."""
    return tuple(KVWindow(group.window, config.block_size) for group in kv_groups(config.spec, config.tp))


def _fitting_length(config: ResolvedConfig, num_blocks: int) -> int:
    """Tokens that a sequence may have, now that the pool's size is known. Raises ConfigError."""
    options, windows = config.options, _windows(config)
    length = longest(windows, num_blocks)
    if config.max_model_len <= length:
        return config.max_model_len
    if len(windows) == 1:
        pool = f"the KV cache of {num_blocks * config.block_size} tokens ({num_blocks} blocks of {config.block_size})"
    else:
        pool = f"the KV cache of {num_blocks} blocks for {len(windows)} groups of layers, {length} tokens of a sequence"
    if options.max_model_len is not None:
        raise ConfigError(f"max_model_len {options.max_model_len} does not fit into {pool}")
    if not length:
        raise ConfigError(f"not a single block of a sequence fits into {pool}")
    logger.warning("sequences are limited by %s, not to the model's %d tokens", pool, config.max_model_len)
    return length


def _kv_tokens(config: ResolvedConfig, num_blocks: int, max_model_len: int) -> int:
    """As `EngineInfo` has it."""
    windows = _windows(config)
    if len(windows) == 1:
        return num_blocks * config.block_size
    return num_blocks * max_model_len // most_blocks(windows, max_model_len)


def _make_scheduler(config: ResolvedConfig, max_model_len: int, blocks: KVBlocks, report: StartReport) -> Scheduler:
    options = config.options
    if options.preemption_mode == "swap" and not blocks.cpu:
        raise ConfigError(f'preemption_mode "swap": swap_space {options.swap_space:g} GiB is less than a block')
    windows = [window.tokens for window in _windows(config)]
    if config.block_size != options.block_size:
        logger.info("a block is %d tokens, so that one has room for recurrent states", config.block_size)
    memory = KVMemory(
        num_blocks=blocks.gpu,
        block_size=config.block_size,
        num_cpu_blocks=blocks.cpu,
        caching=options.enable_prefix_caching,
        costs=report.kv_costs(),
        windows=windows,
        write_back=WriteBackLimits(2 * len(windows) * config.max_num_batched_tokens // config.block_size),
        recurrent=any(group.recurrent for group in kv_groups(config.spec, config.tp)),
    )
    state = SchedulerState(
        memory,
        max_num_seqs=blocks.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=config.spec.eos_token_ids,
        preemptive=options.scheduling_policy == "priority",
        preemption_mode=options.preemption_mode,
        adapters=AdapterSlots(options.max_loras) if options.enable_lora else None,
        clock=time.monotonic,
    )
    chunk_budget = None
    if options.target_itl_ms is not None:
        step_costs = report.ready[0].step_costs if report.ready else {}
        target, widest = options.target_itl_ms / 1e3, config.spec.kv_window
        chunk_budget = ChunkBudget(target, config.max_num_batched_tokens, widest, step_costs)
    return Scheduler(state, policy=POLICIES[options.scheduling_policy], chunk_budget=chunk_budget)
