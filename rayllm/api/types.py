"""Everything that crosses a border between two parts, as named structs.

    GenerationRequest -> StepPlan -> StepResult -> TokenDelta -> RequestOutput

All are msgspec structs of plain values: cheap to make, to pickle for the control group and to pack for a socket.
A *row* is a sequence's place in the workers' persistent batch, 0 <= row < max_num_seqs; the driver assigns it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import msgspec

from rayllm.api.sampling_params import MAX_SEED, SamplingParams, derive_seed

Pooling = Literal["last", "mean"]
POOLINGS: tuple[str, ...] = get_args(Pooling)

# ---------------------------------------------------------------------------------------------------- requests

# Deaths of workers or engines that computed a request, without a token in between: from when on it runs alone, and
# with which it ends, if it ran alone at the last.
ALONE_DEATHS = 2
FATAL_DEATHS = 3


KEY_HEADER = "Idempotency-Key"


class IdempotencyKey(msgspec.Struct, frozen=True):
    """By which a request that is sent again finds the first one, on whatever API server it arrives."""

    # Of the API key's name, the route, the model, the client's key and the prompt's number.
    id: str
    # Of the HTTP request's body: another body with the same id is an error.
    fingerprint: bytes
    # Unix time of the answer: that of the first one holds.
    created: int
    # All that came of it, if another engine had it before.
    deltas: list[TokenDelta] = []

    @property
    def seed(self) -> int:
        """Of the noise: should two engines begin with it, they make the same."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "little") & MAX_SEED


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue, or to embed."""

    # Unique among the live requests of an engine.
    request_id: str
    prompt_token_ids: list[int]
    # The defaults if the prompt is to be embedded.
    params: SamplingParams
    # The token sequences by which the words of params.bad_words may be written.
    bad_token_ids: list[list[int]] = []
    # Lower runs first, with the scheduling policy "priority".
    priority: int = 0
    # Seconds on the front's clock, for metrics and for the order within a priority.
    arrival_time: float = 0.0
    # Prefix-cache blocks are shared only between requests of the same salt.
    cache_salt: str = ""
    # Requests with the same key are likely to begin alike: a hint for choosing among replicas, without other effect.
    prompt_cache_key: str = ""
    # Who sends it: requests of one client share what is limited by client. None if there is nobody to share with.
    client: str | None = None
    # Send a delta without tokens as soon as the request is first scheduled.
    report_start: bool = False
    # Make an embedding instead of tokens: of the hidden states after the final norm the last token's ("last"), or the
    # mean of all ("mean").
    pooling: Pooling | None = None
    # Of its sampling noise where params have none. It is drawn where the request is made, so that the request can go on
    # elsewhere with the same noise.
    seed: int = msgspec.field(default_factory=lambda: secrets.randbelow(MAX_SEED + 1))
    # The tokens so far of each completion that has not ended, by its index, if another engine had the request before;
    # None to begin with it.
    emitted: dict[int, list[int]] | None = None
    # How often an engine died that had it, since its last token.
    num_deaths: int = 0
    # None: it ends with the connection over which it came. Otherwise the engine keeps it, and what comes of it.
    key: IdempotencyKey | None = None
    # The name of the adapter that the model is to have for it; empty for none.
    adapter: str = ""

    @property
    def live_indices(self) -> list[int]:
        """Of the completions that are to be made."""
        return list(range(self.params.num_completions)) if self.emitted is None else sorted(self.emitted)

    @property
    def noise_seed(self) -> int:
        """The seed of its first completion's noise; `derive_seed` makes those of the others."""
        return self.seed if self.params.seed is None else self.params.seed

    def numbered(self, number: int, engine_seed: int | None) -> GenerationRequest:
        """This as a front's request `number`, 1 and up, whose noise follows from it if the engine has a seed.

        With a key, noise follows from that alone.
        """
        if self.key is not None:
            return msgspec.structs.replace(self, seed=self.key.seed)
        if engine_seed is None:
            return self
        return msgspec.structs.replace(self, seed=derive_seed(engine_seed, number))


class Adapter(msgspec.Struct, frozen=True):
    """A low-rank adapter (LoRA) of an engine's model, as the engine has loaded it."""

    # Of the engine, and never used again: an adapter that is loaded once more under its name has another one.
    id: int
    name: str
    # Its folder, in PEFT's form.
    path: str
    # Of the folder's files, which all ranks must find alike.
    digest: str


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """What is to end before its time: one completion of a request, or all of it."""

    request_id: str
    # Of the completion; None for all. Beams end together, so one alone goes on.
    index: int | None = None


