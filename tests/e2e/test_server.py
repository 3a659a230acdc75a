"""`rayllm launch` as users run it: a process, the bundled model on CPU, real clients; nothing is left of it after."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from support.launched import MODEL, RAYLLM, Launched, free_port, haproxy_processes, private_folders, session_processes

from rayllm import timeouts


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    launched = Launched(tmp_path_factory.mktemp("server") / "log", "--port", str(port), "--device", "cpu")
    launched.url = f"http://127.0.0.1:{port}"
    try:
        launched.wait_for("\nready ")
        yield launched
    finally:
        launched.kill()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def metric(server, name):
    text = httpx.get(f"{server.url}/metrics").text
    return float(re.search(rf"^rayllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE).group(1))


def comes_to(server, name, value):
    """Whether a figure comes to this value, within the time that engines' beats may take."""
    deadline = time.monotonic() + 10
    while metric(server, name) != value and time.monotonic() < deadline:
        time.sleep(0.1)
    return metric(server, name) == value


def test_launch_says_how_to_use_it(server):
    text = server.log.read_text()
    assert f"address  {server.url}/v1" in text
    assert MODEL in text
    command = re.search(r"curl .*", text).group(0)
    answer = subprocess.run(["bash", "-c", f"{command} -s"], capture_output=True, check=True, text=True).stdout
    assert json.loads(answer)["choices"][0]["text"]


def test_small_routes(server, client):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/version").json()["version"]


def test_completion(client):
    answer = client.completions.create(model=MODEL, prompt="The for statement", max_tokens=12, temperature=0)
    again = client.completions.create(model=MODEL, prompt="The for statement", max_tokens=12, temperature=0)
    assert answer.choices[0].text == again.choices[0].text != ""
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_embeddings(server, client):
    texts = ["The for statement", "A list is a mutable sequence.", "def"]
    answer = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64, and decodes it
    assert [each.index for each in answer.data] == [0, 1, 2]
    vectors = [each.embedding for each in answer.data]
    assert all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 3
    alone = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts[1], "encoding_format": "float"}).json()
    assert math.dist(alone["data"][0]["embedding"], vectors[1]) < 1e-4
    mean = client.embeddings.create(model=MODEL, input=texts[1], extra_body={"pooling": "mean"}).data[0].embedding
    assert abs(math.hypot(*mean) - 1) < 1e-5 and math.dist(mean, vectors[1]) > 0.1
    with pytest.raises(openai.BadRequestError, match=f"dimensions must be {len(mean)}"):
        client.embeddings.create(model=MODEL, input=texts, dimensions=len(mean) - 1)


