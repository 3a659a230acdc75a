"""Stands in for Ray Serve's handle of the engine's replica."""

import asyncio
from types import SimpleNamespace

from rayllm.serve.admission import Load
from rayllm.serve.deployment import Endpoint
from rayllm.types import EngineInfo, EngineStats, TokenDelta

INFO = EngineInfo(model="m", max_model_len=64, vocab_size=100, num_kv_tokens=640, eos_token_ids=[0])


class Method:
    """A handle's method: `.remote(...)` awaits or streams what the function gives."""

    def __init__(self, function):
        self.remote = function


class FakeHandle:
    """What ApiServer and RelayClient use of a DeploymentHandle."""

    def __init__(self):
        self.current = Endpoint("ipc://one", "here")
        self.gone = False
        self.relayed = []
        self.cancelled = 0
        self.loads = []
        self.others = Load()

    def options(self, stream):
        assert stream
        return SimpleNamespace(relay=Method(self._relay))

    def __getattr__(self, name):
        async def call(*args):
            if self.gone:
                raise ConnectionError("no replica")
            match name:
                case "endpoint":
                    return self.current
                case "info":
                    return INFO
                case "stats":
                    return EngineStats(num_running=3)
                case "unhealthy_reason":
                    return None
                case "exchange_metrics":
                    return args[1]
                case "exchange_load":
                    self.loads.append(args[1])
                    return self.others
            raise AssertionError(name)

        return Method(call)

    def _relay(self, request):
        handle = self

        class Response:
            def cancel(self):
                handle.cancelled += 1

            async def __aiter__(self):
                handle.relayed.append(request.request_id)
                yield [TokenDelta(request.request_id, 0, [5])]
                if request.request_id == "slow":
                    await asyncio.sleep(60)
                if request.request_id == "broken":
                    raise ConnectionError("node lost")
                yield [TokenDelta(request.request_id, 0, [6], finish_reason="stop")]

        return Response()


async def until(condition):
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")
