"""Stands in for Ray Serve's handle of a model's replicas."""

import asyncio
from types import SimpleNamespace

import msgspec
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from rayllm.api.types import EngineInfo, EngineStats, TokenDelta
from rayllm.serve.cluster.replica import Endpoint, ReplicaReport

INFO = EngineInfo(model="m", max_model_len=64, vocab_size=100, num_kv_tokens=640, eos_token_ids=[0])


class Method:
    """A handle's method: `.remote(...)` awaits or streams what the function gives."""

    def __init__(self, function):
        self.remote = function


class Answers:
    """Of a broadcast: coroutines, one a replica."""

    def __init__(self, calls):
        self._calls = calls

    async def results_async(self, timeout_s, return_exceptions):
        assert timeout_s > 0
        return await asyncio.gather(*self._calls, return_exceptions=return_exceptions)


class FakeHandle:
    """What ModelFront and RelayClient use of a DeploymentHandle. reports: of the replicas that Serve counts, by id."""

    def __init__(self, *replica_ids):
        self.reports = {}
        self.heard = []
        self.relayed = []
        self.cancelled = 0
        self.broken = False
        for replica_id in replica_ids:
            self.add(replica_id)

    def add(self, replica_id, node_id="here", **fields):
        endpoint = Endpoint(f"ipc://{replica_id}", node_id)
        fields = {"index": len(self.reports), "info": INFO} | fields
        self.reports[replica_id] = ReplicaReport(replica_id=replica_id, endpoint=endpoint, **fields)

    def change(self, replica_id, **fields):
        self.reports[replica_id] = msgspec.structs.replace(self.reports[replica_id], **fields)

    def broadcast(self, name, report):
        assert name == "exchange"
        self.heard.append(report)
        if self.broken:
            raise TimeoutError
        if not self.reports:
            raise DeploymentUnavailableError(DeploymentID("engine"))
        return Answers([_give(report) for report in self.reports.values()])

    def options(self, stream):
        assert stream
        return SimpleNamespace(relay=Method(self._relay))

    @property
    def info(self):
        return Method(lambda: _give(INFO))

    @property
    def stats(self):
        return Method(lambda **who: _give(EngineStats(num_running=3 if who == {"replica_id": "one"} else 0)))

    def _relay(self, request, replica_id):
        handle = self

        class Response:
            def cancel(self):
                handle.cancelled += 1

            async def __aiter__(self):
                handle.relayed.append((request.request_id, replica_id))
                yield [TokenDelta(request.request_id, 0, [5])]
                if request.request_id == "slow":
                    await asyncio.sleep(60)
                if request.request_id == "broken":
                    raise ConnectionError("node lost")
                yield [TokenDelta(request.request_id, 0, [6], finish_reason="stop")]

        return Response()


async def _give(answer):
    if isinstance(answer, Exception):
        raise answer
    return answer


async def until(condition):
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")
