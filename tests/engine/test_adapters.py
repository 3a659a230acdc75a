"""Adapters of an engine core without a model: loads beside steps, what a recovery does to them, and limits."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
from support.adapters import edit_config
from support.engine import engine_request, fake_core, run_all

from rayllm.engine.driver import EngineDriver
from rayllm.errors import EngineDeadError, InvalidRequestError, ModelError


@pytest.fixture
def folders(tmp_path):
    """Makes folders that look like adapters, as far as the driver reads them."""

    def make(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        edit_config(str(folder), peft_type="LORA", target_modules=["q_proj"])
        (folder / "adapter_model.safetensors").write_bytes(name.encode())
        return str(folder)

    return make


def load(core, name, path):
    core.add_adapter(core.prepare_adapter(name, path))


def request(name, adapter="", **options):
    return msgspec.structs.replace(engine_request(name, **options), adapter=adapter)


def test_plans_say_which_adapters_go_where_and_those_removed_are_dropped(folders):
    core, executor = fake_core(enable_lora=True, max_loras=1)
    load(core, "x", folders("x"))
    load(core, "y", folders("y"))
    assert [(adapter.id, adapter.name) for adapter in executor.adapters] == [(0, "x"), (1, "y")]
    core.add(request("a", "x"))
    core.add(request("b", "y"))
    core.step()
    core.remove_adapter("x")
    assert len(executor.adapters) == 2
    run_all(core)
    assert [put for plan in executor.plans for put in plan.adapters] == [(0, 0), (0, 1)]
    assert [adapter.name for adapter in executor.adapters] == ["y"], "once its request has ended"
    with pytest.raises(InvalidRequestError, match="the adapter 'x' is not loaded"):
        core.add(request("c", "x"))


def test_new_workers_read_adapters_again_and_others_do_not_wait(folders):
    core, executor = fake_core(enable_lora=True)
    executor.can_recover = True
    load(core, "x", folders("x"))
    core.add(request("a", "x", max_tokens=6))
    core.add(request("b", max_tokens=6))
    core.step()
    gate, read = threading.Event(), executor.load_adapter
    executor.load_adapter = lambda adapter: (gate.wait(30), read(adapter))
    fails = iter([True])
    executor.fails = lambda _plan: next(fails, False)
    ended = []
    while "b" not in ended:
        ended += [delta.request_id for delta in core.step() if delta.finish_reason]
    assert executor.num_recoveries == 1 and "a" not in ended
    gate.set()
    deltas = run_all(core)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert [adapter.name for adapter in executor.adapters] == ["x", "x"]


def test_an_adapter_that_new_workers_cannot_read_ends_its_requests_alone(folders):
    core, executor = fake_core(enable_lora=True)
    executor.can_recover = True
    path = folders("x")
    load(core, "x", path)
    core.add(request("a", "x", max_tokens=6))
    core.add(request("b", max_tokens=6))
    core.step()
    executor.bad_adapters.add(path)
    fails = iter([True])
    executor.fails = lambda _plan: next(fails, False)
    reasons = {delta.request_id: delta for delta in run_all(core) if delta.finish_reason}
    assert reasons["b"].finish_reason == "length"
    assert reasons["a"].finish_reason == "error" and "cannot read the request's adapter" in reasons["a"].stop_reason
    assert core.adapters == []
    executor.bad_adapters.clear()
    load(core, "x", path)
    core.add(request("c", "x"))
    assert run_all(core)[-1].finish_reason == "length"


def test_a_refused_adapter_is_not_there(folders):
    core, executor = fake_core(enable_lora=True)
    path = folders("x")
    executor.bad_adapters.add(path)
    with pytest.raises(ModelError, match="is bad"):
        load(core, "x", path)
    assert core.adapters == []


def test_the_driver_loads_beside_requests(folders):
    core, executor = fake_core(enable_lora=True)
    driver = EngineDriver(core)
    path = folders("x")
    driver.load_adapter("x", path)
    assert core.adapters == ["x"]
    with pytest.raises(InvalidRequestError, match="is loaded already"):
        driver.load_adapter("x", path)
    driver.unload_adapter("x")
    assert core.adapters == []
    with pytest.raises(InvalidRequestError, match="no adapter 'x' is loaded"):
        driver.unload_adapter("x")
    driver.shutdown()
    with pytest.raises(EngineDeadError):
        driver.load_adapter("x", path)
    assert executor.num_shutdowns == 1


def test_an_engine_without_work_lets_adapters_go_too(folders):
    core, executor = fake_core(enable_lora=True, max_cpu_loras=1)
    path = folders("x")
    for _ in range(3):
        load(core, "x", path)
        core.remove_adapter("x")
        assert executor.adapters == []


def test_adapters_that_are_being_loaded_count(folders):
    core, _executor = fake_core(enable_lora=True, max_cpu_loras=1)
    first = core.prepare_adapter("x", folders("x"))
    with pytest.raises(InvalidRequestError, match="max_cpu_loras"):
        core.prepare_adapter("y", folders("y"))
    core.add_adapter(first)
    core.remove_adapter("x")
    load(core, "z", folders("z"))


def test_an_adapter_that_is_removed_while_new_workers_read_it_does_not_stay(folders):
    core, executor = fake_core(enable_lora=True)
    executor.can_recover = True
    load(core, "x", folders("x"))
    core.add(request("a", max_tokens=3))
    core.step()
    gate, read = threading.Event(), executor.load_adapter
    executor.load_adapter = lambda adapter: (gate.wait(30), read(adapter))
    executor.adapters = []  # the new workers have none
    fails = iter([True])
    executor.fails = lambda _plan: next(fails, False)
    while not executor.num_recoveries:
        core.step()
    core.remove_adapter("x")
    run_all(core)
    gate.set()
    while not executor.adapters:
        time.sleep(0.01)
    run_all(core)
    assert executor.adapters == []
