"""Requests that schemathesis makes of /openapi.json, valid and not, against a live engine.

No answer is a 5xx, none takes longer than TIMEOUT_S, and each is one that the document describes; after each hundred
requests, the engine still says what it said before. RAYLLM_FUZZ_CASES says how many cases to make, others in each
run; without it they are few, and the same each time. Refused ones that should be valid are asked again, mended.
"""

from __future__ import annotations

import collections
import math
import os
import time

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import requests  # noqa: E402  (after the skip; schemathesis needs it)
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis import GenerationMode, checks  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

MODEL = "tiny-pydoc"
TIMEOUT_S = 60
CASES = int(os.environ.get("RAYLLM_FUZZ_CASES", "150"))
SAME_EACH_TIME = "RAYLLM_FUZZ_CASES" not in os.environ
# Share of the requests of each operation that takes input, and of which kind. Each text is valid as a model's id.
SHARES = {
    ("/v1/completions", "positive"): 0.14,
    ("/v1/completions", "negative"): 0.1,
    ("/v1/chat/completions", "positive"): 0.14,
    ("/v1/chat/completions", "negative"): 0.1,
    ("/v1/responses", "positive"): 0.1,
    ("/v1/responses", "negative"): 0.08,
    ("/v1/messages", "positive"): 0.1,
    ("/v1/messages", "negative"): 0.08,
    ("/tokenize", "positive"): 0.04,
    ("/tokenize", "negative"): 0.04,
    ("/detokenize", "positive"): 0.03,
    ("/detokenize", "negative"): 0.03,
    ("/v1/models/{model_id}", "positive"): 0.02,
}
OTHERS = 0.02  # of each other operation
# Fields that limit the generation, the first of which every request may have.
LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
# What is good enough for the fields that a body must have, where refusals name the field.
GOOD = {
    "/v1/completions": {"prompt": "The for statement"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What does len do?"}]},
    "/v1/responses": {"input": "What does len do?"},
}
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


class Canary:
    """Asks the same after each hundred requests, and counts them and their answers."""

    def __init__(self, url):
        self._url = url
        self.statuses = collections.defaultdict(collections.Counter)
        self.slowest_s = 0.0
        self._text = self.ask()

    def ask(self):
        body = {"model": MODEL, "prompt": "The for statement", "max_tokens": 8, "temperature": 0}
        answer = requests.post(f"{self._url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def count(self, what, send, *args, **kwargs):
        """The answer of `send(*args, **kwargs)`, which is counted as of the kind `what`."""
        start = time.monotonic()
        answer = send(*args, **kwargs, timeout=TIMEOUT_S)
        self.slowest_s = max(self.slowest_s, time.monotonic() - start)
        self.statuses[what][answer.status_code] += 1
        if self.total % 100 == 0:
            self.check()
        return answer

    def check(self):
        assert self.ask() == self._text
        assert requests.get(f"{self._url}/health", timeout=TIMEOUT_S).status_code == 200

    @property
    def total(self):
        return sum(counter.total() for counter in self.statuses.values())


@pytest.fixture(scope="module")
def schema(url):
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.fixture(scope="module")
def canary(url, request):
    canary = Canary(url)
    yield canary
    canary.check()
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{canary.total} requests; the slowest took {canary.slowest_s:.1f} s. Statuses:")
        for what, counter in sorted(canary.statuses.items()):
            print(f"  {what}: " + ", ".join(f"{status}: {n}" for status, n in sorted(counter.items())))


def operations(schema):
    return [result.ok() for result in schema.get_all_operations()]


def ask_for_little(path, body, valid):
    """Keep a body's generation short; a valid one is for the model that there is."""
    limits = [name for name in LIMITS[path] if body.get(name) is not None]
    for name in limits:
        if isinstance(body[name], int) and body[name] > 4:
            body[name] = 4
    if not limits:
        body[LIMITS[path][0]] = 4
    if valid and isinstance(body.get("model"), str):
        body["model"] = MODEL


def settle(session, canary, url, path, answer, body):
    """Leave out of a refused body what each refusal names, or mend it if it is required, until there is an answer.

    Shows that every refusal names a field of the request, and tries the others with the engine.
    """
    good = GOOD[path]
    for _ in range(len(body) + len(good)):
        name = answer.json()["error"]["param"]
        assert name in body or name in good, (answer.text, body)
        assert name not in body or body[name] != good.get(name), (answer.text, body)
        if name in good:
            body[name] = good[name]
        else:
            del body[name]
        ask_for_little(path, body, valid=True)
        answer = canary.count(f"mended {path}", session.post, f"{url}{path}", json=body)
        if answer.status_code != 400:
            break
    assert answer.status_code == 200, (answer.text, body)
    assert 'data: {"error"' not in answer.text, (answer.text, body)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("path", "mode"), SHARES)
def test_fuzz(url, schema, canary, path, mode):
    operation = next(each for each in operations(schema) if each.path == path)
    count = math.ceil(CASES * SHARES[path, mode])
    session = requests.Session()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=SAME_EACH_TIME,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case):
        generates = path in LIMITS and isinstance(case.body, dict)
        if generates:
            ask_for_little(path, case.body, valid=mode == "positive")
        answer = canary.count(f"{mode} {path}", case.call, session=session)
        case.validate_response(answer, checks=CHECKS)
        if generates and path in GOOD and mode == "positive" and answer.status_code == 400:
            settle(session, canary, url, path, answer, dict(case.body))

    ask()
    statuses = canary.statuses[f"{mode} {path}"]
    assert statuses.total() >= count
    if mode == "negative":
        assert set(statuses) <= {400, 404}, statuses
    elif path in GOOD:
        assert 200 in statuses | canary.statuses[f"mended {path}"]


@pytest.mark.timeout(1200)
def test_all_other_operations(schema, canary):
    fuzzed = {path for path, _ in SHARES}
    session = requests.Session()
    others = [operation for operation in operations(schema) if operation.path not in fuzzed]
    for operation in others:

        @settings(
            max_examples=math.ceil(CASES * OTHERS),
            deadline=None,
            database=None,
            derandomize=SAME_EACH_TIME,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case):
            what = f"{case.method} {case.operation.path}"
            case.validate_response(canary.count(what, case.call, session=session), checks=CHECKS)

        ask()
    assert len(others) > 5
