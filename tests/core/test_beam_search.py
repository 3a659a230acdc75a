"""Beam search of the whole engine against `transformers.generate`: the same sequences and scores, in float32."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from support.kinds.common import PAD
from support.model_factory import make_model

from rayllm import LLM, SamplingParams
from rayllm.errors import InvalidRequestError

KINDS = ("llama3_rope", "mistral", "qwen2", "qwen3", "opt")
NUM_TOKENS = 14
EOS_IDS = list(range(0, 256, 6))  # so many that random models end some sequences
STOPPING, PENALTIES, WIDTHS = (False, True, "never"), (1.0, 0.0, -0.5, 2.0), (2, 4, 8)
# Each width with and without tokens that end a sequence, under every kind of stopping; penalties in turn.
CASES = [
    SamplingParams(
        use_beam_search=True,
        best_of=width,
        n=width - i % 2,
        early_stopping=stopping,
        length_penalty=PENALTIES[(i + i // 4) % 4],
        ignore_eos=ignore_eos,
        max_tokens=NUM_TOKENS,
        min_tokens=4 * (i % 3 == 0),
    )
    for i, (width, stopping, ignore_eos) in enumerate(
        case for case in itertools.product(WIDTHS, STOPPING, (False, True)) if case[1] is False or not case[2]
    )
]
PROMPTS = [[random.Random(i).randrange(256) for _ in range(5 + 4 * i)] for i in range(len(CASES))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    return {kind: make_model(tmp_path_factory.mktemp(kind), kind, eos_token_id=EOS_IDS) for kind in KINDS}


def expected(model, prompt, params):
    """[(generated tokens, score)] as transformers finds them."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.best_of,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=params.min_tokens or None,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=None if params.ignore_eos else EOS_IDS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [place for place, token in enumerate(row) if not params.ignore_eos and token in EOS_IDS]
        sequences.append(row[: ends[0] + 1] if ends else row)
    return list(zip(sequences, found.sequences_scores.tolist(), strict=True))


def check(outputs, wanted):
    for output, params, sequences in zip(outputs, CASES, wanted, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _score in sequences]
        for completion, (tokens, score) in zip(output.outputs, sequences, strict=True):
            own = completion.cumulative_logprob / len(tokens) ** params.length_penalty
            assert own == pytest.approx(score, abs=2e-4)
            stops = not params.ignore_eos and tokens[-1] in EOS_IDS
            assert completion.finish_reason == ("stop" if stops else "length")


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_and_scores_are_those_of_transformers(kind, folders):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    wanted = [expected(model, prompt, params) for prompt, params in zip(PROMPTS, CASES, strict=True)]
    ends = [tokens[-1] in EOS_IDS and len(tokens) < NUM_TOKENS for case in wanted for tokens, _score in case]
    assert 5 < sum(ends) < len(ends) - 5, "some sequences end by themselves and some do not"
    options = {"device": "cpu", "skip_tokenizer_init": True, "block_size": 4, "max_model_len": 96}
    with LLM(folders[kind], max_num_seqs=16, max_num_batched_tokens=64, **options) as llm:
        check(llm.generate(PROMPTS, CASES, use_tqdm=False), wanted)
        assert llm.stats().num_preemptions == llm.stats().num_used_blocks == 0
    if kind != "qwen3":
        return
    for mode in ("recompute", "swap"):  # a pool for one sequence of full length, a fifth of what is asked for
        with LLM(
            folders[kind], max_num_seqs=16, num_gpu_blocks_override=24, preemption_mode=mode, swap_space=0.01, **options
        ) as llm:
            check(llm.generate(PROMPTS, CASES, use_tqdm=False), wanted)
            stats = llm.stats()
            assert stats.num_preemptions > 20 and (stats.num_swap_preemptions > 20) == (mode == "swap")
            assert stats.num_used_blocks == stats.num_used_cpu_blocks == 0


@pytest.fixture(scope="module")
def llm(folders):
    options = {"max_num_seqs": 8, "block_size": 4, "max_model_len": 96, "skip_tokenizer_init": True}
    with LLM(folders["qwen3"], device="cpu", **options) as llm:
        yield llm


def generate(llm, prompts, **params):
    return llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, **params), use_tqdm=False)