# ---------------------------------------------------------------------------------------------------- plans and results


class SequenceData(msgspec.Struct, frozen=True):
    """A sequence that takes a row of the persistent batch: all that a worker needs to compute it."""

    row: int
    # Every token known so far, prompt first.
    token_ids: list[int]
    # How many of them are prompt.
    num_prompt_tokens: int
    # How many of them already have their KV in the pool.
    num_computed_tokens: int
    # By group of layers, block ids in order, from block first_blocks[group] of the sequence on.
    block_tables: list[list[int]]
    params: SamplingParams
    # Counter-based noise is a function of (seed, position), so this fixes the sequence's randomness.
    seed: int
    # What the step that computes the last of token_ids returns instead of a sampled token.
    pooling: Pooling | None = None
    # By group: no token still to be computed sees the blocks before it.
    first_blocks: list[int] = msgspec.field(default_factory=lambda: [0])
    # Where its adapter's weights are on the device; -1 without one.
    adapter_slot: int = -1


class StepPlan(msgspec.Struct, frozen=True):
    """What the workers do in one step, as a delta to their persistent batch.

    A worker first waits as the await fields say, then moves blocks (swap-outs before swap-ins before write-backs), and
    applies the rest in the order of the fields.
    """

    step_id: int
    # Rows whose sequences left the batch.
    free_rows: list[int]
    # Sequences that enter it.
    new: list[SequenceData]
    # (row, first index, block ids by group): block_tables[group][row][first : first + len(ids[group])] = ids[group].
    block_updates: list[tuple[int, int, list[list[int]]]]
    # (source block, destination block) in the device pool, before any write of this step.
    copies: list[tuple[int, int]]
    # The scheduled sequences: decodes (one token, sampled), then prompts that end in this step (sampled), then partial
    # chunks and all chunks of pooled prompts (not sampled).
    rows: list[int]
    # How many tokens each of them computes.
    num_tokens: list[int]
    # Leading entries of rows that are decodes.
    num_decodes: int
    # Leading entries of rows that sample a token.
    num_sampled: int
    # (index in rows, packed bits) of the sampling sequences that may not take every token: token i may come next if
    # bit i % 8 of byte i // 8 is set. A mask has whole 32-bit words and covers the vocabulary.
    masks: list[tuple[int, bytes]] = []
    # (device block, host block), each read before anything else of this step writes a block.
    swap_outs: list[tuple[int, int]] = []
    # (host block, device block); only rows of later plans read these, so they may arrive while this step computes.
    swap_ins: list[tuple[int, int]] = []
    # Rows of this plan read the blocks of swap_ins too.
    await_swap_ins: bool = False
    # (device block, host block), copied beside the step. Nothing is written to these device blocks before a plan whose
    # await_write_backs is this step or a later one.
    write_backs: list[tuple[int, int]] = []
    # The write-backs of this step and of all before it have to be done before this plan writes a block.
    await_write_backs: int | None = None
    # (row, token id): the newest token of a row, instead of the one that it sampled.
    tokens: list[tuple[int, int]] = []
    # (slot, adapter id): adapters that go from the host into slots of the device before anything else is computed.
    adapters: list[tuple[int, int]] = []
    # Ids of adapters that workers are to forget on the host, before that; neither this plan nor a later one names them.
    dropped_adapters: list[int] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the raw logits) at one position."""

    # The token chosen.
    token_id: int
    logprob: float
    # Of the token chosen; 1 is the most likely.
    rank: int
    # The most likely tokens, best first; as many as were asked for.
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True):
    """What came out of one StepPlan, from TP rank 0."""

    step_id: int
    # [plan.num_sampled] sampled ids, in the plan's order.
    token_ids: list[int]
    # In the same order, None where not asked for; the whole list is None if nobody asked.
    logprobs: list[TokenLogprobs | None] | None = None
    # (row, position of the first entry's token, entries) for the prompt tokens whose predecessors were computed.
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    # Of the pooled prompts that end in this step, in the plan's order, each as in TokenDelta.
    embeddings: list[bytes] = []


# ---------------------------------------------------------------------------------------------------- outputs


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's time up to its first token went, in seconds on the engine's clock."""

    # From its arrival in the engine until it was first scheduled.
    queued: float
    # From then to its first token.
    prefill: float


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one completion of one request, or its embedding, on the way to its front.

    With beam search a delta without tokens says what first deltas do when the first choice is made. At the end each
    completion has one with all of its tokens and cumulative_logprob.
    """

    request_id: str
    # Which of the completions.
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    # None while it runs, then "stop", "length" or "error".
    finish_reason: str | None = None
    # The stop id that ended it (None for end-of-sequence), or the error message.
    stop_reason: int | str | None = None
    # Prompt tokens found in the prefix cache.
    num_cached_tokens: int = 0
    # Only in the request's first delta; entry 0 is None, as the first token has no predecessor.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # In the request's first delta with a token.
    times: RequestTimes | None = None
    # The engine refuses the whole request for this field, or ends all of it; finish_reason is "error".
    bad_param: str | None = None
    # How often sequences of the request were preempted so far; at least in first and last deltas.
    num_preemptions: int = 0
    # Of a request with pooling, in its only delta: [hidden_size] float32 of length 1 (L2), as bytes of this machine.
    embedding: bytes | None = None
    # The sum of the log-probabilities of a beam's tokens.
    cumulative_logprob: float | None = None
    # With bad_param: it is refused only because too much waits.
    try_again: bool = False
    # How often the request began anew because workers were lost; at least in first and last deltas.
    num_recoveries: int = 0
    # The request runs alone from now on until it has a token; nothing else is new.
    alone: bool = False
    # `IdempotencyKey.created` of the first request with this key. All that came of it follows, from its beginning;
    # nothing else is new. 0 in all other deltas.
    created: int = 0


class Logprob(msgspec.Struct, frozen=True):
    """One token's log-probability as users see it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One completion. From `LLM.generate` it is whole; in a stream it holds what is new since the last output."""

    # Where the best of several were chosen, they are in the order of cumulative_logprob / tokens ** length_penalty.
    index: int
    text: str
    token_ids: list[int]
    # The sum of the tokens' log-probabilities, with logprobs, beam search and best_of.
    cumulative_logprob: float | None = None
    # One dict a token, token id -> Logprob, the sampled token always in it.
    logprobs: list[dict[int, Logprob]] | None = None
    # "stop", "length", "error"; None while it runs.
    finish_reason: str | None = None
    # The stop string or id that ended it, if one did.
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct):
    """A request's completions, in order of index; in a stream only those with something new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    # Prompt tokens found in the prefix cache.
    num_cached_tokens: int = 0
    # Of the engine, in the first output with a token.
    times: RequestTimes | None = None
    # How often its sequences were preempted so far.
    num_preemptions: int = 0
    # [hidden_size] float32 values, a vector of length 1 (L2), for a request with pooling; its completion is empty.
    embedding: array[float] | None = None
    # Tokens of samples that were made and not chosen, for best_of.
    num_discarded_tokens: int = 0
    # How often it went on with new workers after the loss of the old ones.
    num_recoveries: int = 0
    # As in `TokenDelta`.
    created: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether this says that the prompt is done, with a first token or, if the best are still to be found, not."""
        return self.times is not None or any(each.token_ids or each.finish_reason for each in self.outputs)


