"""The table of what is served: in the README as in the code, each row with a checkpoint that parity tests compute.

`tests/models/test_models_parity.py` compares all kinds of `support.kinds` with transformers.
"""

from __future__ import annotations

from pathlib import Path

from support.kinds import CONFIGS

from rayllm.config.architectures import ARCHITECTURES
from rayllm.config.architectures.table import markdown_table

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_the_table():
    table = markdown_table()
    assert all(architecture.models for architecture in ARCHITECTURES.values())
    assert table in README.read_text(), f"README.md must have this table:\n{table}"


def test_every_architecture_has_a_kind():
    classes = {
        prefix + ending for prefix, _ in CONFIGS.values() for ending in ("ForCausalLM", "ForConditionalGeneration")
    }
    assert set(ARCHITECTURES) <= classes
