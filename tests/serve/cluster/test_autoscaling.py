"""How many replicas the queue asks for."""

from __future__ import annotations

from types import SimpleNamespace

from rayllm.config.options import EngineConfig, ServerConfig
from rayllm.serve.cluster.autoscaling import QueuedTokensPolicy, autoscaling_options


def policy(**metrics):
    context = SimpleNamespace(aggregated_metrics=metrics)
    return QueuedTokensPolicy(target_queued_tokens=100, max_num_seqs=8)(context)


def test_the_policy_wants_replicas_for_what_waits_and_for_what_runs():
    assert policy() == (1, {})
    assert policy(queued_tokens={"a": 100.0, "b": 0.0}, completions={"a": 3.0, "b": 1.0})[0] == 1
    assert policy(queued_tokens={"a": 101.0, "b": 0.0})[0] == 2
    assert policy(queued_tokens={"a": 100.0, "b": 450.0})[0] == 6
    assert policy(queued_tokens={"a": 0.0}, completions={"a": 9.0, "b": 8.0})[0] == 3


def test_autoscaling_is_what_max_replicas_asks_for():
    engine = EngineConfig(max_num_seqs=8)
    assert autoscaling_options(engine, ServerConfig(num_replicas=3)) == {"num_replicas": 3}
    server = ServerConfig(num_replicas=2, max_replicas=5, target_queued_tokens=70, upscale_delay=1, downscale_delay=9)
    config = autoscaling_options(engine, server)["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (1, 9)
    assert config.policy.policy_kwargs == {"target_queued_tokens": 70, "max_num_seqs": 8}
    assert config.policy.get_policy() is QueuedTokensPolicy
