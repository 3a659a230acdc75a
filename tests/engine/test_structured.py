"""Structured outputs of the offline engine on the bundled model."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import Future

import jsonschema
import pytest
import torch
from support.engine import outputs_of
from support.schema_maker import make_schema

from rayllm import LLM, SamplingParams
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.api.types import EngineInfo, GenerationRequest, RequestOutput
from rayllm.api.validation import validate_request
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.engine.engine import EngineCore
from rayllm.errors import InvalidRequestError
from rayllm.executor.local import LocalExecutor
from rayllm.text.grammar import Grammar
from rayllm.text.grammar_compiler import GrammarCompiler

PROMPT = "The answer is"
REGEX = StructuredOutputs(regex="[a-z]{3,8}-[0-9]{2}")
SHORT = StructuredOutputs(json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    with LLM(device="cpu", max_num_seqs=32, max_num_batched_tokens=128) as llm:
        yield llm
        llm.engine.check_integrity()
        assert llm.stats().num_used_blocks == 0


def params(structure: StructuredOutputs | None, seed: int | None = 0, **options) -> SamplingParams:
    settings = {"temperature": 1.0, "max_tokens": 60, "seed": seed, **options}
    return SamplingParams(structured_outputs=structure, **settings)


def run(llm: LLM, all_params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(all_params), all_params, use_tqdm=False)


def test_200_json_schemas_of_growing_complexity(llm, full_matrix):
    """Every fourth of them, unless with --full-matrix."""
    schemas = {seed: make_schema(seed) for seed in range(0, 200, 1 if full_matrix else 4)}
    grammars = {seed: StructuredOutputs(json=json.dumps(schema)) for seed, schema in schemas.items()}
    outputs = run(llm, [params(grammar, seed, max_tokens=300) for seed, grammar in grammars.items()])
    reasons = Counter(output.outputs[0].finish_reason for output in outputs)
    assert set(reasons) <= {"stop", "length"}
    assert reasons["stop"] >= 0.8 * len(schemas), "most answers fit into max_tokens"
    for schema, output in zip(schemas.values(), outputs, strict=True):
        if output.outputs[0].finish_reason == "stop":
            answer = json.loads(output.outputs[0].text)
            jsonschema.validate(answer, schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_regex_choice_and_grammar(llm, temperature):
    choices = ["yes", "no", 'may "be"']
    lark = StructuredOutputs(grammar='start: "sum:" N ("+" N){1,3}\nN: /[0-9]{1,3}/')
    wanted = [
        (REGEX, lambda text: re.fullmatch("[a-z]{3,8}-[0-9]{2}", text)),
        (StructuredOutputs(choice=choices), choices.__contains__),
        (lark, lambda text: re.fullmatch(r"sum:[0-9]{1,3}(\+[0-9]{1,3}){1,3}", text)),
    ] * 4
    for (_, fits), output in zip(
        wanted, run(llm, [params(g, i, temperature=temperature) for i, (g, _) in enumerate(wanted)]), strict=True
    ):
        completion = output.outputs[0]
        assert completion.finish_reason == "stop" and fits(completion.text), completion.text
        assert completion.token_ids[-1] in llm.engine.info.eos_token_ids


def test_any_object_is_an_object_when_it_is_complete(llm):
    outputs = run(llm, [params(StructuredOutputs(json_object=True), i, max_tokens=150) for i in range(12)])
    complete = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert complete
    assert all(isinstance(json.loads(text), dict) for text in complete)


def test_max_tokens_cuts_and_stop_strings_too(llm):
    long, cut = run(
        llm,
        [
            params(StructuredOutputs(regex="a{50}"), max_tokens=5),
            params(StructuredOutputs(regex="ab{10}c"), stop=["bbb"]),
        ],
    )
    assert long.outputs[0].finish_reason == "length" and len(long.outputs[0].token_ids) == 5
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason, cut.outputs[0].text) == ("stop", "bbb", "a")


def test_the_others_of_a_batch_get_the_tokens_they_get_alone(llm):
    free = [
        params(None, seed, max_tokens=40, logprobs=logprobs, top_p=top_p)
        for seed, (logprobs, top_p) in enumerate([(None, 1.0), (2, 1.0), (None, 0.9), (0, 0.5)] * 2)
    ]
    alone = [run(llm, [each])[0].outputs[0] for each in free]
    grammars = [SHORT, REGEX, StructuredOutputs(json_object=True)]
    mixed = [p for i, each in enumerate(free) for p in (each, params(grammars[i % 3], i))]
    for before, after in zip(alone, run(llm, mixed)[::2], strict=True):
        assert after.outputs[0].token_ids == before.token_ids
        assert (after.outputs[0].logprobs is None) == (before.logprobs is None)


def test_n_completions_each_follow_the_grammar_and_differ(llm):
    (output,) = run(llm, [params(REGEX, 5, n=3)])
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{3,8}-[0-9]{2}", text) for text in texts)
    assert len(set(texts)) == 3
    assert run(llm, [params(REGEX, 5)])[0].outputs[0].text == texts[0]


def test_preempted_sequences_go_on_where_they_were(llm):
    long = StructuredOutputs(regex="([a-z]{2,4} ){40}end")
    wanted = [params(long, i, max_tokens=110, n=1 + 2 * (i == 3)) for i in range(5)]
    wanted += [params(None, i, max_tokens=110, ignore_eos=True) for i in range(3)]
    expected = [[c.token_ids for c in output.outputs] for output in run(llm, wanted)]
    with LLM(
        device="cpu",
        max_num_seqs=8,
        block_size=4,
        num_gpu_blocks_override=45,
        max_model_len=160,
        enable_prefix_caching=False,
    ) as tight:
        outputs = run(tight, wanted)
        assert tight.stats().num_preemptions > 5
        tight.engine.check_integrity()
    assert [[c.token_ids for c in output.outputs] for output in outputs] == expected
    for completion in (completion for output in outputs[:5] for completion in output.outputs):
        whole = completion.finish_reason == "stop"
        assert re.fullmatch("([a-z]{2,4} ){40}end" if whole else "([a-z]{2,4} ){20,}[a-z]*", completion.text)


def test_logprobs_are_those_of_the_raw_logits(llm):
    first = params(StructuredOutputs(choice=["zebra"]), max_tokens=1, logprobs=3)
    free = params(None, max_tokens=1, logprobs=3)
    bound, unbound = (output.outputs[0] for output in run(llm, [first, free]))
    token = bound.token_ids[0]
    entry = bound.logprobs[0]
    assert entry[token].rank > 3, "forced upon the model"
    top = {i: p.logprob for i, p in unbound.logprobs[0].items() if p.rank <= 3}
    assert {i: p.logprob for i, p in entry.items() if i != token} == pytest.approx(top, abs=1e-4)


def test_penalties_bias_and_truncation_choose_among_what_is_allowed(llm):
    everything = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "top_k": 5, "top_p": 0.7, "min_p": 0.1}
    bias = dict.fromkeys(range(500), -100.0)
    for i in range(6):
        (output,) = run(llm, [params(REGEX, i, logit_bias=bias, **everything)])
        assert re.fullmatch("[a-z]{3,8}-[0-9]{2}", output.outputs[0].text)


def test_a_bad_grammar_stops_the_call_before_anything_runs(llm):
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
        run(llm, [params(None), params(StructuredOutputs(regex="(a"))])
    assert caught.value.param == "structured_outputs"
    assert llm.stats().num_steps == steps
    assert run(llm, [params(SHORT, max_tokens=2)])[0].finished


class Reordering(GrammarCompiler):
    """Its compilations end in this order, once all have been asked for."""

    def __init__(self, config: ResolvedConfig, order: tuple[int, ...]):
        super().__init__(config.options.model, config.spec.vocab_size, config.spec.eos_token_ids)
        self.order = order
        self.asked: list[tuple[StructuredOutputs, Future[Grammar]]] = []

    def compile(self, structure: StructuredOutputs, client: str | None = None, gently: bool = False) -> Future[Grammar]:
        self.asked.append((structure, Future()))
        if len(self.asked) == len(self.order):
            for index in self.order:
                wanted, future = self.asked[index]
                future.set_result(super().compile(wanted).result())
        return self.asked[-1][1]


def test_results_do_not_depend_on_which_grammar_is_ready_first():
    """Of requests without a seed of their own, too."""
    config = resolve(EngineConfig(device="cpu", max_num_seqs=4), 0)
    requests = [
        GenerationRequest(
            request_id=str(size),
            prompt_token_ids=[7, 8, 9],
            params=params(StructuredOutputs(regex=f"[a-z]{{{size}}}"), None),
        )
        for size in (9, 8, 7)
    ]
    results = []
    for order in ((0, 1, 2), (1, 0, 2)):
        executor = LocalExecutor(config)
        core = EngineCore(config, executor, executor.start(), Reordering(config, order))
        results.append([output.outputs[0].token_ids for output in outputs_of(core, requests)])
        core.shutdown()
    assert results[0] == results[1]


def test_without_a_tokenizer():
    with (
        LLM(device="cpu", skip_tokenizer_init=True, max_num_seqs=2) as bare,
        pytest.raises(InvalidRequestError, match="needs a tokenizer") as caught,
    ):
        bare.generate([[1, 2, 3]], params(SHORT), use_tqdm=False)
    assert caught.value.param == "structured_outputs"


def test_a_model_without_an_end_of_sequence_token():
    info = EngineInfo(model="m", max_model_len=10, vocab_size=10, num_kv_tokens=10, eos_token_ids=[])
    request = GenerationRequest(request_id="r", prompt_token_ids=[1], params=params(SHORT))
    with pytest.raises(InvalidRequestError, match="no end-of-sequence token"):
        validate_request(request, info)
