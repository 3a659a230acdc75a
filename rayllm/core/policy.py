"""Scheduling policies: a request's sort key; lower runs first, and the highest is preempted first."""

from __future__ import annotations

from collections.abc import Callable

from rayllm.api.types import GenerationRequest

Policy = Callable[[GenerationRequest], tuple]

POLICIES: dict[str, Policy] = {
    # First come, first served.
    "fcfs": lambda request: (request.arrival_time,),
    # Lower priority numbers first; first come, first served within one.
    "priority": lambda request: (request.priority, request.arrival_time),
}
