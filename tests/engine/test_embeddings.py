"""Embeddings: the engine against transformers' hidden states in fp32."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from pathlib import Path

import pytest
import torch
import transformers
from msgspec.structs import replace
from support.engine import outputs_of
from support.kinds.common import EOS
from support.model_factory import make_model, run_context

from rayllm import LLM, SamplingParams
from rayllm.api.types import GenerationRequest, KVBlocks, RankReady, RequestOutput
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.engine.build import start_resolved_engine
from rayllm.errors import InvalidRequestError
from rayllm.executor.local import LocalExecutor
from rayllm.sampling.sampling_table import SamplingTable
from rayllm.worker.graphs import StepGraphs
from rayllm.worker.inputs import build
from rayllm.worker.runner import ModelRunner
from rayllm.worker.worker import RankModel

KINDS = ("llama3_rope", "mistral", "qwen2", "qwen3_tied", "opt", "opt_post")
TOLERANCE = 1e-5
IDS = itertools.count()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts_of(seed: int) -> list[list[int]]:
    """Of very different lengths, with shared beginnings for the prefix cache."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, EOS - 1, (n,), generator=generator).tolist() for n in (1, 2, 31, 64, 90, 7)]
    return [*drawn, [*drawn[4][:64], 5, 6, 7], drawn[4]]


