"""`rayllm chat` over a fake server: commands, files, what a stopped answer leaves, the key, figures, history."""

import io
import json
import os
import stat
import sys

import httpx
import pytest
from typer.testing import CliRunner

from rayllm.cli import chat as cli_chat
from rayllm.cli import input_lines as cli_input
from rayllm.cli import main as cli
from rayllm.errors import EngineDeadError

runner = CliRunner()


class Server:
    """Answers every message with "you said ..."; keeps the requests. key: what it asks for."""

    def __init__(self):
        self.requests = []
        self.key = None

    def __call__(self, request):
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": {"message": "the API key is not valid"}})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        self.requests.append(body)
        return self.answer(body["messages"][-1]["content"])

    def answer(self, last):
        deltas = [{"role": "assistant", "content": ""}, {"content": "you said "}, {"content": last}]
        if last == "think":
            deltas.insert(1, {"reasoning_content": "hm, "})
            deltas.insert(2, {"reasoning_content": "well"})
        chunks = [{"choices": [{"delta": delta}], "usage": usage(7, n)} for n, delta in enumerate(deltas)]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": usage(7, 3)})
        chunks.append({"choices": [], "usage": usage(7, 3)})
        if last == "broken":
            chunks[2] = {"error": {"message": "no such kernel"}}
        frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        if last == "stop":
            return httpx.Response(200, stream=Interrupted(frames[:2]))
        end = "" if last == "cut" else "data: [DONE]\n\n"
        return httpx.Response(200, text="".join(frames) + end)


class Interrupted(httpx.SyncByteStream):
    """Ctrl-C is pressed after some of the frames."""

    def __init__(self, frames):
        self.frames = frames

    def __iter__(self):
        yield from (frame.encode() for frame in self.frames)
        raise KeyboardInterrupt


def usage(prompt, completion):
    details = {"cached_tokens": 4}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


@pytest.fixture
def server(monkeypatch):
    server, client = Server(), httpx.Client
    monkeypatch.setattr(
        cli_chat.httpx, "Client", lambda **kwargs: client(**kwargs, transport=httpx.MockTransport(server))
    )
    monkeypatch.delenv("RAYLLM_API_KEY", raising=False)
    return server


def chat(*lines, args=()):
    return runner.invoke(cli.app, ["chat", *args], input="".join(line + "\n" for line in lines))


def contents(request):
    return [message["content"] for message in request["messages"]]


def test_standard_output_has_nothing_but_answers(server):
    result = chat("a", "/params", "/help", "b", "", "never")
    assert result.stdout == "you said a\nyou said b\n"
    assert contents(server.requests[1]) == ["a", "you said a", "b"]


def test_tokens_and_times_of_each_answer(server):
    lines = [line for line in chat("a").stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 1
    assert lines[0].startswith("[7 tokens in (4 cached), 3 out; first after ")
    assert lines[0].endswith("ended by length]")
    assert server.requests[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_system_message(server):
    result = chat("a", "/system be brief", "/system", "b", "/reset", "c", args=["--system", "be long"])
    assert [contents(request) for request in server.requests] == [
        ["be long", "a"],
        ["be brief", "a", "you said a", "b"],
        ["be brief", "c"],
    ]
    assert result.stderr.count("system: be brief") == 2


def test_params(server):
    chat("/params temperature=0.5", "/params seed = 3", "/params stop=end.", "a", "/params temperature=", "b")
    first, second = server.requests
    assert (first["temperature"], first["seed"], first["stop"]) == (0.5, 3, "end.")
    assert "temperature" not in second
    assert second["seed"] == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/params temperature=warm", "temperature must be a number, not 'warm'"),
        ("/params temperature=nan", "temperature must be a number, not 'nan'"),
        ("/params size=3", "/params takes NAME=VALUE with one of temperature"),
        ("/params seed", "/params takes NAME=VALUE"),
        ("/bogus", "unknown command /bogus"),
        ("/load /no/such/file", "'/no/such/file' cannot be read: No such file"),
        ("/save /no/such/folder/file", "cannot be written: No such file"),
        ("/save", "'' cannot be written"),
    ],
)
def test_bad_commands_are_one_line_and_change_nothing(server, line, text):
    result = chat(line, "a")
    assert text in result.stderr
    assert result.stdout == "you said a\n"
    assert server.requests[0]["temperature"] == 1.0