def test_beams_report_the_log_probabilities_of_their_tokens(llm):
    (output,) = generate(llm, PROMPTS[2], use_beam_search=True, n=3, logprobs=2, prompt_logprobs=1)
    assert len(output.prompt_logprobs) == len(PROMPTS[2])
    for completion in output.outputs:
        prompt = PROMPTS[2] + completion.token_ids
        (again,) = generate(llm, prompt, prompt_logprobs=2, temperature=0)
        assert len(completion.logprobs) == len(completion.token_ids)
        total = 0.0
        for token, entry, other in zip(
            completion.token_ids, completion.logprobs, again.prompt_logprobs[len(PROMPTS[2]) :], strict=True
        ):
            assert entry.keys() == other.keys()
            for key, value in entry.items():
                assert (value.rank, value.logprob) == (other[key].rank, pytest.approx(other[key].logprob, abs=1e-4))
            total += entry[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total)
    (plain,) = generate(llm, PROMPTS[2], use_beam_search=True, n=3)
    assert [each.token_ids for each in plain.outputs] == [each.token_ids for each in output.outputs]
    assert all(each.logprobs is None for each in plain.outputs)


def test_the_best_samples_are_those_of_the_highest_mean(llm):
    options = {"temperature": 1.5, "seed": 5, "top_k": 30}
    for logprobs in (None, 1):
        (every,) = generate(llm, PROMPTS[3], n=6, logprobs=0, **options)
        (best,) = generate(llm, PROMPTS[3], n=2, best_of=6, logprobs=logprobs, **options)
        ranked = sorted(every.outputs, key=lambda each: -each.cumulative_logprob / len(each.token_ids))
        assert len({len(each.token_ids) for each in ranked}) > 1, "a mean is not a sum"
        assert [each.token_ids for each in best.outputs] == [each.token_ids for each in ranked[:2]]
        assert [each.index for each in best.outputs] == [0, 1]
        assert [each.cumulative_logprob for each in best.outputs] == [each.cumulative_logprob for each in ranked[:2]]
        assert all((each.logprobs is None) == (logprobs is None) for each in best.outputs)
        assert best.num_discarded_tokens == sum(len(each.token_ids) for each in ranked[2:])


@pytest.mark.parametrize(
    ("params", "name", "text"),
    [
        ({"best_of": 2, "n": 3}, "best_of", "at least n (3), not 2"),
        ({"best_of": 129}, "best_of", "at most 128, not 129"),
        ({"best_of": 2, "temperature": 0}, "best_of", "temperature 0"),
        ({"length_penalty": 2}, "length_penalty", "only allowed with use_beam_search"),
        ({"early_stopping": True}, "early_stopping", "only allowed with use_beam_search"),
        ({"use_beam_search": 1}, "use_beam_search", "must be true or false, not 1"),
        ({"use_beam_search": True}, "use_beam_search", "needs at least 2 beams"),
        ({"early_stopping": 0.0}, "early_stopping", 'true, false or "never", not 0.0'),
        ({"early_stopping": 0}, "early_stopping", 'true, false or "never", not 0'),
        ({"use_beam_search": True, "n": 2, "length_penalty": 11}, "length_penalty", "at most 10"),
        ({"use_beam_search": True, "n": 2, "length_penalty": float("nan")}, "length_penalty", "a number"),
        ({"use_beam_search": True, "n": 2, "early_stopping": "always"}, "early_stopping", "\"never\", not 'always'"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature", "leave it out"),
        ({"use_beam_search": True, "n": 2, "top_k": 5}, "top_k", "leave it out"),
        ({"use_beam_search": True, "n": 2, "repetition_penalty": 1.1}, "repetition_penalty", "leave it out"),
        ({"use_beam_search": True, "n": 2, "stop": ["x"]}, "stop", "leave it out"),
        ({"use_beam_search": True, "n": 9}, "n", "at most 8, as so many sequences run at once"),
        ({"use_beam_search": True, "n": 1, "best_of": 9}, "best_of", "at most 8"),
        ({"use_beam_search": True, "n": 8, "stop_token_ids": list(range(64))}, "n", None),
    ],
)
def test_what_cannot_be_served_is_refused(llm, params, name, text):
    if text is None:  # 259 tokens are enough for them
        generate(llm, PROMPTS[0], **params)
        return
    with pytest.raises(InvalidRequestError) as caught:
        generate(llm, PROMPTS[0], **params)
    assert caught.value.param == name
    assert name in str(caught.value) and text in str(caught.value)
