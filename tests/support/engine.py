"""An `EngineCore` without a model: an executor that checks every KV read, and grammars that are ready on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import msgspec
from support.fakes import EOS, VOCAB, FakeConstraint, FakeWorker

from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.api.types import (
    Adapter,
    GenerationRequest,
    KVBlocks,
    KVCosts,
    RankReady,
    RequestOutput,
    StepPlan,
    TokenDelta,
)
from rayllm.config.kv_groups import kv_groups
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.engine.engine import EngineCore
from rayllm.errors import EngineDeadError, ModelError
from rayllm.executor.base import Executor
from rayllm.text.outputs import OutputProcessor, accumulate
from rayllm.text.tokenizer import Tokenizer

WORD = StructuredOutputs(regex="[a-z]+")


def fake_config(**options: object) -> ResolvedConfig:
    """Of an engine with the fake model: VOCAB tokens, of which EOS ends a sequence."""
    options = {"device": "cpu", "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16} | options
    config = resolve(EngineConfig(**options), 0)
    return replace(config, spec=replace(config.spec, vocab_size=VOCAB, eos_token_ids=[EOS]))


class FakeExecutor(Executor):
    """Runs plans on a `FakeWorker`, each when it is collected.

    fails: asked of each plan that is to run whether the worker fails over it.
    """

    def __init__(self, config: ResolvedConfig, blocks: KVBlocks = KVBlocks(64, 0), error: Exception | None = None):
        super().__init__()
        self.plans: list[StepPlan] = []  # all, in order
        self.lost: str | None = None  # what check_health says of a dead worker
        self.num_shutdowns = 0
        self.adapters: list[Adapter] = []  # that were loaded, in order
        self.bad_adapters: set[str] = set()  # paths of those that cannot be
        self._config, self._blocks, self._error = config, blocks, error
        self._in_flight: list[StepPlan] = []
        self.fails: Callable[[StepPlan], bool] = lambda _plan: False
        self.can_recover = False
        self.num_recoveries = 0

    def start(self) -> KVBlocks:
        if self._error is not None:
            raise self._error
        groups = kv_groups(self._config.spec, self._config.tp)
        windows, states = tuple(group.window for group in groups), sum(group.recurrent for group in groups)
        blocks = msgspec.structs.replace(self._blocks, max_num_seqs=self._config.num_seqs_choices[-1])
        if self._blocks.cpu:
            self.report.ready.append(RankReady(kv_costs=KVCosts(1.0, 1e-3, 1e-3)))
        self._make_worker = lambda: FakeWorker(
            blocks.gpu, self._config.block_size, blocks.max_num_seqs, blocks.cpu, windows, states
        )
        self._worker = self._make_worker()
        return blocks

    def recover(self) -> None:
        if not self.can_recover:
            raise EngineDeadError("there are no more workers")
        self._worker, self._in_flight, self.lost = self._make_worker(), [], None
        self.num_recoveries += 1

    def load_adapter(self, adapter: Adapter) -> None:
        if adapter.path in self.bad_adapters:
            raise ModelError(f"{adapter.path} is bad")
        self.adapters.append(adapter)

    def drop_adapter(self, adapter_id: int) -> None:
        self.adapters = [each for each in self.adapters if each.id != adapter_id]

    def submit(self, plan: StepPlan) -> None:
        assert len(self._in_flight) < self.max_in_flight
        self.plans.append(plan)
        self._in_flight.append(plan)
        for adapter_id in plan.dropped_adapters:
            self.drop_adapter(adapter_id)

    def collect(self):
        if self.fails(self._in_flight[0]):
            raise EngineDeadError("a worker failed")
        return self._worker.execute(self._in_flight.pop(0))

    def check_health(self) -> None:
        if self.lost is not None:
            raise EngineDeadError(self.lost)

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class HeldGrammars:
    """A `GrammarCompiler` whose compilations end when the test says so; what they make is the fake grammar."""

    def __init__(self) -> None:
        self.compiling: list[Future] = []  # in the order of the requests
        self.gently: list[bool] = []
        self.clients: list[str | None] = []
        self.closed = False
        self.threads = SimpleNamespace(wait=lambda _timeout: None)

    def compile(self, _structure: StructuredOutputs, client: str | None = None, gently: bool = False) -> Future:
        self.clients.append(client)
        self.compiling.append(Future())
        self.gently.append(gently)
        return self.compiling[-1]

    def release(self, index: int) -> None:
        """The compilation of this number is done."""
        self.compiling[index].set_result(FakeConstraint)

    def close(self) -> None:
        self.closed = True


def fake_core(
    grammars: HeldGrammars | None = None, blocks: KVBlocks = KVBlocks(64, 0), **options: object
) -> tuple[EngineCore, FakeExecutor]:
    """A core that is ready for requests, and its executor."""
    config = fake_config(**options)
    executor = FakeExecutor(config, blocks)
    return EngineCore(config, executor, executor.start(), grammars), executor


def engine_request(
    request_id: str, max_tokens: int = 8, *, prompt: list[int] | None = None, **params: object
) -> GenerationRequest:
    """A request with a seed, so that `fakes.expected_output` knows what comes of it."""
    settings = SamplingParams(**{"max_tokens": max_tokens, "seed": 1, "ignore_eos": True} | params)
    return GenerationRequest(request_id=request_id, prompt_token_ids=prompt or [1, 2, 3], params=settings)


def bound_request(request_id: str, max_tokens: int = 8, **params: object) -> GenerationRequest:
    """One with a grammar."""
    return engine_request(request_id, max_tokens, **{"ignore_eos": False, "structured_outputs": WORD} | params)


def run_all(core: EngineCore) -> list[TokenDelta]:
    """Step until there is nothing to do."""
    deltas = []
    while core.has_work():
        deltas += core.step()
        core.check_integrity()
    return deltas


def outputs_of(
    core: EngineCore, requests: list[GenerationRequest], tokenizer: Tokenizer | None = None
) -> list[RequestOutput]:
    """Run requests to their end; what each of them comes to, in order."""
    processor = OutputProcessor(tokenizer)
    totals: dict[str, RequestOutput | None] = {}
    for request in requests:
        core.add(request)
        processor.add(request)
        totals[request.request_id] = None
    while core.has_work() or core.is_compiling:
        if not core.has_work():
            time.sleep(0.001)
            continue
        outputs, aborts = processor.process(core.step())
        core.abort(aborts)
        for output in outputs:
            totals[output.request_id] = accumulate(totals[output.request_id], output)
    assert all(total is not None and total.finished for total in totals.values())
    return list(totals.values())