def test_save_and_load(server, tmp_path):
    path = tmp_path / "talk.json"
    chat("a", f"/save {path}", args=["--system", "s"])
    saved = json.loads(path.read_text())
    assert saved["model"] == "m"
    assert saved["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "you said a"},
    ]
    chat("other", f"/load {path}", "b", args=["--system", "gone"])
    assert contents(server.requests[-1]) == ["s", "a", "you said a", "b"]


@pytest.mark.parametrize("text", ["", "[]", '{"messages": 3}', '{"messages": [{"role": "user"}]}'])
def test_load_of_other_files(server, tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    result = chat("a", f"/load {path}", "b")
    assert "is not a conversation saved by /save" in result.stderr
    assert contents(server.requests[-1]) == ["a", "you said a", "b"]


def test_ctrl_c_stops_the_answer_and_keeps_its_beginning(server):
    result = chat("stop", "a")
    assert result.stdout == "you said \nyou said a\n"
    assert "; stopped]" in result.stderr
    assert contents(server.requests[1]) == ["stop", "you said ", "a"]


def test_reasoning_is_shown_and_not_sent_back(server, monkeypatch):
    result = chat("think", "a")
    assert result.stdout == "hm, well\nyou said think\nyou said a\n"
    assert contents(server.requests[1]) == ["think", "you said think", "a"]


def test_a_terminal_gets_dimmed_reasoning_and_no_control_characters(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    answer = cli_chat.Answer()
    answer.take({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    answer.take({"choices": [{"delta": {"content": "a\x1b[2J\r\tb\n"}}]})
    answer.end()
    assert sys.stdout.getvalue() == "\x1b[2mhm\n\x1b[0ma\ufffd[2J\ufffd\tb\n\x1b[0m\n"
    assert answer.text == "a\x1b[2J\r\tb\n"


@pytest.mark.parametrize(("line", "text"), [("broken", "no such kernel"), ("cut", "the answer broke off")])
def test_a_broken_answer_ends_a_script(server, line, text):
    error = chat(line, "a").exception
    assert isinstance(error, EngineDeadError)
    assert text in str(error)


def test_key_from_the_environment(server, monkeypatch):
    server.key = "sesame"
    assert "the API key is not valid" in str(chat("a").exception)
    monkeypatch.setenv("RAYLLM_API_KEY", "sesame")
    result = chat("a")
    assert result.stdout == "you said a\n"
    assert "sesame" not in result.stderr


# Input


class Typed(io.StringIO):
    def isatty(self):
        return True


def typed(monkeypatch, *answers):
    """What input_lines yields for someone at a terminal; an answer is a line or an exception."""
    remaining = iter(answers)

    def read(_prompt):
        answer = next(remaining)
        if isinstance(answer, type):
            raise answer
        return answer

    monkeypatch.setattr(sys, "stdin", Typed())
    monkeypatch.setattr("builtins.input", read)
    return list(cli_input.input_lines())


@pytest.fixture
def state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_two_interrupts_leave_one_does_not(monkeypatch, state_folder):
    assert typed(monkeypatch, "a", KeyboardInterrupt, "b", KeyboardInterrupt, KeyboardInterrupt, "c") == ["a", "b"]
    assert typed(monkeypatch, "a", EOFError, "b") == ["a"]
    assert typed(monkeypatch, " a ", "", "b") == ["a"]


def test_history_is_kept_and_private(monkeypatch, state_folder):
    readline = pytest.importorskip("readline")
    readline.clear_history()
    readline.add_history("what is a deque?")
    typed(monkeypatch, "")
    path = state_folder / "rayllm" / "chat_history"
    assert "what is a deque?" in path.read_text().replace("\\040", " ")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    readline.clear_history()
    typed(monkeypatch, "")
    assert readline.get_history_item(1) == "what is a deque?"
    readline.clear_history()


def test_a_history_that_cannot_be_kept_is_said(monkeypatch, state_folder, capsys):
    pytest.importorskip("readline")
    (state_folder / "rayllm").write_text("a file where the folder should be")
    assert typed(monkeypatch, "a", "") == ["a"]
    assert "the history cannot be kept" in capsys.readouterr().err


def test_someone_who_types_may_try_again(server, monkeypatch, state_folder, capsys):
    remaining = iter(["broken", "a", ""])
    monkeypatch.setattr(sys, "stdin", Typed())
    monkeypatch.setattr("builtins.input", lambda _prompt: next(remaining))
    cli_chat.Chat("http://x", None, None, None, 1.0).run()
    printed = capsys.readouterr()
    assert "error: no such kernel" in printed.err
    assert printed.out.endswith("you said a\n")
    assert contents(server.requests[1]) == ["a"]
