"""`rayllm chat` with a small server: answers, commands, files, what a stopped answer leaves, the key, history."""

import io
import json
import os
import stat
import sys
from types import SimpleNamespace

import pytest
from support.sse_server import FakeServer
from typer.testing import CliRunner

from rayllm.cli import chat as cli_chat
from rayllm.cli import main as cli
from rayllm.errors import EngineDeadError, InvalidRequestError

runner = CliRunner()


def usage(completion):
    details = {"cached_tokens": 4}
    return {"prompt_tokens": 7, "completion_tokens": completion, "total_tokens": 9, "prompt_tokens_details": details}


def chunk(delta=None, usage=None, finish_reason=None):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return {
        "id": "1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }


def answer(handler, body):
    """Says "you said ..." of the last message, or does what it asks for."""
    last = body["messages"][-1]["content"]
    if last == "bad":
        return handler.whole(400, {"error": {"message": "no such thing"}})
    if last == "down":
        return handler.whole(503, {"error": {"message": "being restarted"}})
    if last == "page":
        return handler.whole(502, "bad gateway")
    deltas = [{"role": "assistant", "content": ""}, {"content": "you said "}, {"content": last}]
    if last == "think":
        deltas[1:1] = [{"reasoning_content": "hm, "}, {"reasoning_content": "well"}]
    events = [chunk(delta, usage(n)) for n, delta in enumerate(deltas)]
    if last == "broken":
        events[2] = {"error": {"message": "no such kernel"}}
    if last != "cut":
        events += [chunk({}, usage(3), "length"), chunk(usage=usage(3))]
    handler.begin()
    for event in events:
        handler.event(event)
    handler.end("" if last == "cut" else "data: [DONE]\n\n")


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("RAYLLM_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "secret of another service")
    with FakeServer(answer).running() as server:
        yield server


def chat(server, *lines, args=(), env=None):
    text = "".join(line + "\n" for line in lines)
    return runner.invoke(cli.app, ["chat", "--url", server.url, *args], input=text, env=env)


def contents(body):
    return [message["content"] for message in body["messages"]]


def test_standard_output_has_nothing_but_answers(server):
    result = chat(server, "a", "/params", "/help", "b", "", "never")
    assert result.stdout == "you said a\nyou said b\n"
    assert f"fake<model> at {server.url}/v1" in result.stderr
    assert contents(server.bodies[1]) == ["a", "you said a", "b"]


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb\r\n", "a\nb\n\nnever"])
def test_the_last_line_needs_no_newline(server, text):
    result = runner.invoke(cli.app, ["chat", "--url", server.url], input=text)
    assert result.stdout == "you said a\nyou said b\n"


def test_input_that_is_not_text(server):
    error = runner.invoke(cli.app, ["chat", "--url", server.url], input=b"a\n\xff\n").exception
    assert isinstance(error, InvalidRequestError)
    assert "not UTF-8" in str(error)


def test_the_address_may_end_in_v1(server):
    result = runner.invoke(cli.app, ["chat", "--url", f"{server.url}/v1/", "--model", "m"], input="a\n/exit\nb\n")
    assert result.stdout == "you said a\n"
    assert server.bodies[0]["model"] == "m"
    assert server.paths == ["/v1/chat/completions"]


def test_tokens_and_times_of_each_answer(server):
    lines = [line for line in chat(server, "a").stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 1
    assert lines[0].startswith("[7 tokens in (4 cached), 3 out; first after ")
    assert lines[0].endswith("ended by length]")
    assert server.bodies[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_system_message(server):
    result = chat(server, "a", "/system be brief", "/system", "b", "/reset", "c", args=["--system", "be long"])
    assert [contents(body) for body in server.bodies] == [
        ["be long", "a"],
        ["be brief", "a", "you said a", "b"],
        ["be brief", "c"],
    ]
    assert result.stderr.count("system: be brief") == 2
    assert "system: none" in chat(server, "/system").stderr


def test_params(server):
    chat(
        server,
        "/params temperature=0.5",
        "/params seed = 3",
        "/params stop=end.",
        '/params logit_bias={"5": 1}',
        "/params top_p=NaN",
        "a",
        "/params temperature=",
        "b",
        args=["--max-tokens", "9"],
    )
    first, second = server.bodies
    assert (first["temperature"], first["seed"], first["stop"], first["max_tokens"]) == (0.5, 3, "end.", 9)
    assert (first["logit_bias"], first["top_p"]) == ({"5": 1}, "NaN")
    assert "temperature" not in second
    assert second["seed"] == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/params seed", "/params takes NAME=VALUE with a field of a chat request, not 'seed'"),
        ("/params stream=false", "/params takes NAME=VALUE with a field of a chat request"),
        ("/bogus", "unknown command /bogus"),
        ("/load /no/such/file", "No such file or directory: '/no/such/file'"),
        ("/save /no/such/folder/file", "No such file or directory: '/no/such/folder/file'"),
        ("/save", "Is a directory"),
        ("bad", "error: no such thing"),
    ],
)
def test_what_is_refused_is_one_line_and_changes_nothing(server, line, text):
    result = chat(server, line, "a")
    assert text in result.stderr
    assert result.stdout == "you said a\n"
    assert "temperature" not in server.bodies[-1]
    assert contents(server.bodies[-1]) == ["a"]


def test_save_and_load(server, tmp_path):
    path = tmp_path / "talk.json"
    chat(server, "a", f"/save {path}", args=["--system", "s"])
    saved = json.loads(path.read_text())
    assert saved["model"] == "fake<model>"
    assert saved["params"] == {}
    assert saved["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "you said a"},
    ]
    chat(server, "other", f"/load {path}", "b", args=["--system", "gone"])
    assert contents(server.bodies[-1]) == ["s", "a", "you said a", "b"]


@pytest.mark.parametrize("text", ["", "[]", '{"messages": 3}', '{"messages": [{"role": "user"}]}'])
def test_load_of_other_files(server, tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    result = chat(server, "a", f"/load {path}", "b")
    assert "is not a conversation saved by /save" in result.stderr
    assert contents(server.bodies[-1]) == ["a", "you said a", "b"]


def test_reasoning_is_shown_and_not_sent_back(server):
    result = chat(server, "think", "a")
    assert result.stdout == "hm, well\nyou said think\nyou said a\n"
    assert contents(server.bodies[1]) == ["think", "you said think", "a"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("broken", "no such kernel"),
        ("cut", "the answer broke off"),
        ("down", "being restarted"),
        ("page", "the server answered with status 502"),
    ],
)
def test_a_server_that_fails_ends_a_script(server, line, text):
    error = chat(server, line, "a").exception
    assert isinstance(error, EngineDeadError)
    assert text in str(error)


def test_key_from_the_environment(server):
    server.key = "sesame"
    error = chat(server, "a").exception
    assert isinstance(error, InvalidRequestError)
    assert "the API key is not valid" in str(error)
    result = chat(server, "a", env={"RAYLLM_API_KEY": "sesame"})
    assert result.stdout == "you said a\n"
    assert "sesame" not in result.stderr


def test_keys_of_other_services_stay_here(server):
    chat(server, "a")
    assert server.keys == ["Bearer none"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host", "nonsense"])
def test_no_server(url):
    error = runner.invoke(cli.app, ["chat", "--url", url], input="a\n").exception
    assert isinstance(error, EngineDeadError)
    assert f"no answer from {url}/v1" in str(error)


def test_a_server_without_models(server):
    server.models = []
    assert "lists no models" in str(chat(server, "a").exception)


# What a terminal changes


class Interrupted:
    """A client whose answers are interrupted by Ctrl-C. closed: whether the stream was, which ends the request."""

    base_url = "http://x/v1/"

    def __init__(self, *pieces):
        self.pieces, self.closed, self.requests = pieces, False, []
        self.chat = SimpleNamespace(completions=self)

    def create(self, **request):
        self.requests.append(request)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def __iter__(self):
        for piece in self.pieces:
            delta = SimpleNamespace(content=piece)
            yield SimpleNamespace(usage=None, choices=[SimpleNamespace(delta=delta, finish_reason=None)])
        raise KeyboardInterrupt


def test_ctrl_c_stops_the_answer_and_keeps_its_beginning(capsys):
    client = Interrupted("you ", "said")
    cli_chat.Chat(client, "m", {}).run(["a", "b"])
    assert client.closed
    assert capsys.readouterr().out == "you said\nyou said\n"
    assert [message["content"] for message in client.requests[1]["messages"]] == ["a", "you said", "b"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_dimmed_reasoning_and_no_control_characters(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    shown = cli_chat.Answer()
    for delta in ({"reasoning_content": "hm", "content": None}, {"content": "a\x1b[2J\r\tb\n"}):
        choice = SimpleNamespace(delta=SimpleNamespace(**delta), finish_reason=None)
        shown.add(SimpleNamespace(usage=None, choices=[choice]))
    shown.end()
    assert sys.stdout.getvalue() == "\x1b[2mhm\x1b[0m\na\ufffd[2J\ufffd\tb\n\n"
    assert shown.text == "a\x1b[2J\r\tb\n"


def typed(monkeypatch, *answers):
    """What input_lines yields for someone at a terminal; an answer is a line or an exception."""
    remaining = iter(answers)

    def read(_prompt):
        answer = next(remaining)
        if isinstance(answer, type):
            raise answer
        return answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    return cli_chat.input_lines()


@pytest.fixture
def state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_two_interrupts_leave_one_does_not(monkeypatch, state_folder):
    interrupts = ("a", KeyboardInterrupt, "b", KeyboardInterrupt, KeyboardInterrupt, "c")
    assert list(typed(monkeypatch, *interrupts)) == ["a", "b"]
    assert list(typed(monkeypatch, "a", EOFError, "b")) == ["a"]
    assert list(typed(monkeypatch, " a ", "", "b")) == ["a"]


def test_history_is_kept_and_private(monkeypatch, state_folder):
    readline = pytest.importorskip("readline")
    readline.clear_history()
    readline.add_history("what is a deque?")
    list(typed(monkeypatch, "a", ""))
    path = state_folder / "rayllm" / "chat_history"
    assert "what is a deque?" in path.read_text().replace("\\040", " ")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    readline.clear_history()
    list(typed(monkeypatch, ""))
    assert readline.get_history_item(1) == "what is a deque?"
    readline.clear_history()


def test_a_history_that_cannot_be_kept_is_said(monkeypatch, state_folder, capsys):
    pytest.importorskip("readline")
    (state_folder / "rayllm").write_text("a file where the folder should be")
    assert list(typed(monkeypatch, "a", "")) == ["a"]
    assert "the history cannot be kept" in capsys.readouterr().err


def test_someone_who_types_may_try_again(server, monkeypatch, state_folder, capsys):
    lines = typed(monkeypatch, "broken", "a", "")
    cli_chat.Chat(cli_chat.connect(server.url, None), None, {}).run(lines)
    printed = capsys.readouterr()
    assert "error: no such kernel" in printed.err
    assert printed.out.endswith("you said a\n")
    assert contents(server.bodies[1]) == ["a"]
