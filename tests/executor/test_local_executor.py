"""LocalExecutor, and the choice between the executors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.stand_ins import AddingWorker, FailingWorker, make_plan

from rayllm.config.model_spec import load_model_spec
from rayllm.config.options import EngineConfig
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError
from rayllm.executor import WorkerLimits, make_executor
from rayllm.executor.base import resolve_device
from rayllm.executor.local import LocalExecutor

SPEC = load_model_spec(EngineConfig().model)


def make_local(worker_factory=AddingWorker):
    return LocalExecutor(EngineConfig(device="cpu"), SPEC, worker_factory)


@pytest.mark.parametrize("depth", [1, 2])
def test_results_come_in_order(depth):
    executor = make_local()
    assert executor.start() == WorkerLimits(num_gpu_blocks=100, num_cpu_blocks=50)
    assert [name for name, _ in executor.report.phases] == [
        "load model",
        "size KV cache",
        "allocate KV cache",
        "warm up",
    ]
    with pytest.raises(RuntimeError, match="no plan"):
        executor.collect()
    assert executor.max_in_flight == 1, "on a CPU submit computes at once"
    executor.max_in_flight = depth  # as it is on a GPU
    for step_id in range(1, depth + 1):
        executor.submit(make_plan(step_id))
    with pytest.raises(RuntimeError, match=f"{depth} plans are in flight"):
        executor.submit(make_plan(3))
    assert executor.collect().token_ids == [0, 29, 58]
    if depth == 2:
        assert executor.collect().step_id == 2
    executor.check_health()
    worker = executor._worker
    executor.shutdown()
    executor.shutdown()
    assert worker.calls.count("close") == 1
    with pytest.raises(RuntimeError, match="starts once"):
        executor.start()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.submit(make_plan(4))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", StartupError, "ValueError: made to fail in load_model"),
        ("config", ConfigError, "^made to fail"),
        ("model", ModelError, "^made to fail"),
    ],
)
def test_a_start_that_fails(how, error, message):
    executor = make_local(partial(FailingWorker, rank=0, where="load_model", how=how))
    with pytest.raises(error, match=message) as raised:
        executor.start()
    assert type(raised.value) is error
    with pytest.raises(EngineDeadError):
        executor.check_health()


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_step_that_fails(where):
    executor = make_local(partial(FailingWorker, rank=0, where=where, how="raise"))
    executor.start()
    with pytest.raises(EngineDeadError, match=f"made to fail in {where}"):  # noqa: PT012
        executor.submit(make_plan(3))
        executor.collect()
    with pytest.raises(EngineDeadError, match=f"made to fail in {where}"):
        executor.check_health()
    executor.shutdown()


def test_the_choice_of_the_executor():
    from rayllm.executor.ray import RayExecutor

    kinds = {
        (tp, name): (LocalExecutor if (tp, name) in ((1, "auto"), (1, "local")) else RayExecutor)
        for tp in (1, 2)
        for name in ("auto", "local", "ray")
        if (tp, name) != (2, "local")
    }
    for (tp, name), kind in kinds.items():
        assert type(make_executor(EngineConfig(tensor_parallel_size=tp, executor=name), SPEC)) is kind
    with pytest.raises(ConfigError, match=r'executor "local" .* tensor_parallel_size is 2'):
        make_executor(EngineConfig(tensor_parallel_size=2, executor="local"), SPEC)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match='"cuda" needs a GPU'):
        resolve_device("cuda")
