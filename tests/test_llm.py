"""The offline API on the bundled model: forms of prompts, order, stops, logprobs, and every sort of bad input."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from support.model_factory import make_model

from rayllm import LLM, SamplingParams
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.config.options import BUNDLED_MODEL, EngineConfig
from rayllm.errors import ConfigError, InvalidRequestError, ModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPT = "The for statement"


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    with LLM(device="cpu", max_num_seqs=16, max_num_batched_tokens=64) as engine:
        yield engine
        engine.engine.check_integrity()
        assert engine.stats().num_used_blocks == 0


def generate(llm: LLM, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def test_the_forms_of_a_prompt_mean_the_same(llm):
    ids = llm.tokenizer.encode(PROMPT)
    forms = [PROMPT, [PROMPT], ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], {"prompt": PROMPT}]
    texts = {generate(llm, form)[0].outputs[0].text for form in forms}
    assert len(texts) == 1
    assert "The for statement is used to iter" in texts.pop()


def test_outputs_come_in_order_with_their_own_parameters(llm):
    lengths = [9, 2, 5, 1, 7] * 5
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]
    prompts = [f"{PROMPT} {i}" for i in range(25)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_ctrl_c_ends_a_call_and_the_next_one_is_answered(llm):
    before = generate(llm, PROMPT)[0].outputs[0].token_ids
    for _ in range(4):  # wherever it comes
        timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [PROMPT] * 64, SamplingParams(max_tokens=None, ignore_eos=True))
        timer.join()
        assert generate(llm, PROMPT)[0].outputs[0].token_ids == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outputs_come_in_order_where_only_some_have_a_grammar(llm):
    """Requests with a grammar are given to the engine first."""
    params = [GREEDY] * 6
    for place, word in ((1, "yes"), (4, "no"), (5, "yes")):
        params[place] = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(choice=[word]))
    prompts = [f"{PROMPT} {i}" for i in range(6)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode(prompt) for prompt in prompts]
    texts = [output.outputs[0].text for output in outputs]
    assert [texts[1], texts[4], texts[5]] == ["yes", "no", "yes"]
    assert [texts[i] for i in (0, 2, 3)] == [generate(llm, prompts[i])[0].outputs[0].text for i in (0, 2, 3)]


def test_noise_comes_again_only_with_a_seed_of_the_engine():
    params = SamplingParams(temperature=4.0, max_tokens=8, ignore_eos=True)
    found = []
    for options in ({}, {}, {"seed": 5}, {"seed": 5}):
        with LLM(device="cpu", max_num_seqs=4, num_gpu_blocks_override=8, **options) as engine:
            found.append([tuple(output.outputs[0].token_ids) for output in generate(engine, [PROMPT] * 3, params)])
    assert len({*found[0], *found[1], *found[2]}) == 9
    assert found[2] == found[3]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    alone = generate(llm, PROMPT, params)[0].outputs[0].token_ids
    crowd = generate(llm, [f"{i} is a number" for i in range(12)] + [PROMPT], params)
    assert crowd[-1].outputs[0].token_ids == alone


def test_cached_prefixes_are_shared_under_one_salt_only(llm):
    ids = [7 + i % 50 for i in range(64)]

    def cached(salt: str) -> int:
        return generate(llm, {"prompt_token_ids": ids, "cache_salt": salt})[0].num_cached_tokens

    assert [cached("a"), cached("a"), cached("b"), cached("a"), cached("b")] == [0, 48, 0, 48, 48]


def test_a_prefix_that_is_cached_has_its_logprobs(llm):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    ids = [9 + i % 50 for i in range(64)]
    new, cached = (generate(llm, {"prompt_token_ids": ids}, params)[0] for _ in range(2))
    assert generate(llm, {"prompt_token_ids": ids})[0].num_cached_tokens == 48
    for output in (new, cached):
        assert output.prompt_logprobs[0] is None
        assert [next(iter(entries)) for entries in output.prompt_logprobs[1:]] == ids[1:]


def test_sampling_in_parts_of_a_batch_changes_nothing(llm, monkeypatch):
    """Changed logits of large batches are held for a part of the rows at a time."""
    ways = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 1.1, "seed": 6, "logit_bias": {70: 3.0}, "top_k": 9, "logprobs": 1},
        {"temperature": 0.0, "structured_outputs": StructuredOutputs(regex="[a-f]{4,9}"), "logprobs": 1},
        {"temperature": 0.8, "seed": 7, "min_tokens": 9},
    ]
    params = [SamplingParams(max_tokens=10, **way) for way in ways * 2]
    prompts = [f"{PROMPT} {i}" for i in range(len(params))]
    whole = generate(llm, prompts, params)
    monkeypatch.setattr("rayllm.worker.runner.CHANGED_ROWS", 4)
    for ours, theirs in zip(generate(llm, prompts, params), whole, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert (ours.outputs[0].logprobs is None) == (theirs.outputs[0].logprobs is None)
        for entry, other in zip(ours.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True):
            assert {i: value.rank for i, value in entry.items()} == {i: value.rank for i, value in other.items()}
            assert all(entry[i].logprob == pytest.approx(other[i].logprob, abs=1e-4) for i in entry)


def test_n_completions_differ_and_the_first_is_that_of_n_1(llm):
    one = generate(llm, PROMPT, SamplingParams(temperature=1.5, seed=3, max_tokens=10))[0]
    many = generate(llm, PROMPT, SamplingParams(temperature=1.5, seed=3, max_tokens=10, n=5))[0]
    assert [output.index for output in many.outputs] == [0, 1, 2, 3, 4]
    assert many.outputs[0].token_ids == one.outputs[0].token_ids
    assert len({tuple(output.token_ids) for output in many.outputs}) > 1


def test_a_stop_string_ends_the_text_and_frees_the_engine(llm):
    whole = generate(llm, PROMPT, SamplingParams(temperature=0.0, max_tokens=40))[0].outputs[0].text
    stop = whole[20:27]
    output = generate(llm, PROMPT, SamplingParams(temperature=0.0, max_tokens=40, stop=[stop]))[0].outputs[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("options", [{}, {"n": 2, "best_of": 4}])
def test_a_completion_that_met_its_stop_string_stops_alone(llm, options):
    params = SamplingParams(**{"n": 4} | options, temperature=1.0, seed=3, max_tokens=40, stop=["e"], ignore_eos=True)
    before = llm.stats().generation_tokens
    output = generate(llm, PROMPT, params)[0]
    kept = [len(completion.token_ids) for completion in output.outputs]
    assert all(completion.stop_reason == "e" for completion in output.outputs)
    assert max(kept) > min(kept) or output.num_discarded_tokens
    assert llm.stats().generation_tokens - before == sum(kept) + output.num_discarded_tokens


def test_end_of_sequence_and_min_tokens(llm):
    output = llm.chat(
        [{"role": "user", "content": "What does len do?"}], SamplingParams(temperature=0, max_tokens=99), use_tqdm=False
    )[0].outputs[0]
    assert (output.text, output.finish_reason) == ("Return the number of items in a container.", "stop")
    ids = llm.tokenizer.encode(PROMPT)
    end = output.token_ids[-1]
    forced = generate(llm, ids, SamplingParams(temperature=0, max_tokens=30, min_tokens=30, logit_bias={end: 100.0}))
    assert len(forced[0].outputs[0].token_ids) == 30
    assert end not in forced[0].outputs[0].token_ids[:29]


def test_logprobs_match_transformers(llm):
    from transformers import AutoModelForCausalLM

    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    output = generate(llm, PROMPT, params)[0]
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    reported = output.prompt_logprobs[1:] + output.outputs[0].logprobs
    assert len(reported) == len(ids) - 1
    for position, entries in enumerate(reported):
        assert ids[position + 1] in entries
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(reference[position, token].item(), abs=1e-4)
    chosen = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(entries[t].logprob for entries, t in chosen))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt must not be empty"),
        ([[]], GREEDY, "prompt must not be empty"),
        ([[4096]], GREEDY, "token id 4096; ids of this model are 0 to 4095"),
        ([[-1]], GREEDY, "token id -1"),
        ([[1] * 2048], GREEDY, "has 2048 tokens.*context of 2048"),
        ([[1.5]], GREEDY, r"Expected `int`, got `float` - at `\$.prompt_token_ids\[0\]`"),
        ([[True]], GREEDY, "Expected `int`, got `bool`"),
        ([3.5], GREEDY, "a prompt is a string"),
        ([{"prompt": "x", "prompt_token_ids": [5]}], GREEDY, "exactly one of `prompt` and `prompt_token_ids`"),
        ([{"prompt": "x", "salt": "a"}], GREEDY, "perhaps cache_salt. Object contains unknown field `salt`"),
        ([{"cache_salt": "a"}], GREEDY, "exactly one of `prompt` and `prompt_token_ids`"),
        ([{"prompt": "x", "cache_salt": 5}], GREEDY, r"Expected `str`, got `int` - at `\$.cache_salt`"),
        ([{"prompt": ""}], GREEDY, "prompt must not be empty"),
        ([{"prompt": [5]}], GREEDY, r"Expected `str \| null`, got `array` - at `\$.prompt`"),
        ([{"prompt_token_ids": "x"}], GREEDY, r"Expected `array \| null`, got `str` - at `\$.prompt_token_ids`"),
        (["a", "b"], [GREEDY], "sampling_params has 1 entries for"),
        ("a", SamplingParams(stop_token_ids=[9999]), "stop_token_ids has token id 9999"),
        ("a", SamplingParams(logit_bias={9999: 1.0}), "logit_bias has token id 9999"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_goes_on(llm, prompts, params, message):
    with pytest.raises(InvalidRequestError, match=message):
        generate(llm, prompts, params)
    with pytest.raises(InvalidRequestError, match=message):  # a good prompt beside it does not hide it
        generate(llm, [PROMPT, *prompts] if isinstance(prompts, list) else [PROMPT, prompts], params)
    assert not llm.engine.has_work()
    assert generate(llm, PROMPT)[0].finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"n": 2, "temperature": 0.0}, "n must be 1 with temperature 0"),
        ({"min_tokens": 9, "max_tokens": 3}, r"min_tokens \(9\) must not exceed max_tokens \(3\)"),
        ({"top_p": 0.0}, "top_p must be greater than 0"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"logprobs": 21}, "logprobs must be at least 0 and at most 20"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"stop": [""]}, "empty string"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be a number"),
        ({"logit_bias": {"a": 1}}, "logit_bias keys must be token ids"),
    ],
)
def test_contradictory_parameters_name_the_field(options, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**options)
    assert caught.value.param in options


def copy_model(tmp_path: Path, **config: object) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_bad_model_folders_are_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, message in [
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "empty", "is empty"),
        (copy_model(tmp_path, architectures=["MambaForCausalLM"]), "MambaForCausalLM is not supported; supported are"),
    ]:
        for skip in (False, True):
            with pytest.raises(ModelError, match=message):
                LLM(str(folder), device="cpu", skip_tokenizer_init=skip)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    folder = Path(make_model(tmp_path / "m", "qwen3"))
    config = json.loads((folder / "config.json").read_text())
    for change, message in [({"num_hidden_layers": 4}, "lacks"), ({"num_hidden_layers": 2}, "no place for")]:
        (folder / "config.json").write_text(json.dumps(config | change | {"layer_types": None}))
        with pytest.raises(ModelError, match=message):
            LLM(str(folder), device="cpu", skip_tokenizer_init=True)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin; only \*\.safetensors"):
        LLM(str(folder), device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "executor": "local"}, "executor"),
        ({"max_model_len": 5000}, "max_model_len 5000 exceeds the model's limit of 2048"),
        ({"max_model_len": 64, "num_gpu_blocks_override": 2}, "max_model_len 64 does not fit"),
        ({"block_size": 0}, "block_size"),
        ({"dtype": "int4"}, "dtype"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
    ],
)
def test_bad_options_name_themselves(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="needs a GPU"):
        LLM(device="cuda")


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq' \(did you mean 'max_num_seqs'\?\)"):
        LLM(max_num_seq=3)
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)


def test_the_signature_and_the_documentation_are_those_of_the_options():
    parameters = inspect.signature(LLM).parameters
    assert list(parameters) == list(EngineConfig.model_fields)
    assert parameters["model"].kind is parameters["model"].POSITIONAL_OR_KEYWORD
    assert parameters["model"].default is None
    assert parameters["max_model_len"].annotation == int | None
    for name, field in EngineConfig.model_fields.items():
        assert f"{name}: {' '.join(field.description.split())}." in inspect.getdoc(LLM)
        if name not in ("model", "max_num_batched_tokens"):
            assert parameters[name].default == field.default
            assert parameters[name].kind is parameters[name].KEYWORD_ONLY
    assert parameters["max_num_batched_tokens"].default == 16384


def test_offline_steps_take_more_tokens(llm):
    """The fixture asks for 64; what is not asked for is the offline default."""
    assert llm.config.max_num_batched_tokens == 64
    with LLM(None, device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=8, max_model_len=64) as other:
        assert other.config.max_num_batched_tokens == 16384
        assert other.config.model == BUNDLED_MODEL


def test_a_shut_down_engine_says_so():
    llm = LLM(device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=8)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate([[1, 2]])


def test_dummy_weights_need_no_files(tmp_path):
    folder = copy_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with LLM(str(folder), device="cpu", load_format="dummy", num_gpu_blocks_override=8) as llm:
        assert len(llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)) == 1
