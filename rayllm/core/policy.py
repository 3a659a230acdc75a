"""Scheduling policies: a request's sort key; lower runs first, and the highest is preempted first."""

from __future__ import annotations

from collections.abc import Callable

from rayllm.api.types import GenerationRequest

Policy = Callable[[GenerationRequest], tuple]


def fcfs(request: GenerationRequest) -> tuple:
    """First come, first served."""
    return (request.arrival_time,)


def by_priority(request: GenerationRequest) -> tuple:
    """Lower priority numbers first; first come, first served within one."""
    return (request.priority, request.arrival_time)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": by_priority}
