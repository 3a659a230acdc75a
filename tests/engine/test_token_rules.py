"""`allowed_token_ids` and `bad_words`: the engine against a naive reference, with a fake model and the bundled one."""

from __future__ import annotations

import msgspec
import pytest
import torch
import transformers
from support.engine import HeldGrammars, bound_request, engine_request, fake_core, run_all
from support.fakes import EOS, VOCAB, allowed_after, next_token

from rayllm import LLM, SamplingParams
from rayllm.api.types import GenerationRequest, KVBlocks
from rayllm.api.validation import validate_request
from rayllm.core.token_rules import TokenRules
from rayllm.errors import InvalidRequestError
from rayllm.text.bad_words import bad_token_ids

PROMPT = [1, 2, 3]
BAD = [[4], [5, 6], [5, 5, 8], [9, 10, 11, 12], [13, 13]]


def with_rules(request: GenerationRequest, bad: list[list[int]] = ()) -> GenerationRequest:
    return msgspec.structs.replace(request, bad_token_ids=list(bad))


def is_allowed(token: int, generated: list[int], request: GenerationRequest) -> bool:
    """As the fields are described, word by word."""
    params = request.params
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    text = [*generated, token]
    return not any(text[-len(word) :] == word for word in request.bad_token_ids)


def reference(request: GenerationRequest, bound: bool = False) -> list[int]:
    generated: list[int] = []
    while len(generated) < request.params.max_tokens and generated[-1:] != [EOS]:
        tokens = allowed_after(generated) if bound else range(VOCAB)
        allowed = [each for each in tokens if is_allowed(each, generated, request)]
        if not allowed:
            return generated
        generated.append(next_token(request.prompt_token_ids + generated, request.params.seed, allowed))
    return generated


def requests_with_rules(number: int, max_tokens: int) -> list[GenerationRequest]:
    """Of few tokens, so that the forbidden sequences are met all the time."""
    few = [4, 5, 6, 8, 9, 10, 11, 12, 13]
    rules = [({"allowed_token_ids": few}, BAD), ({"allowed_token_ids": few}, []), ({}, BAD)]
    return [
        with_rules(engine_request(f"r{i}", max_tokens, prompt=[i + 1] * (i + 1), seed=i, **params), bad)
        for i in range(number)
        for params, bad in [rules[i % 3]]
    ]


def outputs(core, requests: list[GenerationRequest]) -> list[list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for delta in run_all(core):
        tokens[delta.request_id] += delta.token_ids
    return list(tokens.values())


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [200, 12], ids=["room", "preemption"])
def test_any_schedule_follows_the_rules(max_in_flight, num_blocks):
    core, executor = fake_core(blocks=KVBlocks(num_blocks, 0), max_num_seqs=8, max_model_len=32)
    executor.max_in_flight = max_in_flight
    requests = requests_with_rules(9, 20)
    for request in requests:
        core.add(request)
    assert outputs(core, requests) == [reference(request) for request in requests]
    assert (core.stats().num_preemptions > 0) is (num_blocks == 12)


def test_they_outlive_the_workers():
    core, executor = fake_core()
    executor.can_recover, count = True, iter(range(10**6))
    executor.fails = lambda _plan: next(count) % 7 == 6
    requests = requests_with_rules(6, 15)
    for request in requests:
        core.add(request)
    assert outputs(core, requests) == [reference(request) for request in requests]
    assert executor.num_recoveries > 1


@pytest.mark.parametrize("num_emitted", range(5))
def test_a_request_goes_on_where_another_engine_left_it(num_emitted):
    core, _ = fake_core()
    requests = requests_with_rules(3, 12)
    all_tokens = [reference(request) for request in requests]
    for request, tokens in zip(requests, all_tokens, strict=True):
        core.add(msgspec.structs.replace(request, emitted={0: tokens[:num_emitted]}))
    assert outputs(core, requests) == [tokens[num_emitted:] for tokens in all_tokens]


def test_samples_of_one_request_each_have_their_place():
    core, _ = fake_core()
    request = with_rules(engine_request("r", 20, n=3, temperature=1.0, allowed_token_ids=[5, 6]), [[5, 6], [6, 6, 6]])
    core.add(request)
    texts = [[], [], []]
    for delta in run_all(core):
        texts[delta.index] += delta.token_ids
    for text in texts:
        assert len(text) == 20
        assert all(is_allowed(token, text[:i], request) for i, token in enumerate(text))


@pytest.mark.parametrize("seed", range(6))
def test_grammar_and_rules_both_hold(seed):
    grammars = HeldGrammars()
    core, _ = fake_core(grammars)
    bad = [[token] for token in range(0, VOCAB, 3)]
    request = with_rules(bound_request("r", 12, seed=seed), bad)
    if not any(is_allowed(token, [], request) for token in allowed_after([])):
        pytest.fail("the fake grammar begins with other tokens")
    core.add(request)
    grammars.release(0)
    deltas = run_all(core)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == reference(request, bound=True)
    ended_by_itself = tokens[-1:] == [EOS] or len(tokens) == 12
    assert deltas[-1].finish_reason == ("error" if not ended_by_itself else "stop" if tokens[-1] == EOS else "length")
    assert deltas[-1].bad_param == (None if ended_by_itself else "allowed_token_ids")


