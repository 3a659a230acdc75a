"""Everything that crosses a border between two parts, as named structs.

    GenerationRequest -> StepPlan -> StepResult -> TokenDelta -> RequestOutput

All are msgspec structs of plain values: cheap to make, to pickle for the control group and to pack for a socket.
A *row* is a sequence's place in the workers' persistent batch, 0 <= row < max_num_seqs; the driver assigns it.
"""

from __future__ import annotations

from array import array
from typing import Literal, get_args

import msgspec

from rayllm.api.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue, or to embed.

    request_id: unique among the live requests of an engine. priority: lower runs first (policy "priority").
    arrival_time: seconds on the front's clock, for metrics and for ordering within a priority.
    cache_salt: prefix-cache blocks are shared only between requests of the same salt.
    report_start: send a delta without tokens as soon as the request is first scheduled.
    pooling: make an embedding of the prompt instead of tokens: of the hidden states after the final norm the last
    token's ("last"), or the mean of all ("mean"). params have to be the defaults then.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""
    report_start: bool = False
    pooling: Pooling | None = None


class SequenceData(msgspec.Struct, frozen=True):
    """A sequence that takes a row of the persistent batch: all that a worker needs to compute it.

    token_ids: every token known so far, prompt first. num_prompt_tokens: how many are prompt.
    num_computed_tokens: how many already have their KV in the pool. block_table: block ids in order, from block
    first_block of the sequence on; no token still to be computed sees those before it.
    seed: counter-based noise is a function of (seed, position), so this fixes the sequence's randomness.
    pooling: what the step that computes the last of token_ids returns instead of a sampled token.
    """

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    params: SamplingParams
    seed: int
    pooling: Pooling | None = None
    first_block: int = 0


