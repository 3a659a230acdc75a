"""`take_stats`: a scheduler's figures for metrics and health."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayllm.api.types import EngineStats

if TYPE_CHECKING:
    from rayllm.core.scheduler import Scheduler


def take_stats(scheduler: Scheduler) -> EngineStats:
    """A snapshot of queues, pools and counters."""
    memory, cpu = scheduler.memory, scheduler.memory.cpu
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.forks),
        num_swapped=len(scheduler.swapped),
        num_used_blocks=scheduler.blocks.num_blocks - scheduler.blocks.num_free,
        num_total_blocks=scheduler.blocks.num_blocks,
        num_preemptions=scheduler.preemption.num_preemptions,
        num_steps=scheduler.num_steps,
        prompt_tokens=scheduler.prompt_tokens,
        generation_tokens=scheduler.generation_tokens + scheduler.beams.num_tokens,
        prefix_cache_queries=scheduler.admission.num_queries,
        prefix_cache_hits=scheduler.admission.num_hits,
        step_tokens=scheduler.step_tokens.copy(),
        computed_tokens=scheduler.computed_tokens,
        num_swap_preemptions=scheduler.preemption.num_swaps,
        cpu_prefix_cache_hits=scheduler.admission.num_cpu_hits,
        num_used_cpu_blocks=cpu.num_blocks - cpu.num_free,
        num_cached_cpu_blocks=len(memory.cpu_cache),
        num_total_cpu_blocks=cpu.num_blocks,
        swapped_out_blocks=memory.num_swapped_out,
        swapped_in_blocks=memory.num_swapped_in,
        cpu_prefix_cache_queries=scheduler.admission.num_cpu_queries,
        prefill_chunk_limit=0 if scheduler.chunk_budget is None else scheduler.chunk_budget.limit,
    )
