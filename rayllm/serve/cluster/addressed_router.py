"""`AddressedRouter`: lets a call through Ray Serve's handles name the replica that it is for."""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class AddressedRouter(RequestRouter):
    """Sends a call with a keyword argument `replica_id` to that replica; others, and those for one that is gone,
    anywhere.

    Only calls that do not pass through our own sockets come here: few, and any replica can answer them.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Any; Serve asks for the next one if that does not answer."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, len(candidate_replicas))]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Before what Serve does with `choose_replicas`: that finds a replica for whichever call has waited longest."""
        wanted = pending_request.kwargs.get("replica_id")
        for replica_id, replica in self.curr_replicas.items():
            if replica_id.unique_id == wanted and not is_retry:
                return replica
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
