"""Token masks on the worker's side: bits to logits, and through both ways of decoding."""

from __future__ import annotations

import random
import re
import time
from collections import deque

import pytest
import torch
from support.model_factory import run_context

from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.api.types import GenerationRequest, KVBlocks, RankReady
from rayllm.config.options import BUNDLED_MODEL, EngineConfig
from rayllm.config.resolved import resolve
from rayllm.engine.build import start_resolved_engine
from rayllm.executor.local import LocalExecutor
from rayllm.sampling.sampling_table import SamplingTable
from rayllm.sampling.token_mask import TokenMasks
from rayllm.text.tokenizer import load_tokenizer
from rayllm.worker.graphs import DecodeGraphs, StepGraphs
from rayllm.worker.runner import ModelRunner
from rayllm.worker.worker import RankModel

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


class GraphRank:
    """A rank, before and after its cache is sized, whose decode steps are those that a GPU captures."""

    def __init__(self, config, tp, device):
        self._model = RankModel(config, tp, device)
        self.ready = RankReady()
        self._pending = deque()

    def count_blocks(self):
        return KVBlocks(256, 0, 8)

    def build(self, blocks):
        cache = self._model.new_cache(blocks)
        context, room = run_context(self._model.model, cache.layers, 8, block_size=16)
        table = SamplingTable(8, self._model.config.spec.vocab_size, self._model.config.spec.eos_token_ids)
        self._runner = ModelRunner(context, table, StepGraphs(DecodeGraphs(context, room)))
        return self

    def submit(self, plan):
        assert not plan.copies and not plan.swap_outs
        self._pending.append(self._runner.submit(plan))

    def collect(self):
        return self._pending.popleft().wait()

    def close(self):
        pass


def run(load, prompt, all_params):
    """(token ids, log-probabilities) of each request, on an engine over the rank that `load` makes."""
    config = resolve(EngineConfig(device="cpu", max_num_seqs=8, max_model_len=512, num_gpu_blocks_override=256), 0)
    core = start_resolved_engine(config, LocalExecutor(config, load))
    for i, params in enumerate(all_params):
        core.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    results = [([], []) for _ in all_params]
    while core.has_work() or core.is_compiling:
        if not core.has_work():
            time.sleep(0.001)
            continue
        for delta in core.step():
            token_ids, logprobs = results[int(delta.request_id)]
            token_ids += delta.token_ids
            logprobs += delta.logprobs or []
    core.shutdown()
    return results


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
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    prompt = tokenizer.encode("The answer is")
    eager, graphs = (run(load, prompt, params) for load in (RankModel, GraphRank))
    for i, ((tokens, logprobs), (others, other_logprobs)) in enumerate(zip(eager, graphs, strict=True)):
        assert tokens == others
        assert len(logprobs) == len(other_logprobs) == (len(tokens) if i in (0, 3) else 0)
        for one, other in zip(logprobs, other_logprobs, strict=True):
            assert (one.token_id, one.top_ids) == (other.token_id, other.top_ids)
            assert other.logprob == pytest.approx(one.logprob, abs=1e-3)
            assert other.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-3)
    for tokens, _ in graphs[::2]:
        assert re.fullmatch(regex.regex, tokenizer.decode(tokens, skip_special_tokens=True))
