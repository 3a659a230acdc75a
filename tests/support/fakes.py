"""A worker without a model, whose KV pool checks every read, and a naive oracle of what it must generate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import SequenceData, StepPlan, StepResult, TokenLogprobs
from rayllm.errors import InvalidRequestError

VOCAB = 50
EOS = 7
UNCHOSEN = -1  # what a fake worker puts where a beam's next token will be


def fingerprint(token_ids: list[int], group: int = 0) -> bytes:
    """What the fake KV of a sequence's last token holds in a group of layers: a hash of everything it depends on."""
    return hashlib.md5(repr((token_ids, group) if group else token_ids).encode()).digest()


def next_token(token_ids: list[int], seed: int, allowed: list[int] | None = None) -> int:
    """The fake model: a token that depends on the whole sequence and on the seed, one of the allowed ones if given."""
    drawn = int.from_bytes(hashlib.md5(repr((token_ids, seed)).encode()).digest()[:4], "little")
    return drawn % VOCAB if allowed is None else allowed[drawn % len(allowed)]


def allowed_after(generated: list[int]) -> list[int]:
    """The fake grammar: one to four tokens, by what was generated so far."""
    digest = hashlib.md5(repr(generated).encode()).digest()
    return sorted({byte % VOCAB for byte in digest[: 1 + digest[15] % 4]})


def fake_logprobs(token_ids: list[int]) -> list[float]:
    """The fake model for beam search: a number for each token, by the whole sequence; ties are possible."""
    digest = hashlib.shake_128(repr(token_ids).encode()).digest(2 * VOCAB)
    return [-int.from_bytes(digest[2 * i : 2 * i + 2], "little") / 8192 for i in range(VOCAB)]


def expected_beams(
    prompt: list[int], params: SamplingParams, max_len: int, stop_ids: frozenset[int]
) -> list[tuple[list[int], float]]:
    """What beam search must find: (generated tokens, cumulative log-probability), best first.

    As transformers writes it down: over the whole vocabulary, with candidates to spare for tokens that end a sequence.
    """
    width, power = params.width, params.length_penalty
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int], float]] = []
    while True:
        candidates = []
        for rank, (total, tokens) in enumerate(beams):
            for token, logprob in enumerate(fake_logprobs(prompt + tokens)):
                if len(tokens) >= params.min_tokens or token not in stop_ids:
                    candidates.append((-total - logprob, rank, -logprob, token, [*tokens, token]))
        top = sorted(candidates)[: max(2, 1 + len(stop_ids)) * width]
        length = len(beams[0][1]) + 1
        full = len(prompt) + length >= max_len
        ended = [full or token in stop_ids for _, _, _, token, _ in top]
        for (worth, _, _, _, tokens), ends in list(zip(top, ended, strict=True))[:width]:
            if ends:
                finished.append((-worth / length**power, tokens, -worth))
        finished = sorted(finished, key=lambda each: -each[0])[:width]
        beams = [(-worth, tokens) for (worth, _, _, _, tokens), ends in zip(top, ended, strict=True) if not ends][
            :width
        ]
        if len(finished) == width and beams:
            longest = params.early_stopping == "never" and power > 0
            hoped = beams[0][0] / (max_len - len(prompt) if longest else length) ** power
            if params.early_stopping is True or hoped <= finished[-1][0]:
                beams = []
        if not beams:
            return [(tokens, total) for _score, tokens, total in finished[: params.n]]


@dataclass
class FakeConstraint:
    """Follows the fake grammar. Each mask is there only when the scheduler has asked `lag` times for it.

    fail_after: tokens after which there is no further mask.
    """

    lag: int = 0
    fail_after: int | None = None
    generated: list[int] = field(default_factory=list)
    due: int = 0

    def mask(self) -> bytes | None:
        if self.due or self.error_now:
            return None
        return sum(1 << token for token in allowed_after(self.generated)).to_bytes(8, "little")

    def accept(self, *tokens: int) -> None:
        for token in tokens:
            assert token in allowed_after(self.generated), "a token that its mask forbids"
            self.generated.append(token)
        self.due = self.lag

    @property
    def error_now(self) -> bool:
        return not self.due and self.fail_after is not None and len(self.generated) >= self.fail_after

    def error(self) -> InvalidRequestError | None:
        """Called once in a schedule."""
        self.due = max(0, self.due - 1)
        return InvalidRequestError("the grammar gave up", "structured_outputs") if self.error_now else None


def expected_output(
    prompt: list[int], seed: int, max_len: int, stop_ids: frozenset[int], constraint: FakeConstraint | None = None
) -> list[int]:
    """What any schedule must generate for a prompt."""
    tokens = list(prompt)
    while len(tokens) < max_len:
        if constraint is not None and len(tokens) - len(prompt) == constraint.fail_after:
            break
        tokens.append(next_token(tokens, seed, constraint and allowed_after(tokens[len(prompt) :])))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeRow:
    """A row of the persistent batch as a worker knows it."""

    data: SequenceData
    tokens: list[int]
    tables: list[list[int]]  # by group of layers
    computed: int
    summed: list[int] = field(default_factory=list)


