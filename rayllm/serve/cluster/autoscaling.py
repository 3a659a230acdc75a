"""How many replicas a model gets: Ray Serve's autoscaler, fed with the prompt tokens that wait.

Each replica reports the load that all API servers have with it (`EngineReplica.record_autoscaling_stats`); Serve
averages that over LOOK_BACK_S, asks `QueuedTokensPolicy`, and applies the bounds and delays. Serve itself sees no
requests, since they go past its handles, so its own count of them is of no use here.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from rayllm.config.options import EngineConfig, ModelServerConfig

METRICS_INTERVAL_S = 1.0
LOOK_BACK_S = 5.0


class QueuedTokensPolicy:
    """target_queued_tokens: that may wait for a replica. max_num_seqs: completions that a replica runs at once."""

    def __init__(self, target_queued_tokens: int, max_num_seqs: int):
        self._target = target_queued_tokens
        self._max_num_seqs = max_num_seqs

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(replicas wanted, no state). Serve keeps it within its bounds, and applies the delays.

        Enough that no more than the target waits for each; and no fewer than it takes to run what is live, so that a
        replica is not removed only because its requests are past their prompts.
        """
        metrics = context.aggregated_metrics or {}
        queued = sum(metrics.get("queued_tokens", {}).values())
        completions = sum(metrics.get("completions", {}).values())
        return max(math.ceil(queued / self._target), math.ceil(completions / self._max_num_seqs), 1), {}


def autoscaling_options(engine: EngineConfig, server: ModelServerConfig) -> dict[str, Any]:
    """Deployment options: a fixed number of replicas, or autoscaling."""
    if server.max_replicas is None:
        return {"num_replicas": server.num_replicas}
    policy = AutoscalingPolicy(
        policy_function=QueuedTokensPolicy,
        policy_kwargs={"target_queued_tokens": server.target_queued_tokens, "max_num_seqs": engine.max_num_seqs},
    )
    config = AutoscalingConfig(
        min_replicas=server.num_replicas,
        max_replicas=server.max_replicas,
        metrics_interval_s=METRICS_INTERVAL_S,
        look_back_period_s=LOOK_BACK_S,
        upscale_delay_s=server.upscale_delay,
        downscale_delay_s=server.downscale_delay,
        policy=policy,
    )
    return {"autoscaling_config": config}
