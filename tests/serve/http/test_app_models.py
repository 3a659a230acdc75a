"""Several models behind one app: which one gets a request, limits, health and figures of each."""

import asyncio

import pytest
from support.app import CHAT, Api, FakeState

from rayllm.config.options import ServerConfig
from rayllm.serve.http.limits import Admission, Ticket


class TwoModels:
    """The state of a server of two models, whose door takes what both may have together."""

    def __init__(self, **options):
        self.one = FakeState(ServerConfig(**options), "one")
        self.two = FakeState(ServerConfig(**options), "org/two")
        self.models = {"one": self.one, "org/two": self.two}
        self.door = Admission(
            ServerConfig(max_queued_requests=0), sum(m.admission.max_live for m in self.models.values())
        )


@pytest.fixture
def api():
    return Api(state=TwoModels())


def test_both_are_listed(api):
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["one", "org/two"]
    assert api.get("/v1/models/org/two").json()["id"] == "org/two"
    response = api.get("/v1/models/three")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "the model 'three' does not exist; this server has 'one', 'org/two'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
def test_requests_go_to_the_model_that_they_name(api, path, body):
    state = api.state
    for name, model, other in (("one", state.one, state.two), ("org/two", state.two, state.one)):
        before = len(other.fake.started)
        answer = api.post(path, json=body | {"model": name})
        assert answer.status_code == 200
        assert answer.json().get("model", name) == name
        assert len(other.fake.started) == before
        assert "tokenize" in path or model.fake.started
    assert api.post(path, json=body | {"model": "three"}).status_code == 404
    missing = api.post(path, json=body)
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
    assert "'one', 'org/two'" in missing.json()["error"]["message"]


def test_one_model_without_an_engine_leaves_the_other(api):
    api.state.one.dead = True
    assert api.completion(model="one").status_code == 503
    assert api.completion(model="org/two").status_code == 200
    assert api.post("/tokenize", json={"model": "one", "prompt": "x"}).status_code == 503
    api.state.two.dead = True
    assert api.post("/v1/completions", content=b"not even JSON").status_code == 503, "before the body is read"


def test_health_of_each_and_of_all(api):
    assert api.get("/health").json() == api.get("/health?model=one").json() == {"status": "ok"}
    api.state.two.reason = "a worker died"
    assert api.get("/health?model=one").status_code == 200
    assert api.get("/health?model=org/two").json()["error"]["message"] == "a worker died"
    both = api.get("/health")
    assert (both.status_code, both.json()["error"]["message"]) == (503, "org/two: a worker died")
    unknown = api.get("/health?model=three")
    assert unknown.status_code == 404
    assert "one" not in unknown.text, "no key is needed to ask this"


def figure(api, name, model, label=""):
    text = api.get("/metrics").text
    lines = [
        line for line in text.splitlines() if line.startswith(f"rayllm:{name}{{") and f'model_name="{model}"' in line
    ]
    (line,) = [line for line in lines if label in line]
    return float(line.split()[-1])


def test_figures_are_of_each(api):
    for _ in range(3):
        api.completion(model="org/two")
    api.completion(model="one")
    assert figure(api, "request_success_total", "one", 'finished_reason="length"') == 1
    assert figure(api, "request_success_total", "org/two", 'finished_reason="length"') == 3
    assert figure(api, "num_requests_running", "one") == 2
    api.state.one.dead = True
    assert [figure(api, "num_replicas", name) for name in ("one", "org/two")] == [0, 1]
    api.completion(model="one")
    assert figure(api, "request_refused_total", "one", 'code="engine_unavailable"') == 1
    assert figure(api, "request_refused_total", "org/two", 'code="engine_unavailable"') == 0


def test_each_has_its_own_limit():
    """4 of each may run and none may queue: what is too much for one still fits the other."""
    state = TwoModels(max_queued_requests=0)
    api = Api(state=state)
    busy = Ticket(state.one.admission)
    busy.admit(4, 0)
    refused = api.completion(model="one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert api.completion(model="org/two").status_code == 200
    assert state.door.load == state.two.admission.load, "nobody is left at the door"
    busy.close()
    assert api.completion(model="one").status_code == 200
    assert figure(api, "request_refused_total", "one", 'code="queue_full"') == 1


def test_the_door_is_bounded_too():
    state = TwoModels(max_queued_requests=0)
    tickets = [Ticket(state.door) for _ in range(8)]
    api = Api(state=state)
    assert api.post("/v1/completions", content=b"not even JSON").status_code == 429
    assert [figure(api, "request_refused_total", name, 'code="queue_full"') for name in state.models] == [1, 1]
    for ticket in tickets:
        ticket.close()
    assert api.completion(model="one").status_code == 200


def test_many_at_once_leave_nothing_behind(api):
    async def scenario():
        import httpx

        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            calls = [
                client.post("/v1/completions", json={"prompt": prompt, "model": name, "n": 2})
                for name in api.state.models
                for prompt in ("hi", "dead", "bad", "poison")
            ]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert asyncio.run(scenario()) == [200, 503, 500, 500] * 2
    for admission in (api.state.door, api.state.one.admission, api.state.two.admission):
        assert (admission.load.completions, admission.load.queued_tokens) == (0, 0)