def test_rules_that_leave_nothing_are_refused_at_once():
    core, _ = fake_core(grammars := HeldGrammars())
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: no token is left"):
        core.add(with_rules(engine_request("a", allowed_token_ids=[4]), [[4]]))
    with pytest.raises(InvalidRequestError, match="no token is left"):  # min_tokens forbids the end
        core.add(engine_request("b", allowed_token_ids=[EOS], ignore_eos=False, min_tokens=1))
    core.add(with_rules(bound_request("c"), [[token] for token in allowed_after([])]))
    grammars.release(0)
    (delta,) = run_all(core)
    assert (delta.finish_reason, delta.bad_param) == ("error", "allowed_token_ids")
    assert not core.has_work()


def test_a_completion_that_has_no_further_token_ends_alone():
    core, _ = fake_core()
    core.add(with_rules(engine_request("a", allowed_token_ids=[4, 5]), [[4, 4], [4, 5], [5, 4], [5, 5]]))
    core.add(engine_request("b", 5))
    deltas = run_all(core)
    (last,) = [delta for delta in deltas if delta.request_id == "a" and delta.finish_reason]
    assert (last.finish_reason, last.bad_param) == ("error", "allowed_token_ids")
    assert sum(len(delta.token_ids) for delta in deltas if delta.request_id == "a") == 1
    assert sum(len(delta.token_ids) for delta in deltas if delta.request_id == "b") == 5


def test_min_tokens_counts_for_what_is_left():
    """Before min_tokens the end is no token that is left; behind it, it is."""
    request = engine_request("a", 9, allowed_token_ids=[4, EOS], ignore_eos=False, min_tokens=2)
    constraint = TokenRules(with_rules(request, [[4, 4, 4]]), VOCAB, [EOS])()
    masks = []
    for token in (4, 4, None):
        masks.append(int.from_bytes(constraint.mask(), "little"))
        if token is not None:
            constraint.accept(token)
    assert masks == [1 << 4, 1 << 4, 1 << EOS]


# ---- requests


def test_what_is_wrong_is_told():
    for field, value, text in (
        ("allowed_token_ids", [], "at least one"),
        ("allowed_token_ids", ["a"], "list of token ids"),
        ("allowed_token_ids", list(range(16_385)), "at most 16384"),
        ("bad_words", "a", "list of strings"),
        ("bad_words", [" "], "none of them blank"),
        ("bad_words", ["a"] * 65, "at most 64"),
        ("bad_words", ["a" * 4097], "4096 characters"),
    ):
        with pytest.raises(InvalidRequestError, match=text) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
    for field, value in (("allowed_token_ids", [1]), ("bad_words", ["a"])):
        with pytest.raises(InvalidRequestError, match="use_beam_search"):
            SamplingParams(use_beam_search=True, n=2, **{field: value})
    core, _ = fake_core()
    for request in (
        engine_request("r", allowed_token_ids=[VOCAB]),
        with_rules(engine_request("r"), [[VOCAB]]),
        with_rules(engine_request("r"), [[-1]]),
        with_rules(engine_request("r"), [[]]),
        engine_request("r", bad_words=["a"]),
    ):
        with pytest.raises(InvalidRequestError):
            validate_request(request, core.info)


class Words:
    """A token is a word; one behind a space is another one."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [len(each) + 10 * text.startswith(" ") for each in text.split()]


def test_a_word_is_forbidden_at_the_beginning_and_behind_a_space():
    assert bad_token_ids(["ab", " ab", "a b"], Words(), 50) == [[2], [12], [1, 1], [11, 11]]
    assert bad_token_ids(["ab"], Words(), 12) == [[2]]


# ---- the bundled model


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    with LLM(device="cpu", max_num_seqs=8, max_num_batched_tokens=128) as llm:
        yield llm


def test_parity_with_transformers(llm):
    """Greedy tokens, by the logits of transformers and the rules as they are described."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llm.config.model, dtype=torch.float32).eval()
    ids = llm.tokenizer.encode("The for statement")
    plain = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)[0].outputs[0]
    words = [word for word in plain.text.split() if word.isalpha()][:3]
    assert len(words) == 3
    letters = [i for i in range(llm.engine.info.vocab_size) if llm.tokenizer.token_text(i).strip().isalpha()]
    all_params = [
        SamplingParams(temperature=0.0, max_tokens=16, **rules)
        for rules in (
            {"bad_words": words},
            {"allowed_token_ids": letters},
            {"bad_words": words, "allowed_token_ids": letters},
        )
    ]
    found = [output.outputs[0] for output in llm.generate([ids] * 3, all_params, use_tqdm=False)]
    for params, completion in zip(all_params, found, strict=True):
        bad = bad_token_ids(params.bad_words, llm.tokenizer, llm.engine.info.vocab_size)
        request = GenerationRequest(request_id="r", prompt_token_ids=ids, params=params, bad_token_ids=bad)
        generated: list[int] = []
        while len(generated) < len(completion.token_ids):
            with torch.inference_mode():
                logits = model(torch.tensor([ids + generated])).logits[0, -1]
            best = next(
                token for token in logits.argsort(descending=True).tolist() if is_allowed(token, generated, request)
            )
            generated.append(best)
        assert completion.token_ids == generated != plain.token_ids[: len(generated)]
        assert not any(f" {word} " in f" {completion.text} " for word in params.bad_words)


def test_a_request_that_another_engine_had_is_not_refused_for_too_many_grammars():
    """Its client may have half of the answer."""
    core, _ = fake_core(grammars := HeldGrammars())
    for name, deaths in (("new", 0), ("moved", 1)):
        request = bound_request(name)
        core.add(msgspec.structs.replace(request, client="one", num_deaths=deaths))
    assert grammars.clients == ["one", None]
