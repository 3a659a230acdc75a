"""LocalExecutor with ranks that have no model."""

from __future__ import annotations

from functools import partial

import pytest
from support.stand_ins import AddingRank, FailingRank, cpu_config, make_plan

from rayllm.api.types import KVBlocks
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError
from rayllm.executor.local import LocalExecutor


def make_local(load=AddingRank):
    return LocalExecutor(cpu_config(), load)


@pytest.mark.parametrize("depth", [1, 2])
def test_results_come_in_order(depth):
    ranks = []

    def load(*args):
        ranks.append(AddingRank(*args))
        return ranks[0]

    executor = make_local(load)
    assert executor.start() == KVBlocks(gpu=100, cpu=50)
    assert [name for name, _ in executor.report.phases] == ["load model", "warm up"]
    assert executor.max_in_flight == 1, "on a CPU submit computes at once"
    executor.max_in_flight = depth  # as it is on a GPU
    for step_id in range(1, depth + 1):
        executor.submit(make_plan(step_id))
    assert executor.collect().token_ids == [0, 29, 58]
    if depth == 2:
        assert executor.collect().step_id == 2
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    assert ranks[0].num_closed == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.submit(make_plan(4))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", StartupError, "ValueError: made to fail in load"),
        ("config", ConfigError, "^made to fail"),
        ("model", ModelError, "^made to fail"),
    ],
)
def test_a_start_that_fails(how, error, message):
    executor = make_local(partial(FailingRank, rank=0, where="load", how=how))
    with pytest.raises(error, match=message) as raised:
        executor.start()
    assert type(raised.value) is error
    with pytest.raises(EngineDeadError):
        executor.check_health()


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_step_that_fails(where):
    executor = make_local(partial(FailingRank, rank=0, where=where, how="raise"))
    executor.start()
    with pytest.raises(EngineDeadError, match=f"made to fail in {where}"):  # noqa: PT012
        executor.submit(make_plan(3))
        executor.collect()
    with pytest.raises(EngineDeadError, match=f"made to fail in {where}"):
        executor.check_health()
    executor.shutdown()
