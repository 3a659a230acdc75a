"""`rayllm generate` on the bundled model: prompts, several completions, JSON, standard input."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rayllm.cli import main as cli

runner = CliRunner()
OPTIONS = ["--device", "cpu", "--temperature", "0", "--max-tokens", "6", "--num-gpu-blocks-override", "32"]
SMALL = ["--max-model-len", "128"]


@pytest.mark.parametrize("args", [["The for statement"], []])
def test_one_prompt_is_completed_by_its_text_alone(args):
    result = runner.invoke(cli.app, ["generate", *args, *OPTIONS, *SMALL], input="The for statement")
    assert result.exit_code == 0, result.output
    assert result.stdout == "\n*******************\n\nThe\n"


@pytest.mark.parametrize(
    ("text", "prompt"), [("A list", "A list"), ("A list\n", "A list"), ("A list\n\n", "A list\n"), ("a\r\n b", "a\n b")]
)
def test_standard_input_without_its_last_newline(monkeypatch, text, prompt):
    asked = []

    class Engine:
        def __init__(self, **_options): ...

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def generate(self, prompts, _params):
            asked.extend(prompts)
            return [SimpleNamespace(outputs=[]) for _ in prompts]

    monkeypatch.setattr("rayllm.llm.LLM", Engine)
    result = runner.invoke(cli.app, ["generate"], input=text)
    assert result.exit_code == 0, result.output
    assert asked == [prompt]


def test_several_prompts_and_completions():
    sampled = ["--temperature", "1", "--n", "2", "--sampling-seed", "3"]
    result = runner.invoke(cli.app, ["generate", "a list", "a set", *OPTIONS, *SMALL, *sampled, "--json"])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["a list", "a list", "a set", "a set"]
    assert {line["finish_reason"] for line in lines} == {"length"}
    plain = runner.invoke(cli.app, ["generate", "a list", "a set", *OPTIONS, *SMALL, *sampled]).stdout
    assert plain == "".join(f"> {line['prompt']}\n{line['text']}\n\n" for line in lines)


def test_a_file_of_several_models_is_refused(tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text("models: [{model: a}, {model: b}]")
    result = runner.invoke(cli.app, ["generate", "hi", "--config", str(path)])
    assert "lists several models" in str(result.exception)
