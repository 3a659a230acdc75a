"""`ModelRunner`: executes plans on one rank: persistent batch, forward pass, sampling or pooling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import SequenceData, StepPlan, StepResult, TokenLogprobs
from rayllm.sampling.logprobs import gather, prompt_logprobs
from rayllm.sampling.sampler import SamplerOutput, logprob_entries, sample
from rayllm.sampling.sampling_batch import SamplingBatch
from rayllm.sampling.sampling_table import SamplingTable
from rayllm.sampling.token_mask import TokenMasks
from rayllm.sampling.transfer import to_device
from rayllm.worker.graphs import DecodeGraphs, RunContext, StepGraphs
from rayllm.worker.inputs import PersistentBatch, StepLayout, build, lay_out

# With these, sampling runs every kernel that it has: on logits as they are, and on changed ones.
ALL_WAYS = tuple(
    SamplingParams(temperature=0.5, top_k=2, top_p=0.5, min_p=0.1, logprobs=1, repetition_penalty=penalty)
    for penalty in (1.0, 2.0)
)
CHANGED_ROWS = 64  # whose changed logits are held at once, beside the raw ones of all rows
PromptEntries = list[tuple[int, int, list[TokenLogprobs]]]  # as `StepResult` has them
PROMPT_LOGITS_ROWS = 256  # positions whose logits are held at once for prompt logprobs


@dataclass(frozen=True, slots=True)
class PendingResult:
    """A step whose results are on their way to the host. `done`: recorded after the copies; None on the CPU.

    embeddings: [P, hidden_size] float32 of the P pooled prompts that end in the step; None for none.
    """

    step_id: int
    sampled: SamplerOutput | None
    sampling: SamplingBatch | None  # None if nobody asked for logprobs, or nothing was sampled
    prompt_logprobs: PromptEntries
    embeddings: torch.Tensor | None
    done: torch.cuda.Event | None

    def wait(self) -> StepResult:
        """Block until the step's results are on the host."""
        if self.done is not None:
            self.done.synchronize()
        embeddings = [] if self.embeddings is None else [row.tobytes() for row in self.embeddings.numpy()]
        if self.sampled is None:
            return StepResult(self.step_id, [], None, self.prompt_logprobs, embeddings)
        logprobs = None if self.sampling is None else logprob_entries(self.sampled, self.sampling)
        return StepResult(self.step_id, self.sampled.token_ids.tolist(), logprobs, self.prompt_logprobs, embeddings)


