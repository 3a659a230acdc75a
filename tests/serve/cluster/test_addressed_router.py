"""Calls through Ray Serve's handles that name their replica: what relays to other nodes rely on."""

import asyncio

from ray import serve

APP = "addressed"
NUM_REPLICAS, NUM_CALLS = 3, 100


@serve.deployment(
    num_replicas=NUM_REPLICAS,
    ray_actor_options={"num_cpus": 0.1},
    max_ongoing_requests=1000,
    request_router_config={"request_router_class": "rayllm.serve.cluster.addressed_router.AddressedRouter"},
)
class Engine:
    def who(self, replica_id=None):
        return serve.get_replica_context().replica_id.unique_id

    async def relay(self, number, replica_id):
        for _ in range(3):
            yield serve.get_replica_context().replica_id.unique_id, number
            await asyncio.sleep(0.01)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Front:
    def __init__(self, engines):
        self._engines = engines

    async def run(self):
        """(replicas, calls that reached the one they named, whether calls without or for a lost one are answered)."""
        ids = await self._engines.broadcast("who").results_async(timeout_s=10)

        async def reached(number):
            name = ids[number % len(ids)]
            stream = self._engines.options(stream=True).relay.remote(number, replica_id=name)
            return [item async for item in stream] == [(name, number)] * 3

        calls = await asyncio.gather(*(reached(number) for number in range(NUM_CALLS)))
        others = [await self._engines.who.remote(replica_id="gone"), await self._engines.who.remote()]
        return len(set(ids)), sum(calls), set(others) <= set(ids)


def test_calls_reach_the_replica_that_they_name(ray_cluster):
    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(Front.bind(Engine.bind()), name=APP, route_prefix=None)
        assert handle.run.remote().result(timeout_s=60) == (NUM_REPLICAS, NUM_CALLS, True)
    finally:
        serve.shutdown()
