"""`EngineCore`: requests, steps and grammars over an executor without a model, and how one is built."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.engine import FakeExecutor, HeldGrammars, bound_request, engine_request, fake_config, fake_core, run_all
from support.fakes import FakeConstraint, expected_output

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.api.types import Abort, GenerationRequest, KVBlocks, TokenDelta
from rayllm.engine import build
from rayllm.engine.build import start_resolved_engine
from rayllm.engine.engine import EngineCore, failures, refusal
from rayllm.errors import ConfigError, EngineDeadError, InvalidRequestError, StartupError


def tokens_of(deltas: list[TokenDelta], request_id: str) -> list[int]:
    return [token for delta in deltas if delta.request_id == request_id for token in delta.token_ids]


def expected(request: GenerationRequest, constraint: FakeConstraint | None = None) -> list[int]:
    prompt, params = request.prompt_token_ids, request.params
    stops = frozenset() if constraint is None else frozenset([7])
    return expected_output(prompt, params.seed, len(prompt) + params.max_tokens, stops, constraint)


# ---- steps


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_requests_run_to_their_end(max_in_flight):
    core, executor = fake_core()
    executor.max_in_flight = max_in_flight
    requests = [engine_request(f"r{i}", 5 + i, prompt=[i + 1] * (3 * i + 1), seed=i) for i in range(6)]
    assert not core.has_work()
    for request in requests:
        core.add(request)
    deltas = run_all(core)
    for request in requests:
        assert tokens_of(deltas, request.request_id) == expected(request)
    assert core.stats().num_steps == len(executor.plans)
    assert core.stats().generation_tokens == sum(request.params.max_tokens for request in requests)
    assert core.stats().num_used_blocks == 0


def test_a_plan_is_submitted_while_the_one_before_runs():
    core, executor = fake_core()
    core.add(engine_request("r", 3))
    assert core.step() == []
    assert len(executor.plans) == 1
    assert tokens_of(core.step(), "r") == expected(engine_request("r", 1))
    assert len(executor.plans) == 2


def test_abort_ends_a_request_without_a_delta():
    core, _ = fake_core()
    core.add(engine_request("r", 50))
    core.add(engine_request("other", 5))
    core.step()
    core.abort([Abort("r"), Abort("unknown")])
    assert {delta.request_id for delta in run_all(core)} == {"other"}
    core.add(engine_request("r", 2))  # the id is free
    assert tokens_of(run_all(core), "r") == expected(engine_request("r", 2))


def test_starts_are_told_to_who_asked():
    core, _ = fake_core()
    core.add(GenerationRequest(**fields_of(engine_request("a", 1)) | {"report_start": True}))
    core.add(engine_request("b", 1))
    assert core.step() == [TokenDelta("a", 0, [])]


def fields_of(request: GenerationRequest) -> dict:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def test_what_cannot_be_served_is_refused_at_once():
    core, _ = fake_core()
    core.add(engine_request("r"))
    for request, param, message in [
        (engine_request("r"), "request_id", "'r' is in use"),
        (engine_request("x", prompt=[50]), "prompt", "token id 50"),
        (engine_request("x", prompt=[1] * 3000), "prompt", "3000 tokens"),
        (bound_request("x"), "structured_outputs", "needs a tokenizer"),
    ]:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            core.add(request)
        assert caught.value.param == param
    assert tokens_of(run_all(core), "r") == expected(engine_request("r"))


def test_health_is_that_of_the_workers():
    core, executor = fake_core()
    core.check_health()
    executor.lost = "worker rank 1 failed"
    with pytest.raises(EngineDeadError, match="rank 1"):
        core.check_health()


# ---- grammars


def test_a_request_waits_for_its_grammar_and_then_follows_it():
    grammars, calls = HeldGrammars(), []
    core, _ = fake_core(grammars)
    core.on_compiled = lambda: calls.append("compiled")
    bound = bound_request("bound", 9)
    core.add(bound)
    assert core.is_compiling and not core.has_work()
    core.add(engine_request("free"))
    assert tokens_of(run_all(core), "free") == expected(engine_request("free"))
    assert core.is_compiling and calls == []
    grammars.release(0)
    assert calls == ["compiled"]
    assert core.has_work()
    assert tokens_of(run_all(core), "bound") == expected(bound, FakeConstraint())
    assert not core.is_compiling


def test_grammars_are_compiled_gently_beside_other_work():
    grammars = HeldGrammars()
    core, _ = fake_core(grammars)
    core.add(bound_request("a"))
    core.add(engine_request("free"))
    core.add(bound_request("b"))
    assert grammars.gently == [False, True]


def test_a_grammar_that_is_known_already_delays_nothing():
    class Known(HeldGrammars):
        def compile(self, structure, client=None, gently=False):
            super().compile(structure, client, gently)
            self.release(-1)
            return self.compiling[-1]

    core, _ = fake_core(Known())
    bound = bound_request("bound", 9)
    core.add(bound)
    assert core.has_work()
    assert tokens_of(run_all(core), "bound") == expected(bound, FakeConstraint())


def test_refusals_come_first_and_in_a_step_of_their_own():
    """Clients rely on the order; an offline call that is refused stops before anything runs."""
    grammars = HeldGrammars()
    core, executor = fake_core(grammars)
    executor.max_in_flight = 1
    core.add(engine_request("free", 3))
    core.step()
    for name in ("a", "b", "c"):
        core.add(bound_request(name, n=2, temperature=1.0))
    error = InvalidRequestError("structured_outputs: unclosed group", "structured_outputs")
    bug = KeyError("a bug")
    for future, failure in zip(grammars.compiling, (bug, error, error), strict=True):
        future.set_exception(failure)
    deltas = core.step()
    assert deltas[:2] == [refusal("b", error), refusal("c", error)]
    assert deltas[2:] == failures("a", range(2), "internal error while compiling its grammar: 'a bug'")
    assert len(executor.plans) == 1
    assert not core.is_compiling
    assert tokens_of(run_all(core), "free") == expected(engine_request("free", 3))[1:]


def test_tokens_do_not_depend_on_which_grammar_is_ready_first():
    """A request has the seed of its noise from the start."""
    texts, requests = [], [bound_request(name, 9, seed=None, temperature=1.0) for name in ("a", "b")]
    for order in ((0, 1), (1, 0)):
        grammars = HeldGrammars()
        core, _ = fake_core(grammars)
        for request in requests:
            core.add(request)
        for index in order:
            grammars.release(index)
        deltas = run_all(core)
        texts.append([tokens_of(deltas, name) for name in ("a", "b")])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_a_refusal_names_what_is_refused():
    delta = refusal("r", InvalidRequestError("no", "stop"))
    assert delta == TokenDelta("r", 0, [], finish_reason="error", stop_reason="no", bad_param="stop")
    assert refusal("r", InvalidRequestError("no")).bad_param, "without a field it is still a refusal"


def test_an_id_is_in_use_while_its_grammar_is_compiled():
    grammars = HeldGrammars()
    core, _ = fake_core(grammars)
    core.add(bound_request("r"))
    for request in (engine_request("r"), bound_request("r")):
        with pytest.raises(InvalidRequestError, match="in use"):
            core.add(request)
    assert len(grammars.compiling) == 1


def test_a_request_that_is_aborted_while_its_grammar_is_compiled():
    grammars = HeldGrammars()
    core, _ = fake_core(grammars)
    core.add(bound_request("r", 3))
    core.abort([Abort("r")])
    assert not core.is_compiling
    later = bound_request("r", 4, seed=9, structured_outputs=StructuredOutputs(regex="[0-9]+"))
    core.add(later)  # another request of the same id
    assert grammars.compiling[0].cancelled(), "the first one's grammar is nobody's"
    assert run_all(core) == [] and core.is_compiling
    grammars.release(1)
    assert tokens_of(run_all(core), "r") == expected(later, FakeConstraint())


def test_a_grammar_that_another_request_waits_for_is_not_cancelled():
    class Shared(HeldGrammars):
        def compile(self, structure, client=None, gently=False):
            return self.compiling[0] if self.compiling else super().compile(structure, client, gently)

    grammars = Shared()
    core, _ = fake_core(grammars)
    first, second = bound_request("a", 3), bound_request("b", 3)
    core.add(first)
    core.add(second)
    core.abort([Abort("a")])
    grammars.release(0)
    assert tokens_of(run_all(core), "b") == expected(second, FakeConstraint())


def test_the_client_of_a_request_is_whose_grammar_it_is():
    grammars = HeldGrammars()
    core, _ = fake_core(grammars)
    core.add(msgspec.structs.replace(bound_request("a"), client="alice"))
    core.add(bound_request("b"))
    assert grammars.clients == ["alice", None]


# ---- limits


def test_a_configured_length_has_to_fit_and_another_is_cut(caplog):
    with pytest.raises(ConfigError, match=r"max_model_len 100 does not fit into the KV cache of 32 tokens \(8 blocks"):
        fake_core(blocks=KVBlocks(8, 0), max_model_len=100)
    core, _ = fake_core(blocks=KVBlocks(8, 0))
    assert core.info.max_model_len == core.info.num_kv_tokens == 32
    assert "limited by the KV cache of 32 tokens" in caplog.text
    core, _ = fake_core(blocks=KVBlocks(8, 0), max_model_len=30)
    assert core.info.max_model_len == 30


def test_a_sliding_window_needs_no_blocks_for_what_it_has_passed():
    config = fake_config(max_model_len=100)
    config = replace(config, spec=replace(config.spec, sliding_windows=(8,) * len(config.spec.sliding_windows)))
    executor = FakeExecutor(config, KVBlocks(8, 0))
    core = EngineCore(config, executor, executor.start())
    assert (core.info.max_model_len, core.info.num_kv_tokens) == (100, 32)
    core.add(engine_request("r", 90))
    assert tokens_of(run_all(core), "r") == expected(engine_request("r", 90))


def test_swap_needs_room_on_the_host():
    with pytest.raises(ConfigError, match="swap_space 1e-09 GiB is less than a block"):
        fake_core(preemption_mode="swap", swap_space=1e-9)
    core, _ = fake_core(preemption_mode="swap", swap_space=1e-9, blocks=KVBlocks(64, 1))
    assert core.stats().num_total_cpu_blocks == 1


# ---- building


@pytest.fixture
def made_grammars(monkeypatch) -> list[HeldGrammars]:
    made: list[HeldGrammars] = []

    def make(*_args):
        made.append(HeldGrammars())
        return made[-1]

    monkeypatch.setattr(build, "GrammarCompiler", make)
    return made


def test_a_core_is_built_and_stopped(made_grammars):
    config = fake_config()
    executor = FakeExecutor(config)
    core = start_resolved_engine(config, executor)
    core.add(engine_request("r", 2))
    assert tokens_of(run_all(core), "r") == expected(engine_request("r", 2))
    core.shutdown()
    assert executor.num_shutdowns == 1
    assert [grammars.closed for grammars in made_grammars] == [True]
    core.shutdown()  # it may come twice


def test_without_a_tokenizer_there_are_no_grammars(made_grammars):
    config = fake_config(skip_tokenizer_init=True)
    core = start_resolved_engine(config, FakeExecutor(config))
    assert made_grammars == []
    core.shutdown()


def test_nothing_is_left_of_a_core_that_does_not_start(made_grammars):
    for options, error, expected_error in [
        ({}, StartupError("no GPU answers"), StartupError),
        ({"max_model_len": 300}, None, ConfigError),  # 64 blocks of 4 tokens
    ]:
        config = fake_config(**options)
        executor = FakeExecutor(config, error=error)
        with pytest.raises(expected_error):
            start_resolved_engine(config, executor)
        assert executor.num_shutdowns == 1
        assert made_grammars[-1].closed
