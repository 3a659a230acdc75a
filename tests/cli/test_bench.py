"""`rayllm bench`: its commands are the scripts of benchmarks/, with all of their flags."""

import pytest
from typer.testing import CliRunner

from rayllm.cli import main as cli

runner = CliRunner()


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("offline", ["--workload", "--num-prompts", "--tp", "--json", "--max-num-seqs"]),
        ("serve", ["--rate", "--concurrency", "--api-key", "--input-len", "--out"]),
        ("kernels", ["--json", "NAME"]),
    ],
)
def test_help_is_that_of_the_script(command, flags):
    result = runner.invoke(cli.app, ["bench", command, "--help"], terminal_width=200)
    assert result.exit_code == 0, result.output
    assert f"bench {command} [OPTIONS]" in result.stdout
    assert all(flag in result.stdout for flag in flags)


def test_flags_reach_the_script():
    error = runner.invoke(cli.app, ["bench", "offline", "--num-prompts", "2", "--output-len", "0"]).exception
    assert "output_len must be at least 1" in str(error)


def test_lengths_without_a_number_of_prompts_are_refused():
    for given in (["--input-len", "4096"], ["--workload", "nano256", "--output-len", "16"]):
        error = runner.invoke(cli.app, ["bench", "offline", *given]).exception
        assert "--input-len and --output-len need --num-prompts" in str(error)


def test_the_commands_are_listed_with_what_they_measure():
    text = runner.invoke(cli.app, ["bench", "--help"]).stdout
    for line in ("offline  Measure the engine", "serve    Measure a running server", "kernels  Measure the kernels"):
        assert line in text
