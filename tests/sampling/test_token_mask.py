"""Token masks on the worker's side: bits to logits, and through both ways of decoding."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from rayllm import LLM, SamplingParams
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.sampling.sampling_table import DrawColumns
from rayllm.sampling.token_mask import TokenMasks
from rayllm.worker.cuda_graph import DecodeGraphs

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [1, 7, 32, 33, 100, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_to_logits(vocab_size, dtype):
    rng = random.Random(vocab_size)
    mask_bytes = (vocab_size + 31) // 32 * 4
    logits = torch.randn(5, vocab_size).to(dtype)
    raw = logits.clone()
    masks = [(row, rng.randbytes(mask_bytes)) for row in (4, 0, 3)]
    masked = TokenMasks.of(masks, CPU).apply(logits)
    expected = raw.clone()
    for row, bits in masks:
        for token in range(vocab_size):
            if not bits[token // 8] >> token % 8 & 1:
                expected[row, token] = float("-inf")
    assert torch.equal(masked, expected)
    assert torch.equal(logits, raw), "the raw logits stay, for log-probabilities"


class StepByStep(DecodeGraphs):
    """Runs each step instead of replaying it, which needs a GPU."""

    num_steps = 0

    def run(self, rows: np.ndarray, positions: np.ndarray, draw: DrawColumns) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_steps += 1
        logits, token_ids = self._step(self._load(rows, positions, draw), self._caches)
        return logits[: len(rows)], token_ids[: len(rows)]


def test_graph_decodes_and_eager_ones_take_the_same_tokens():
    regex = StructuredOutputs(regex="[a-z]{3,8}-[0-9]{2}")
    params = [
        SamplingParams(
            seed=i,
            max_tokens=20,
            temperature=0.0 if i == 2 else 1.0,
            structured_outputs=regex if i % 2 == 0 else None,
            logprobs=2 if i in (0, 3) else None,
        )
        for i in range(6)
    ]
    results = []
    for with_graphs in (False, True):
        with LLM(device="cpu", max_num_seqs=8) as llm:
            runner = llm._engine()._executor._worker._runner
            if with_graphs:
                runner._graphs = StepByStep(runner._model, runner._caches, runner._state, 8)
            outputs = llm.generate(["The answer is"] * 6, params, use_tqdm=False)
            results.append([output.outputs[0] for output in outputs])
            assert not with_graphs or runner._graphs.num_steps > 10
    for eager, graph in zip(*results, strict=True):
        assert eager.token_ids == graph.token_ids
        assert (eager.logprobs is None) == (graph.logprobs is None)
        for one, other in zip(eager.logprobs or [], graph.logprobs or [], strict=True):
            assert {i: p.logprob for i, p in one.items()} == pytest.approx(
                {i: p.logprob for i, p in other.items()}, abs=1e-3
            )
    assert all(re.fullmatch(regex.regex, completion.text) for completion in results[1][::2])