# ---------------------------------------------------------------------------------------------------- figures

# Upper bounds of EngineStats.step_tokens.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Counters(msgspec.Struct):
    """What an engine has done so far; the figures only grow."""

    num_steps: int = 0
    # Tokens of prompts that came, and tokens generated.
    prompt_tokens: int = 0
    generation_tokens: int = 0
    # Tokens of all steps.
    computed_tokens: int = 0
    # Preemptions by recompute or swap, and those by swap.
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    # Losses of workers after which new ones took over, and the time that there were none.
    num_recoveries: int = 0
    recovery_seconds: float = 0.0
    # Tokens looked up in the prefix cache, and those found, on either tier.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    # Tokens that the device had not, so that the CPU tier, if there is one, was asked, and those found there.
    cpu_prefix_cache_queries: int = 0
    cpu_prefix_cache_hits: int = 0
    # Steps by the tokens they computed, in the buckets of STEP_TOKEN_BUCKETS and one beyond the last.
    step_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BUCKETS) + 1))


class EngineStats(Counters, frozen=True):  # type: ignore[misc]  # msgspec can freeze what others may change
    """A snapshot of the engine for metrics and health: its counters, and how it is just now."""

    # Sequences that run, wait for a place, and wait with their KV in host memory.
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    # Blocks of the device pool that are held, and all.
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    # Host blocks that swapped sequences hold, that the prefix cache finds, and all.
    num_used_cpu_blocks: int = 0
    num_cached_cpu_blocks: int = 0
    num_total_cpu_blocks: int = 0
    # Blocks moved between the pools so far, for whatever reason.
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    # Prompt tokens that the last step with decodes and prompts had time for within target_itl_ms; 0 without a target.
    prefill_chunk_limit: int = 0


