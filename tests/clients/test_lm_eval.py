"""lm-eval's `local-completions` against a live server: its log-likelihoods are those that transformers computes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
torch = pytest.importorskip("torch", reason="torch, which computes the reference, is not installed")
transformers = pytest.importorskip("transformers", reason="transformers, which computes the reference, is missing")

from lm_eval.tasks import TaskManager  # noqa: E402  (after the skips)
from lm_eval.utils import RemoteTokenizer  # noqa: E402

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "rayllm" / "assets" / "tiny-pydoc"
TOLERANCE = 1e-3
# As it is left to itself, lm-eval takes the server's tokenizer where it finds one.
TOKENIZERS = [{"tokenizer_backend": "huggingface", "tokenizer": str(MODEL)}, {"tokenizer_backend": "remote"}]
DOCS = [
    {"question": "A list is", "choices": ["a sequence", "a statement", "a banana"], "answer": 0},
    {"question": "The for statement is used to", "choices": ["iterate over a sequence", "sleep"], "answer": 0},
    {"question": "len(s) returns the", "choices": ["colour of an object", "length of an object"], "answer": 1},
    {"question": "An exception is raised when", "choices": ["an error occurs", "ünïcode 字 appears"], "answer": 0},
    # Longer than several blocks of the KV cache, and the same beginning twice.
    {
        "question": " ".join(["A dictionary maps keys to values."] * 12),
        "choices": ["It is mutable.", "It is a tree."],
        "answer": 0,
    },
]


@pytest.fixture(scope="module")
def reference(samples):
    """(context, continuation) -> (log-likelihood, whether greedy decoding writes it), by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)

    def score(context, continuation):
        ids = tokenizer(context + continuation, add_special_tokens=False).input_ids
        start = len(tokenizer(context, add_special_tokens=False).input_ids) if context else 0
        if not start:  # lm-eval scores a text without context after one special token
            ids, start = [samples["first token"], *ids], 1
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[start - 1 :]
        targets = torch.tensor(ids[start:])
        found = logprobs.gather(1, targets[:, None]).sum().item()
        return found, bool((logprobs.argmax(-1) == targets).all())

    return score


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The tasks of lm_eval_tasks over DOCS."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "docs.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    for task in (HERE / "lm_eval_tasks").glob("*.yaml"):
        where = f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / task.name).write_text(where + task.read_text())
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module", params=TOKENIZERS, ids=["own", "remote"])
def samples(request, url, tasks):
    """Task -> what lm-eval logged of each document; all tasks in one run."""
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny-pydoc",
            "base_url": f"{url}/v1/completions",
            "num_concurrent": 4,
            "max_length": 2048,
            **request.param,
        },
        batch_size=3,
        tasks=["pydoc_choice", "pydoc_text", "pydoc_generate"],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
    )
    # Of the server's tokenizer, lm-eval takes an id of 0 for none, and the end's in its place.
    first = 0 if "tokenizer" in request.param else 2
    return results["samples"] | {"results": results["results"], "first token": first}


def test_multiple_choice(samples, reference):
    right = 0
    assert len(samples["pydoc_choice"]) == len(DOCS)
    for sample in samples["pydoc_choice"]:
        doc = sample["doc"]
        expected = [reference(doc["question"], f" {choice}") for choice in doc["choices"]]
        found = [(float(value), str(greedy) == "True") for ((value, greedy),) in sample["resps"]]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=TOLERANCE)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        scores = [value for value, _ in expected]
        right += scores.index(max(scores)) == doc["answer"]
    assert samples["results"]["pydoc_choice"]["acc,none"] == pytest.approx(right / len(DOCS))


def test_rolling(samples, reference):
    for sample in samples["pydoc_text"]:
        doc = sample["doc"]
        expected, _ = reference("", f"{doc['question']} {doc['choices'][doc['answer']]}")
        ((found,),) = sample["resps"]
        assert float(found) == pytest.approx(expected, abs=TOLERANCE)


def test_generation_stops_where_told(samples):
    texts = [text for sample in samples["pydoc_generate"] for (text,) in sample["resps"]]
    assert len(texts) == len(DOCS)
    assert any(texts) and not any("." in text for text in texts)


def test_chats(url, tasks):
    results = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={"model": "tiny-pydoc", "base_url": f"{url}/v1/chat/completions", "num_concurrent": 4},
        tasks=["pydoc_generate"],
        task_manager=tasks,
        apply_chat_template=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    texts = [text for sample in results["samples"]["pydoc_generate"] for (text,) in sample["resps"]]
    assert len(texts) == len(DOCS)
    assert any(texts) and not any("." in text for text in texts)


def test_the_remote_tokenizer_is_the_models(url):
    """The template too, which lm-eval renders itself and in which it refuses variables that are not defined."""
    remote, own = RemoteTokenizer(f"{url}/v1/completions"), transformers.AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does len do?"}]
    text = own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert remote.apply_chat_template(chat) == text
    assert remote.encode(text) == own(text, add_special_tokens=False).input_ids
    assert remote.eos_token_id == own.eos_token_id