def embedding(token_ids: list[int], kind: str | None) -> bytes:
    """What the fake model makes of a pooled prompt: for a mean of what every token depends on, else of the last."""
    parts = range(len(token_ids)) if kind == "mean" else [len(token_ids) - 1]
    return b"".join(fingerprint(token_ids[: p + 1]) for p in parts)


@dataclass
class FakeWorker:
    """Executes plans against a pool that holds, per slot, the fingerprint of the prefix it was computed from.

    Every read of a cached position is checked, so a block that is shared, freed, copied or overwritten wrongly is found
    at the step that reads it. Blocks that are swapped in hold nothing until the next step begins, unless the plan waits
    for them; those that are written back must not change until a plan waits for that.

    windows: by group of layers, a token reads so many positions, its own included; None for all.
    states: so many of the last groups hold a recurrent state in each block, in its first slot: of the last token in the
    block that is computed. A step reads that of the token before its first, as it was before the step.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    num_cpu_blocks: int = 0
    windows: tuple[int | None, ...] = (None,)
    states: int = 0
    host: dict[int, dict[int, bytes]] = field(default_factory=dict)
    arriving: list[tuple[int, dict[int, bytes]]] = field(default_factory=list)
    leaving: list[tuple[int, int, dict[int, bytes]]] = field(default_factory=list)  # step, block, its content
    num_written_back: int = 0
    pool: dict[tuple[int, int], bytes] = field(default_factory=dict)
    rows: dict[int, FakeRow] = field(default_factory=dict)
    num_tokens_computed: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan; AssertionError if it reads anything but what the sequence itself would have written."""
        self._swap(plan)
        for row in plan.free_rows:
            del self.rows[row]
        for data in plan.new:
            assert data.row not in self.rows and 0 <= data.row < self.max_num_seqs, f"row {data.row} is taken"
            parts = zip(data.first_blocks, data.block_tables, strict=True)
            tables = [[-1] * first + table for first, table in parts]
            assert len(tables) == len(self.windows)
            self.rows[data.row] = FakeRow(data, list(data.token_ids), tables, data.num_computed_tokens)
        for row, first, ids in plan.block_updates:
            for table, part in zip(self.rows[row].tables, ids, strict=True):
                assert first <= len(table)
                table[first : first + len(part)] = part
        for row, token in plan.tokens:
            self.rows[row].tokens[-1] = token
        self._copy(plan.copies)
        assert len(set(plan.rows)) == len(plan.rows) == len(plan.num_tokens), "a row is scheduled twice"
        assert all(n == 1 for n in plan.num_tokens[: plan.num_decodes])
        # In every layer the whole batch writes its KV before any sequence attends, so a sequence may share blocks
        # that another one computes in the same step.
        for row in plan.rows:
            self._read_states(self.rows[row])
        written: list[int] = []
        for row, count in zip(plan.rows, plan.num_tokens, strict=True):
            self._write(self.rows[row], count)
            written += self._write_states(self.rows[row], count)
        assert len(set(written)) == len(written), "two sequences write a state in one block"
        masks = dict(plan.masks)
        assert all(index < plan.num_sampled for index in masks), "a mask for a sequence that does not sample"
        tokens, logprobs, prompt_logprobs, embeddings = [], [], [], []
        for i, (row, count) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            state = self.rows[row]
            wants = state.data.params.prompt_logprobs is not None
            if wants:
                prompt_logprobs += self._prompt_logprobs(state, count)
            self._read(state)
            state.summed += range(state.computed, state.computed + count)
            state.computed += count
            ends, kind = state.computed == len(state.tokens), state.data.pooling
            assert (ends and kind is None) == (i < plan.num_sampled), "sampling flag is wrong"
            if ends and kind is not None:
                parts = state.summed if kind == "mean" else state.summed[-1:]
                embeddings.append(b"".join(fingerprint(state.tokens[: p + 1]) for p in parts))
            if i < plan.num_sampled and state.data.params.use_beam_search:
                tokens.append(UNCHOSEN)
                logprobs.append(self._best_tokens(state))
                state.tokens.append(UNCHOSEN)
            elif i < plan.num_sampled:
                bits = int.from_bytes(masks[i], "little") if i in masks else None
                allowed = None if bits is None else [token for token in range(VOCAB) if bits >> token & 1]
                token = next_token(state.tokens, state.data.seed, allowed)
                state.tokens.append(token)
                tokens.append(token)
                wanted = state.data.params.logprobs is not None
                logprobs.append(TokenLogprobs(token, -1.0, 1, [], []) if wanted else None)
        some = logprobs if any(entry is not None for entry in logprobs) else None
        return StepResult(plan.step_id, tokens, some, prompt_logprobs, embeddings)

    def _best_tokens(self, state: FakeRow) -> TokenLogprobs:
        """As many as a beam search needs and no more."""
        params, found = state.data.params, fake_logprobs(state.tokens)
        count = params.width + len(set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS}))
        best = sorted(range(VOCAB), key=lambda token: (-found[token], token))[:count]
        return TokenLogprobs(UNCHOSEN, 0.0, 1, best, [found[token] for token in best])

    def _swap(self, plan: StepPlan) -> None:
        """Swap-outs, then swap-ins, whose blocks are worth nothing until they have arrived."""
        self._arrive()
        self._leave(plan.await_write_backs)
        host_blocks = [host for _block, host in plan.swap_outs]
        blocks = [block for _host, block in plan.swap_ins]
        assert len(set(host_blocks)) == len(host_blocks), "two swap-outs into one block"
        assert len(set(blocks)) == len(blocks), "two swap-ins into one block"
        assert all(0 <= host < self.num_cpu_blocks for host in host_blocks)
        for block, host in plan.swap_outs:
            self.host[host] = self._content(block)
        for host, block in plan.swap_ins:
            self.arriving.append((block, self.host[host]))
            self._fill(block, {})
        if plan.await_swap_ins:
            self._arrive()
        moved = {block for block, _host in plan.swap_outs} | set(blocks)
        others = {host for host, _block in plan.swap_ins} | set(host_blocks)
        for block, host in plan.write_backs:
            assert block not in moved and host not in others, "moved twice in a plan"
            others.add(host)
            self.host[host] = self._content(block)
            self.leaving.append((plan.step_id, block, self.host[host]))
        self.num_written_back += len(plan.write_backs)

    def _leave(self, step_id: int | None) -> None:
        """Nothing has changed what was being written back; what earlier steps wrote back is done now."""
        for _step, block, content in self.leaving:
            assert self._content(block) == content, f"block {block} was written before it was copied"
        self.leaving = [entry for entry in self.leaving if step_id is None or entry[0] > step_id]

    def _arrive(self) -> None:
        for block, content in self.arriving:
            assert not self._content(block), f"block {block} was written while it was on its way"
            self._fill(block, content)
        self.arriving = []

    def _content(self, block: int) -> dict[int, bytes]:
        slots = ((offset, self.pool.get((block, offset))) for offset in range(self.block_size))
        return {offset: held for offset, held in slots if held is not None}

    def _fill(self, block: int, content: dict[int, bytes]) -> None:
        for offset in range(self.block_size):
            self.pool.pop((block, offset), None)
        self.pool.update({(block, offset): held for offset, held in content.items()})

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        sources = {source for source, _ in copies}
        destinations = [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        assert not sources & set(destinations), "a copy's source is another's destination"
        for source, destination in copies:
            for offset in range(self.block_size):
                self.pool.pop((destination, offset), None)
                if (source, offset) in self.pool:
                    self.pool[destination, offset] = self.pool[source, offset]

    def _write(self, state: FakeRow, count: int) -> None:
        assert count >= 1 and state.computed + count <= len(state.tokens), "computes tokens that do not exist"
        for position in range(state.computed, state.computed + count):
            for group in range(len(self.windows) - self.states):
                self.pool[self._slot(state, group, position)] = fingerprint(state.tokens[: position + 1], group)
        self.num_tokens_computed += count

    def _write_states(self, state: FakeRow, count: int) -> list[int]:
        """The blocks that get a state."""
        written, end = [], state.computed + count
        for group in range(len(self.windows) - self.states, len(self.windows)):
            for index in range(state.computed // self.block_size, (end - 1) // self.block_size + 1):
                last = min(end, (index + 1) * self.block_size)
                block, _offset = self._slot(state, group, last - 1)
                self.pool[block, 0] = fingerprint(state.tokens[:last], group)
                written.append(block)
        return written

    def _read_states(self, state: FakeRow) -> None:
        for group in range(len(self.windows) - self.states, len(self.windows)):
            if state.computed:
                block, _offset = self._slot(state, group, state.computed - 1)
                expected = fingerprint(state.tokens[: state.computed], group)
                assert self.pool.get((block, 0)) == expected, f"wrong state after {state.computed} tokens: {state}"

    def _read(self, state: FakeRow) -> None:
        for group, window in enumerate(self.windows[: len(self.windows) - self.states]):
            first = 0 if window is None else max(0, state.computed - window + 1)
            for position in range(first, state.computed):
                held = self.pool.get(self._slot(state, group, position))
                assert held == fingerprint(state.tokens[: position + 1], group), f"wrong KV at {position}: {state}"

    def _slot(self, state: FakeRow, group: int, position: int) -> tuple[int, int]:
        block = state.tables[group][position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block, position % self.block_size

    def _prompt_logprobs(self, state: FakeRow, count: int) -> list[tuple[int, int, list[TokenLogprobs]]]:
        first = state.computed + 1
        last = min(state.computed + count + 1, state.data.num_prompt_tokens)
        entries = [TokenLogprobs(state.tokens[p], -float(p), 1, [], []) for p in range(first, last)]
        return [(state.data.row, first, entries)] if entries else []