class KVBlocks(msgspec.Struct, frozen=True):
    """KV blocks of a rank and the sequences that share them, or of all ranks together the fewest of any of them."""

    # Of the device pool.
    gpu: int
    # Of the host pool.
    cpu: int
    # That run at once.
    max_num_seqs: int = 256


class DeviceMemory(msgspec.Struct, frozen=True):
    """A rank's device memory once it is ready, in bytes."""

    weights: int = 0
    kv_cache: int = 0
    # Of the whole device, others' use included.
    in_use: int = 0
    # Of the whole device; 0 for no limit.
    allowed: int = 0


class StepCost(msgspec.Struct, frozen=True):
    """Seconds that a captured step takes."""

    # Without attention.
    padding: float
    # Filled by the last tokens of a sequence of `context` tokens, or by all of them if it is shorter than the step.
    chunk: float
    context: int


class KVCosts(msgspec.Struct, frozen=True):
    """Seconds that a rank takes to compute and to move KV, as measured when it started."""

    # To compute a token of a long chunk.
    recompute_token: float
    # To move a block of the rank in a large transfer.
    swap_out_block: float
    swap_in_block: float
    # What any transfer takes beside its blocks.
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


Phases = list[tuple[str, float]]  # (name, seconds) of the phases of a start, in order


@contextmanager
def timed(phases: Phases, name: str) -> Iterator[None]:
    """Record how long the body took; a body that raises is not recorded."""
    started = time.monotonic()
    yield
    phases.append((name, time.monotonic() - started))


class RankReady(msgspec.Struct, frozen=True):
    """What a rank says once it can serve."""

    memory: DeviceMemory = DeviceMemory()
    # By size in tokens, ascending: the sizes to which steps that are not all decodes are padded because they are
    # captured, and what they take. Larger steps are computed as they are. Empty unless target_itl_ms needs it.
    step_costs: dict[int, StepCost] = {}
    # None without a host pool.
    kv_costs: KVCosts | None = None
    phases: Phases = []


class StartReport(msgspec.Struct, frozen=True):
    """How an engine came up."""

    phases: Phases = []
    # Where each rank is.
    placement: list[str] = []
    ready: list[RankReady] = []
    # Bytes that each rank's standby takes: of its GPU, or of the host's memory. Empty without standbys.
    standbys: list[int] = []

    def kv_costs(self) -> KVCosts | None:
        """What a step of all ranks together takes: the most that any of them does. None without a host pool."""
        costs = [rank.kv_costs for rank in self.ready if rank.kv_costs is not None]
        if not costs:
            return None
        return KVCosts(*(max(getattr(rank, name) for rank in costs) for name in KVCosts.__struct_fields__))


class EngineInfo(msgspec.Struct, frozen=True):
    """What fronts need to know of an engine before they send it anything."""

    model: str
    # Tokens of prompt and output together.
    max_model_len: int
    vocab_size: int
    # Tokens that the device pool holds; a sequence has more only if a sliding window lets go of its beginning. Where
    # only some layers have windows, tokens of sequences of max_model_len.
    num_kv_tokens: int
    # Ids that end a sequence unless ignore_eos.
    eos_token_ids: list[int]
    start: StartReport = StartReport()
    # Values of an embedding.
    hidden_size: int = 0
    # As in `EngineConfig`.
    kv_cache_dtype: str = "auto"
    # Sequences that run at once, and so beams of a request.
    max_num_seqs: int = 256
    # As in `EngineConfig`.
    seed: int | None = None
    # As in `ResolvedConfig`.
    sampling_defaults: dict[str, Any] = {}


class Load(msgspec.Struct, frozen=True):
    """Work of one front, or of several."""

    # Completions that live: queued or running.
    completions: int = 0
    # Prompt tokens of requests without a first token.
    queued_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.completions + other.completions, self.queued_tokens + other.queued_tokens)
