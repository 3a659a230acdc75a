"""The agent in docs/chat.md, as it stands there, with a model that calls its tool."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path

import openai
from starlette.testclient import TestClient
from support.chat import Played

PAGE = Path(__file__).parents[3] / "docs" / "chat.md"
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"name": "str.join"}}\n</tool_call>'


def test_the_documented_agent(monkeypatch):
    played = Played(CALL, "It joins strings.")
    with TestClient(played.app) as web:
        monkeypatch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=web))
        (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program.replace('"tiny-pydoc"', '"org/fake"'), PAGE, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == "It joins strings.\n"
    first, second = played.engine.prompts
    assert '"name": "lookup"' in first and "What does str.join do?" in first
    assert second.index('"str.join"') < second.index("Concatenate any number of strings.\n</tool_response>")