class StepPlan(msgspec.Struct, frozen=True):
    """What the workers do in one step, as a delta to their persistent batch. Applied in the order of the fields, but
    swaps come first.

    free_rows: rows whose sequences left the batch. new: sequences that enter it.
    block_updates: (row, first index, block ids): block_table[row][first : first + len(ids)] = ids.
    copies: (source block, destination block) in the device pool, before any write of this step.
    rows, num_tokens: the scheduled sequences and how many tokens each computes, ordered: decodes (one token,
    sampled), then prompts that end in this step (sampled), then partial chunks, and all chunks of pooled prompts (not
    sampled).
    num_decodes: leading entries that are decodes. num_sampled: leading entries that sample a token.
    masks: (index in rows, packed bits) of the sampling sequences that may not take every token: token i may come next
    if bit i % 8 of byte i // 8 is set. A mask has whole 32-bit words and covers the vocabulary.
    swap_outs: (device block, host block), each read before anything else of this step writes a block.
    tokens: (row, token id), each the newest token of a row, instead of the one that it sampled.
    swap_ins: (host block, device block), after the swap-outs; only rows of later plans read these blocks, so they may
    arrive while this step computes. await_swap_ins: rows of this one read them too.
    write_backs: (device block, host block), after the swap-ins; nothing is written to these device blocks before a plan
    whose await_write_backs is this step or a later one. await_write_backs: a step; its write-backs, and those of all
    steps before it, have to be done before this step writes a block. -1 for none.
    """

    step_id: int
    free_rows: list[int]
    new: list[SequenceData]
    block_updates: list[tuple[int, int, list[int]]]
    copies: list[tuple[int, int]]
    rows: list[int]
    num_tokens: list[int]
    num_decodes: int
    num_sampled: int
    masks: list[tuple[int, bytes]] = []
    swap_outs: list[tuple[int, int]] = []
    swap_ins: list[tuple[int, int]] = []
    await_swap_ins: bool = False
    write_backs: list[tuple[int, int]] = []
    await_write_backs: int = -1
    tokens: list[tuple[int, int]] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the raw logits) at one position.

    token_id, logprob, rank: the token chosen and its rank (1 is the most likely).
    top_ids, top_logprobs: the most likely tokens, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True):
    """What came out of one StepPlan, from TP rank 0.

    token_ids: [plan.num_sampled] sampled ids, in the plan's order. logprobs: same order, None where not asked
    for; the whole list is None if nobody asked. prompt_logprobs: (row, position of the first entry's token,
    entries) for the prompt tokens whose predecessors were computed in this step. embeddings: of the pooled prompts that
    end in this step, in the plan's order, each as in TokenDelta.
    """

    step_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    embeddings: list[bytes] = []


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's time up to its first token went, in seconds on the engine's clock.

    queued: from its arrival in the engine until it was first scheduled. prefill: from then to its first token.
    """

    queued: float
    prefill: float


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one completion of one request, or its embedding, on the way to its front.

    index: which of the completions. finish_reason: None while it runs, then "stop", "length" or "error".
    stop_reason: the stop id that ended it (None for end-of-sequence), or the error message.
    prompt_logprobs: only in the request's first delta; entry 0 is None (the first token has no predecessor).
    num_cached_tokens: prompt tokens found in the prefix cache. times: in the request's first delta with a token.
    bad_param: the engine refuses the whole request for this field (finish_reason is "error"); such deltas never come
    together with others. num_preemptions: how often sequences of the request were preempted so far; at least in first
    and last deltas. embedding: of a request with pooling, in its only delta without an error: [hidden_size] float32 of
    length 1 (L2), in the byte order of the machine.

    With beam search a delta without tokens says what first deltas do when the first choice is made. At the end each
    completion has one with all of its tokens and cumulative_logprob, the sum of their log-probabilities.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    times: RequestTimes | None = None
    bad_param: str | None = None
    num_preemptions: int = 0
    embedding: bytes | None = None
    cumulative_logprob: float | None = None


class Logprob(msgspec.Struct, frozen=True):
    """One token's log-probability as users see it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One completion. From `LLM.generate` it is whole; in a stream it holds what is new since the last output.

    cumulative_logprob: the sum of the tokens' log-probabilities, with logprobs, beam search and best_of. Where the
    best were chosen, they are in the order of cumulative_logprob / len(token_ids) ** length_penalty.
    logprobs: one dict a token, token id -> Logprob, the sampled token always in it.
    finish_reason: "stop", "length", "error"; None while it runs. stop_reason: stop string or id, if one ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct):
    """A request's completions, in order of index; in a stream only those with something new.

    times: of the engine, in the first output with a token. num_cached_tokens: prompt tokens found in the prefix cache.
    num_preemptions: how often its sequences were preempted so far. embedding: [hidden_size] float32 values, a vector
    of length 1 (L2), for a request with pooling; its only completion is empty. num_discarded_tokens: of samples that
    were made and not chosen, for best_of.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    num_preemptions: int = 0
    embedding: array[float] | None = None
    num_discarded_tokens: int = 0


STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of the engine for metrics and health. Counters only grow.

    num_preemptions: by recompute or swap; num_swap_preemptions: those by swap. prefix_cache_queries: tokens looked up
    in the prefix cache; prefix_cache_hits: those found, on either tier; cpu_prefix_cache_queries: those that the device
    had not, so that the CPU tier, if there is one, was asked; cpu_prefix_cache_hits: those that had to come from there.
    step_tokens: steps by the tokens they computed, in the buckets of STEP_TOKEN_BUCKETS and one
    beyond the last. computed_tokens: tokens of all steps. num_used_cpu_blocks: host blocks that swapped sequences hold.
    num_cached_cpu_blocks: host blocks findable by the prefix cache. swapped_out_blocks, swapped_in_blocks: blocks moved
    between the pools, for whatever reason. prefill_chunk_limit: prompt tokens that the last step with decodes and
    prompts had time for within target_itl_ms; 0 without a target, or before.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    step_tokens: list[int] = []
    computed_tokens: int = 0
    num_swap_preemptions: int = 0
    cpu_prefix_cache_hits: int = 0
    num_used_cpu_blocks: int = 0
    num_cached_cpu_blocks: int = 0
    num_total_cpu_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    cpu_prefix_cache_queries: int = 0
    prefill_chunk_limit: int = 0


class DeviceMemory(msgspec.Struct, frozen=True):
    """A rank's device memory once it is ready, in bytes. in_use and allowed (0: unlimited) are the whole device's."""

    weights: int = 0
    kv_cache: int = 0
    in_use: int = 0
    allowed: int = 0


class StepCost(msgspec.Struct, frozen=True):
    """Seconds that a captured step takes. padding: without attention. chunk: filled by the last tokens of a sequence of
    `context` tokens, or by all of them if it is shorter than the step."""

    padding: float
    chunk: float
    context: int


class RankReady(msgspec.Struct, frozen=True):
    """What a rank says once it is warm.

    step_costs: the sizes, in tokens and ascending, to which steps that are not all decodes are padded, because they
    are captured; larger ones are computed as they are. With each, what it takes. Empty unless target_itl_ms needs it.
    """

    memory: DeviceMemory = DeviceMemory()
    step_costs: dict[int, StepCost] = {}


class KVCosts(msgspec.Struct, frozen=True):
    """Seconds that a rank takes to compute and to move KV, as measured when it started.

    recompute_token: to compute a token of a long chunk. swap_out_block, swap_in_block: to move a block of the rank in a
    large transfer. transfer: what any transfer takes beside its blocks.
    """

    recompute_token: float
    swap_out_block: float
    swap_in_block: float
    transfer: float = 0.0

    def recompute(self, num_tokens: int) -> float:
        """Seconds to compute num_tokens tokens."""
        return self.recompute_token * num_tokens

    def swap_out(self, num_blocks: int) -> float:
        """Seconds to move num_blocks blocks to the host; none if there are none."""
        return self.transfer + self.swap_out_block * num_blocks if num_blocks else 0.0

    def swap_in(self, num_blocks: int) -> float:
        """Seconds to move num_blocks blocks to the device; none if there are none."""
        return self.transfer + self.swap_in_block * num_blocks if num_blocks else 0.0


def slowest(costs: list[KVCosts]) -> KVCosts | None:
    """What a step of all ranks together takes: the most that any of them does. None without any."""
    if not costs:
        return None
    return KVCosts(*(max(getattr(rank, name) for rank in costs) for name in KVCosts.__struct_fields__))


class StartReport(msgspec.Struct, frozen=True):
    """How an engine came up. phases: (name, seconds), in order. placement, ready: one entry a rank.

    kv_costs: one entry a rank, or none if the engine has no host pool, and so nothing to decide.
    """

    phases: list[tuple[str, float]] = []
    placement: list[str] = []
    ready: list[RankReady] = []
    kv_costs: list[KVCosts] = []


class EngineInfo(msgspec.Struct, frozen=True):
    """What fronts need to know of an engine before they send it anything.

    max_model_len: tokens of prompt and output together. num_kv_tokens: tokens the device pool holds; a sequence can
    have more only if a sliding window lets go of its beginning. eos_token_ids: ids that end a sequence unless
    ignore_eos. hidden_size: of the model, the number of an embedding's values. kv_cache_dtype: as in `EngineConfig`.
    max_num_seqs: sequences that run at once, and so beams of a request.
    """

    model: str
    max_model_len: int
    vocab_size: int
    num_kv_tokens: int
    eos_token_ids: list[int]
    start: StartReport = StartReport()
    hidden_size: int = 0
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 256