class ModelRunner:
    """Runs plans in order. Everything stays on the device between steps; only sampled ids and logprobs leave it."""

    def __init__(self, context: RunContext, table: SamplingTable, graphs: StepGraphs | None = None):
        self._context, self._table, self._graphs = context, table, graphs or StepGraphs()
        self._model, self._state, self._device = context.model, context.batch, context.device
        self._prompt_logprobs_of: dict[int, int] = {}  # row -> top tokens asked for at each prompt position
        self._pooler = Pooler(context.max_num_seqs, self._model.spec.hidden_size, self._device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingResult:
        """Start a plan whose block copies are done (in stream order). Waits for the device only for prompt logprobs."""
        self._apply(plan)
        sampled, sampling, embeddings = None, None, None
        prompt_entries: PromptEntries = []
        graphs = self._graphs
        if graphs.adapted is not None and self._state.has_adapters(np.array(plan.rows, np.int64)):
            graphs = graphs.adapted
        decode_graphs = graphs.decodes
        if decode_graphs is not None and plan.num_decodes == len(plan.rows):
            sampled, sampling = self._decode(decode_graphs, np.array(plan.rows, np.int64), plan)
        else:
            layout = lay_out(self._state, plan, self._context.split_decodes)
            if self._prompt_logprobs_of or self._pooler.wants(plan.rows):
                logits, prompt_entries, embeddings = self._forward_all(layout)
            else:
                logits = self._forward(layout, graphs)
            if plan.num_sampled:
                count = plan.num_sampled
                sampled, sampling = self._sample(logits, layout.rows[:count], layout.seq_lens[:count], plan)
            self._state.advance(layout.rows, layout.counts, plan.num_sampled)
        output = None if sampled is None else sampled.to_host()
        if embeddings is not None:
            embeddings = embeddings.to("cpu", non_blocking=True)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return PendingResult(plan.step_id, output, sampling, prompt_entries, embeddings, done)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.free_rows:
            self._table.clear(row)
            self._prompt_logprobs_of.pop(row, None)
            self._pooler.free(row)
        self._state.apply(plan)
        for data in plan.new:
            self._table.set(data)
            self._pooler.add(data)
            if data.params.prompt_logprobs is not None:
                self._prompt_logprobs_of[data.row] = data.params.prompt_logprobs

    def _forward(self, layout: StepLayout, graphs: StepGraphs) -> torch.Tensor:
        """Logits of the sampling sequences [num_sampled, vocab_size]."""
        for captured in graphs.chunks:
            if captured.fits(layout):
                return self._model.gather_logits(captured.run(layout))
        return self._model.compute_logits(self._model(build(self._state, layout), self._context.caches))

    def _forward_all(self, layout: StepLayout) -> tuple[torch.Tensor, PromptEntries, torch.Tensor | None]:
        """The same, without graphs, and what needs every token's hidden state: prompt logprobs, and embeddings."""
        batch = build(self._state, layout)
        hidden = self._model(replace(batch, logit_rows=None), self._context.caches)
        logits = self._model.compute_logits(hidden[batch.logit_rows])
        return logits, self._prompt_entries(layout, hidden), self._pooler.pool(layout, hidden, self._state)

    def _decode(
        self, graphs: DecodeGraphs, rows: np.ndarray, plan: StepPlan
    ) -> tuple[SamplerOutput, SamplingBatch | None]:
        """One token for each row, by a captured graph; drawn anew where more than a temperature is asked for."""
        positions = self._state.num_computed[rows]
        logits, token_ids = graphs.run(rows, positions, self._table.draw_columns(rows))
        self._state.advance(rows, 1, len(rows))
        if self._table.is_simple(rows) and not plan.masks:
            return SamplerOutput(token_ids, None), None
        return self._sample(self._model.gather_logits(logits), rows, positions + 1, plan)

    def _sample(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, plan: StepPlan
    ) -> tuple[SamplerOutput, SamplingBatch]:
        """Choose a token for each row [N], by all of its parameters, and write it into the token table."""
        sampling = self._table.batch(rows, positions, self._device)
        if plan.masks or (sampling.changes_logits and len(rows) > CHANGED_ROWS):
            output = self._sample_in_parts(logits, sampling, rows, positions, plan)
        else:
            output = sample(logits, sampling, self._state.token_table)
        where = to_device([rows, positions], self._device)
        self._state.token_table[where[0], where[1]] = output.token_ids.to(torch.int32)
        return output, sampling

    def _sample_in_parts(
        self, logits: torch.Tensor, sampling: SamplingBatch, rows: np.ndarray, positions: np.ndarray, plan: StepPlan
    ) -> SamplerOutput:
        """Sample where the plan's masks allow, so many rows at a time that the copies of logits which that takes stay
        small. Log-probabilities are still those of the raw logits.
        """
        parts = []
        for first in range(0, len(rows), CHANGED_ROWS):
            part = slice(first, first + CHANGED_ROWS)
            allowed = logits[part]
            masks = [(row - first, bits) for row, bits in plan.masks if part.start <= row < part.stop]
            if masks:
                allowed = TokenMasks.of(masks, self._device).apply(allowed)
            batch = replace(self._table.batch(rows[part], positions[part], self._device), logprobs=None)
            parts.append(sample(allowed, batch, self._state.token_table).token_ids)
        token_ids = torch.cat(parts)
        asked = sampling.logprobs
        if asked is None:
            return SamplerOutput(token_ids, None)
        return SamplerOutput(token_ids, gather(logits, asked.rows, token_ids[asked.rows], max(asked.num_top)))

    def _prompt_entries(self, layout: StepLayout, hidden: torch.Tensor) -> PromptEntries:
        """Logprobs of the prompt tokens that follow the computed ones. hidden: [T, hidden_size] of the whole step."""
        entries = []
        for row, start, count, first_token in layout.spans():
            num_top = self._prompt_logprobs_of.get(row)
            if num_top is None:
                continue
            stop = min(start + count, int(self._state.num_prompt[row]) - 1)  # the last one predicts no prompt token
            for begin in range(start, stop, PROMPT_LOGITS_ROWS):
                end = min(begin + PROMPT_LOGITS_ROWS, stop)
                offset = first_token + begin - start
                logits = self._model.compute_logits(hidden[offset : offset + end - begin])
                targets = self._state.token_table[row, begin + 1 : end + 1].to(torch.int64)
                entries.append((row, begin + 1, prompt_logprobs(logits, targets, num_top)))
        return entries


class Pooler:
    """Pools the rows that ask for it: their last hidden state, or the mean of all, as a vector of length 1 (L2).

    Sums are float64, so that a mean does not depend on the chunks in which its prompt was computed. They outlast steps,
    so they are not of the steps' memory.
    """

    def __init__(self, max_num_seqs: int, hidden_size: int, device: torch.device):
        self._kinds: dict[int, str] = {}  # row -> "last" or "mean"
        self._sums = torch.zeros(
            max_num_seqs, hidden_size, dtype=torch.float64, device=device
        )  # of each row's tokens so far

    def add(self, data: SequenceData) -> None:
        """Take note of a new row. Raises RuntimeError for a mean that would lack the first tokens."""
        if data.pooling is None:
            return
        if data.pooling == "mean" and data.num_computed_tokens:
            raise RuntimeError(f"a mean needs every token, and row {data.row} begins at {data.num_computed_tokens}")
        self._kinds[data.row] = data.pooling
        self._sums[data.row] = 0.0

    def free(self, row: int) -> None:
        """Forget a row, if it is known."""
        self._kinds.pop(row, None)

    def wants(self, rows: list[int]) -> bool:
        """Whether any of a step's rows is pooled."""
        return bool(self._kinds) and any(row in self._kinds for row in rows)

    def pool(self, layout: StepLayout, hidden: torch.Tensor, state: PersistentBatch) -> torch.Tensor | None:
        """Embeddings [P, hidden_size] float32 of the P pooled prompts that end in this step, in the step's order.

        hidden: [T, hidden_size] of all of the step's tokens. state: before it counts the step. None if P is 0.
        """
        done = []
        for row, start, count, first in layout.spans():
            kind = self._kinds.get(row)
            if kind == "mean":
                self._sums[row] += hidden[first : first + count].sum(0, dtype=torch.float64)
            if kind is not None and start + count == int(state.num_prompt[row]):
                done.append((self._sums[row] if kind == "mean" else hidden[first + count - 1]).float())
        # The mean's direction is the sum's.
        return torch.nn.functional.normalize(torch.stack(done), dim=1) if done else None


@torch.inference_mode()
def sample_all_ways(context: RunContext, table: SamplingTable) -> None:
    """Sample with all that requests may ask for, from rows that nobody has yet. Must run on all ranks together.

    On CUDA for its kernels alone, under `ops.compile_only`: a server would stop for seconds while they are compiled for
    the first request that needs them.
    """
    model, device = context.model, context.device
    for count in {1, min(3, context.max_num_seqs)}:
        rows, head = np.arange(count), model.lm_head
        logits = model.gather_logits(torch.zeros(count, head.num_tokens, dtype=head.weight.dtype, device=device))
        for params in ALL_WAYS:
            for row in range(count):
                table.set(SequenceData(row, [0], 1, 0, [[]], params, seed=0))
            sample(logits, table.batch(rows, rows, device), context.batch.token_table)
        for row in range(count):
            table.clear(row)
