"""Flags are made from the option classes: every field is one, with its description and default."""

import inspect

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from rayllm.cli import main as cli
from rayllm.cli.options import config_flags, engine_config, length_range, make_app
from rayllm.config.options import EngineConfig, ServerConfig
from rayllm.errors import ConfigError

runner = CliRunner()


def test_every_option_is_a_flag_with_its_description():
    text = " ".join(runner.invoke(cli.app, ["launch", "--help"], terminal_width=200).output.split())
    for name, field in {**EngineConfig.model_fields, **ServerConfig.model_fields}.items():
        assert "--" + name.replace("_", "-") in text
        assert " ".join(field.description.split()) in text
    assert "--tp" in text
    assert "at which a block has room for states (default 16)" in text
    assert "<1|2|4|8>" in text
    assert "--no-enforce-eager" in text


class Drink(BaseModel):
    milk: bool = Field(default=False, description="With milk")
    sugar: int | None = Field(default=None, description="Lumps")


def test_a_command_gets_what_was_given_and_none_for_the_rest():
    seen = []
    app = make_app()

    @app.command()
    @config_flags(Drink, positional_model=False)
    def order(cups: int = 1, **options):
        seen.append((cups, options))

    for args in (["--cups", "2", "--milk"], ["--sugar", "3", "--no-milk"], ["--config", "f"]):
        assert runner.invoke(app, args).exit_code == 0
    assert seen == [
        (2, {"milk": True, "sugar": None, "config": None}),
        (1, {"milk": False, "sugar": 3, "config": None}),
        (1, {"milk": None, "sugar": None, "config": "f"}),
    ]
    assert list(inspect.signature(order).parameters) == ["cups", "config", "milk", "sugar"]
    assert isinstance(app, typer.Typer)


def test_defaults_of_a_command_are_below_the_file_and_the_flags(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("max_num_seqs: 7\nseed: 7\n")
    given = {"config": str(path), "seed": 3, "block_size": None}
    config = engine_config(given, max_num_seqs=5, max_num_batched_tokens=5)
    assert (config.seed, config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (3, 7, 5, 16)


def test_lengths():
    assert length_range("x", "7") == (7, 7)
    assert length_range("x", "3:9") == (3, 9)
    for text in ("9:3", "0", "a", "", "1:2:3"):
        with pytest.raises(ConfigError, match="x must be"):
            length_range("x", text)
