"""`ModelRunner`: executes plans on one rank: persistent batch, forward pass, sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayllm.layers.attention import KVCache
from rayllm.models.base import CausalLM
from rayllm.sample.logprobs import prompt_logprobs
from rayllm.sample.sampler import SamplerOutput, logprob_entries, sample
from rayllm.sample.sampling_batch import SamplingBatch
from rayllm.sample.sampling_table import SamplingTable
from rayllm.types import StepPlan, StepResult, TokenLogprobs
from rayllm.worker.cuda_graph import DecodeGraphs
from rayllm.worker.input_batch import PersistentBatch, StepInputs, build, to_device

PROMPT_LOGITS_ROWS = 256  # positions whose logits are held at once for prompt logprobs


@dataclass(frozen=True, slots=True)
class PendingResult:
    """A step whose results are on their way to the host. `done`: recorded after the copies; None on the CPU."""

    step_id: int
    sampled: SamplerOutput | None
    sampling: SamplingBatch | None
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]]
    done: torch.cuda.Event | None

    def wait(self) -> StepResult:
        """Block until the step's results are on the host."""
        if self.done is not None:
            self.done.synchronize()
        if self.sampled is None or self.sampling is None:
            return StepResult(self.step_id, [], None, self.prompt_logprobs)
        logprobs = logprob_entries(self.sampled, self.sampling)
        return StepResult(self.step_id, self.sampled.token_ids.tolist(), logprobs, self.prompt_logprobs)


class ModelRunner:
    """Runs plans in order. Everything stays on the device between steps; only sampled ids and logprobs leave it."""

    def __init__(
        self, model: CausalLM, caches: list[KVCache], state: PersistentBatch, table: SamplingTable, device: torch.device
    ):
        self._model, self._caches = model, caches
        self._state, self._table, self._device = state, table, device
        self._graphs: DecodeGraphs | None = None
        self._prompt_logprobs_of: dict[int, int] = {}  # row -> top tokens asked for at each prompt position

    def capture_graphs(self, max_num_seqs: int) -> None:
        """Capture CUDA graphs for decode-only plans."""
        self._graphs = DecodeGraphs(self._model, self._caches, self._state, max_num_seqs)
        with torch.inference_mode():
            self._graphs.capture()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingResult:
        """Start a plan whose block copies are done (in stream order). Waits for the device only for prompt logprobs."""
        self._apply(plan)
        inputs = build(self._state, plan, self._device)
        logits, prompt_entries = self._forward(inputs)
        sampled, sampling = None, None
        if plan.num_sampled:
            rows, positions = inputs.sampled_rows, inputs.sampled_positions
            sampling = self._table.batch(rows, positions, self._device)
            output = sample(logits, sampling, self._state.token_table)
            where = to_device([rows, positions], np.int64, self._device)
            self._state.token_table[where[0], where[1]] = output.token_ids.to(torch.int32)
            sampled = output.to_host()
        self._state.advance(inputs)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return PendingResult(plan.step_id, sampled, sampling, prompt_entries, done)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.free_rows:
            self._table.clear(row)
            self._prompt_logprobs_of.pop(row, None)
        self._state.apply(plan)
        for data in plan.new:
            self._table.set(data)
            if data.params.prompt_logprobs is not None:
                self._prompt_logprobs_of[data.row] = data.params.prompt_logprobs

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, list[tuple[int, int, list[TokenLogprobs]]]]:
        """Logits of the sampling sequences [num_sampled, vocab_size], and prompt logprobs where asked for."""
        batch = inputs.batch
        if self._graphs is not None and batch.num_decodes == len(inputs.rows):
            return self._graphs.run(inputs), []
        hidden = self._model(batch, self._caches)
        entries = self._prompt_entries(inputs, hidden) if self._prompt_logprobs_of else []
        return self._model.compute_logits(hidden[batch.logit_rows]), entries

    def _prompt_entries(self, inputs: StepInputs, hidden: torch.Tensor) -> list[tuple[int, int, list[TokenLogprobs]]]:
        """Logprobs of the prompt tokens that follow the computed ones. hidden: [T, hidden_size] of the whole step."""
        entries = []
        first_token = 0
        for row, count, start in zip(inputs.rows.tolist(), inputs.counts.tolist(), inputs.starts.tolist(), strict=True):
            num_top = self._prompt_logprobs_of.get(row)
            stop = min(
                start + count, int(self._state.num_prompt[row]) - 1
            )  # the last prompt token predicts no prompt token
            if num_top is not None:
                for begin in range(start, stop, PROMPT_LOGITS_ROWS):
                    end = min(begin + PROMPT_LOGITS_ROWS, stop)
                    offset = first_token + begin - start
                    logits = self._model.compute_logits(hidden[offset : offset + end - begin])
                    targets = self._state.token_table[row, begin + 1 : end + 1].to(torch.int64)
                    entries.append((row, begin + 1, prompt_logprobs(logits, targets, num_top)))
            first_token += count
        return entries