def hidden_states(folder: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """What transformers feeds to the head (or to what projects to it): [tokens, hidden_size] of each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = getattr(model.model, "decoder", None)
    head = getattr(decoder, "project_out", None) or model.lm_head
    seen: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.inference_mode():
        for prompt in prompts:
            model(torch.tensor([prompt]))
    assert [len(each) for each in seen] == [len(prompt) for prompt in prompts]
    return seen


def expected(states: list[torch.Tensor], pooling: str) -> torch.Tensor:
    """[prompts, hidden_size], of length 1."""
    vectors = [each[-1] if pooling == "last" else each.mean(0) for each in states]
    return torch.stack([vector / vector.norm() for vector in vectors])


def vectors_of(outputs: list[RequestOutput]) -> torch.Tensor:
    assert all(output.finished and output.outputs[0].finish_reason == "stop" for output in outputs)
    assert not any(output.outputs[0].token_ids or output.outputs[0].text for output in outputs)
    return torch.tensor([list(output.embedding) for output in outputs])


def request(prompt: list[int], params: SamplingParams = SamplingParams(), **fields: object) -> GenerationRequest:
    return GenerationRequest(request_id=f"r{next(IDS)}", prompt_token_ids=prompt, params=params, **fields)


def engine(folder: str | Path, **options: object) -> LLM:
    torch.set_num_threads(1)
    return LLM(str(folder), device="cpu", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("budget", [13, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_parity_with_transformers(tmp_path, kind, budget):
    folder = make_model(tmp_path, kind)
    prompts = prompts_of(1)
    states = hidden_states(folder, prompts)
    with engine(folder, max_num_batched_tokens=budget, max_num_seqs=4, block_size=8) as llm:
        for pooling in ("mean", "last", "mean", "last"):  # the second time with a full prefix cache
            outputs = llm.embed(prompts, pooling, use_tqdm=False)
            assert (vectors_of(outputs) - expected(states, pooling)).abs().max() < TOLERANCE
            assert (sum(output.num_cached_tokens for output in outputs) > 0) == (pooling == "last")
        llm.engine.check_integrity()
        assert llm.stats().num_used_blocks == llm.stats().generation_tokens == 0


@pytest.mark.parametrize("options", [{}, {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 12}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_in_one_batch_with_generation(tmp_path, options, deterministic):
    """Neither kind of request changes the other's results, with little memory either."""
    folder, prompts = make_model(tmp_path, "qwen3"), prompts_of(2)
    states = hidden_states(folder, prompts)
    params = replace(GREEDY, max_tokens=30)
    common = {"block_size": 4, "max_num_seqs": 32, "max_model_len": 128, "deterministic": deterministic}
    with engine(folder, **common) as llm:
        alone = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    with engine(folder, **common, **options) as llm:
        requests = []
        for prompt in prompts:
            requests += [request(prompt, params), request(prompt, pooling="last"), request(prompt, pooling="mean")]
        outputs = outputs_of(llm.engine, requests)
        assert [output.outputs[0].token_ids for output in outputs[::3]] == alone
        assert (vectors_of(outputs[1::3]) - expected(states, "last")).abs().max() < TOLERANCE
        assert (vectors_of(outputs[2::3]) - expected(states, "mean")).abs().max() < TOLERANCE
        llm.engine.check_integrity()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_preempted_in_mid_prompt(tmp_path, pooling, mode):
    folder, prompt = make_model(tmp_path, "qwen3"), prompts_of(5)[4]
    states = hidden_states(folder, [prompt])
    with engine(
        folder,
        block_size=4,
        max_model_len=128,
        num_gpu_blocks_override=34,
        max_num_batched_tokens=12,
        scheduling_policy="priority",
        preemption_mode=mode,
        swap_space=0.01,
    ) as llm:
        core, deltas = llm.engine, []
        pooled_one = request(prompt, pooling=pooling, priority=1)
        core.add(pooled_one)
        for _ in range(4):
            deltas += core.step()
        assert not deltas
        core.add(request(prompt[::-1], GREEDY))
        while core.has_work():
            deltas += core.step()
            core.check_integrity()
        (pooled,) = [delta for delta in deltas if delta.request_id == pooled_one.request_id]
        assert pooled.num_preemptions == 1
        assert core.stats().num_swap_preemptions == (mode == "swap" and pooling == "last")
        vector = torch.tensor(list(array("f", pooled.embedding)))
        assert (vector - expected(states, pooling)[0]).abs().max() < TOLERANCE


class Recorder:
    """Stands in for captured graphs that fit every step, and counts what they run."""

    def __init__(self, context):
        self.context, self.steps = context, 0

    def fits(self, _layout):
        return True

    def run(self, layout):
        self.steps += 1
        batch = build(self.context.batch, layout)
        return self.context.model.local_logits(self.context.model(batch, self.context.caches))


class RecordingRank:
    """A rank, before and after its cache is sized, whose captured graphs are a `Recorder`."""

    def __init__(self, config, tp, device):
        self.model = RankModel(config, tp, device)
        self.ready = RankReady()
        self.pending = deque()

    def count_blocks(self):
        return KVBlocks(64, 0, 8)

    def build(self, blocks):
        context, _room = run_context(self.model.model, self.model.new_cache(blocks).layers, 8, block_size=16)
        spec = self.model.config.spec
        self.graphs = Recorder(context)
        table = SamplingTable(8, spec.vocab_size, spec.eos_token_ids)
        self.runner = ModelRunner(context, table, StepGraphs(chunks=[self.graphs]))
        return self

    def submit(self, plan):
        assert not plan.copies and not plan.swap_outs
        self.pending.append(self.runner.submit(plan))

    def collect(self):
        return self.pending.popleft().wait()

    def close(self):
        pass


def test_only_steps_without_pooled_prompts_are_captured_ones(tmp_path):
    folder, prompts = make_model(tmp_path, "qwen2"), prompts_of(4)
    states = hidden_states(folder, prompts)
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "enable_prefix_caching": False}
    with engine(folder, **options) as llm:
        alone = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    config = resolve(EngineConfig(model=folder, device="cpu", skip_tokenizer_init=True, **options), 0)
    ranks = []

    def load(*args):
        ranks.append(RecordingRank(*args))
        return ranks[0]

    core = start_resolved_engine(config, LocalExecutor(config, load))
    graphs = ranks[0].graphs
    mixed = [*(request(prompt, pooling="mean") for prompt in prompts), request(prompts[3], GREEDY)]
    outputs = outputs_of(core, mixed)
    assert (vectors_of(outputs[:-1]) - expected(states, "mean")).abs().max() < TOLERANCE
    assert outputs[-1].outputs[0].token_ids == alone[3]
    before = graphs.steps
    outputs = outputs_of(core, [request(prompt, GREEDY) for prompt in prompts])
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert graphs.steps > before
    core.shutdown()


def test_the_whole_context_and_bad_requests(tmp_path):
    with engine(make_model(tmp_path, "llama"), max_model_len=40, max_num_batched_tokens=16) as llm:
        assert len(llm.embed([3] * 40, use_tqdm=False)[0].embedding) == 96
        for prompt, pooling, param in (([3] * 41, "last", "prompt"), ([3], "max", "pooling"), ([], "last", "prompt")):
            with pytest.raises(InvalidRequestError) as caught:
                llm.embed({"prompt_token_ids": prompt}, pooling, use_tqdm=False)
            assert caught.value.param == param
        for name, value in (("n", 2), ("max_tokens", 1), ("logprobs", 1), ("prompt_logprobs", 0), ("stop", ["x"])):
            bad = request([3], SamplingParams(**{name: value}), pooling="last")
            with pytest.raises(InvalidRequestError, match=f"{name} cannot be combined with pooling"):
                llm.engine.add(bad)
        assert not llm.engine.has_work()