def test_chat_stops_by_itself(client):
    question = [{"role": "user", "content": "Explain the for statement."}]
    answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_streams_say_the_same_as_whole_answers(client):
    options = {"model": MODEL, "prompt": "A list is", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**options)
    *chunks, usage = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (usage.choices, usage.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    options = {"model": MODEL, "messages": [{"role": "user", "content": "What does len do?"}], "temperature": 0}
    whole = client.chat.completions.create(**options, max_tokens=16)
    chunks = list(client.chat.completions.create(**options, max_completion_tokens=16, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_raw_events(server):
    body = {"prompt": "def", "max_tokens": 3, "stream": True, "ignore_eos": True, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: {") for frame in frames[:-2])


def test_logprobs(client):
    answer = client.completions.create(
        model=MODEL, prompt=[[300, 301, 302]], max_tokens=2, logprobs=3, echo=True, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert (
        len(logprobs.tokens)
        == len(logprobs.token_logprobs)
        == len(logprobs.text_offset)
        == 3 + len(logprobs.tokens[3:])
    )
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_echo_of_nothing_new_scores_the_prompt(client):
    answer = client.completions.create(model=MODEL, prompt="A list is a sequence", max_tokens=0, logprobs=1, echo=True)
    assert answer.choices[0].text == "A list is a sequence"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0


def test_several_choices_and_prompts(client):
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=4, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=4, seed=1)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]


def test_stop_strings_and_sampling_extensions(client):
    options = {"model": MODEL, "prompt": "The while statement is used for", "temperature": 0, "max_tokens": 24}
    text = client.completions.create(**options).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(**options, stop=stop).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    extras = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True, "seed": 3}
    answer = client.completions.create(model=MODEL, prompt="def", max_tokens=5, extra_body=extras)
    assert answer.usage.completion_tokens == 5


def test_many_at_once(client):
    def ask(i):
        options = {"prompt": f"Item {i}", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        return client.completions.create(model=MODEL, **options).choices[0].text

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert ask(7) == together[7]


BAD_REQUESTS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": "word " * 4000}, "prompt"),
    ({"prompt": "hi", "max_tokens": 100_000}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "hi", "colour": "red", "strict_fields": True}, "colour"),
    ({"prompt": "hi", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"prompt": "hi", "temperature": 0, "n": 2}, "n"),
    ({"prompt": "hi", "n": 10**9}, "n"),
    ({"prompt": "hi", "temperature": -1}, "temperature"),
    ({"prompt": "hi", "top_p": 1.5}, "top_p"),
    ({"prompt": "hi", "stop_token_ids": [99999]}, "stop_token_ids"),
    ({"prompt": "hi", "tools": [{}], "strict_fields": True}, "tools"),
]


@pytest.mark.parametrize(("body", "param"), BAD_REQUESTS, ids=lambda value: str(value)[:40])
def test_bad_requests_are_refused_by_name(server, body, param):
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_other_errors_and_the_engine_still_serves(server, client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="hi")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])
    assert httpx.post(f"{server.url}/v1/completions", content=b"{").status_code == 400
    assert httpx.post(f"{server.url}/v1/completions", content=b"x" * (33 * 2**20)).status_code == 413
    assert client.completions.create(model=MODEL, prompt="hi", max_tokens=1).usage.completion_tokens == 1
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_request(server, stream):
    body = {"prompt": "def", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    for _ in range(3):  # later ones are passed on over connections that were there
        before = metric(server, "generation_tokens_total")
        with httpx.Client(timeout=0.5) as http:
            if stream:
                with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                    next(response.iter_bytes())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(f"{server.url}/v1/completions", json=body)
        time.sleep(2 * timeouts.BEAT_S)  # so that the figures are of later than its beginning
        assert comes_to(server, "num_requests_running", 0)
        assert metric(server, "generation_tokens_total") < before + 1900


def test_metrics_count(server, client):
    before = metric(server, "generation_tokens_total"), metric(server, "e2e_request_latency_seconds_count")
    client.completions.create(model=MODEL, prompt="hi", max_tokens=5, extra_body={"ignore_eos": True})
    assert comes_to(server, "generation_tokens_total", before[0] + 5)
    assert metric(server, "e2e_request_latency_seconds_count") == before[1] + 1
    assert metric(server, "time_to_first_token_seconds_count") > 0


def test_chat_command(server):
    done = subprocess.run(
        [RAYLLM, "chat", "--url", server.url, "--temperature", "0", "--max-tokens", "8"],
        input="What does len do?\n\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip()


def test_another_haproxy_takes_the_place_of_one_that_died(server):
    """Connections that come meanwhile wait for it."""
    ((pid, _),) = haproxy_processes(server.session_id)
    os.kill(pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{pid}"):
        assert httpx.get(f"{server.url}/v1/models", timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/v1/models", timeout=60).status_code == 200
    assert haproxy_processes(server.session_id)[0][0] != pid


# The last test that needs the server.
def test_ctrl_c_lets_requests_end_and_leaves_nothing(server):
    folders = private_folders(server.session_id)
    assert len(folders) == 2, "the engine's, and that of stored responses and files"
    body = {"prompt": "def", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        assert list(lines)[-2] == "data: [DONE]"
    started = time.monotonic()
    assert server.process.wait(timeout=60) == 0
    assert not [folder for folder in folders if folder.exists()]
    deadline = started + 30
    while (left := session_processes(server.session_id)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left
