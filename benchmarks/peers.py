"""Figures of engines with where they come from: peers.yaml, which compare.py writes and table.py reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rayllm.cli.collect_env import gpus

FILE = Path(__file__).with_name("peers.yaml")
# Options that do not change the work: where weights come from, and how long a context may at most become.
SAME_WORK = ("load_format", "max_model_len")


class Figure(NamedTuple):
    """A measured value, such as 22,726 out tok/s."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Figure:
        """The figure of "22726 out tok/s"."""
        value, _, unit = text.partition(" ")
        return cls(float(value), unit)

    def __str__(self) -> str:
        return f"{self.value:.6g} {self.unit}"

    def ratio(self, other: Figure) -> float:
        """How many times as good as the other one this is: above 1 for more tokens a second, or for less time."""
        if self.unit != other.unit:
            raise ValueError(f"{self} and {other} are not of one kind")
        return self.value / other.value if self.unit.endswith("/s") else other.value / self.value


class Record(NamedTuple):
    """Figures of one engine, model and setting, measured together."""

    engine: str
    version: str
    software: dict[str, str]  # versions of what it runs on
    hardware: str  # as `hardware` tells it
    date: str  # year-month-day
    how: str  # how it was measured, in words
    model: str  # name of its folder
    options: dict[str, Any]  # of the engine, beside its defaults
    figures: dict[str, str]  # workload -> Figure as text


def read_records(path: Path = FILE) -> list[Record]:
    """All records of a file. Raises OSError."""
    return [Record(**record) for record in yaml.safe_load(path.read_text()) or []]


def add_records(path: Path, records: list[Record]) -> None:
    """Write records to the end of a file, which need not exist."""
    with path.open("a") as file:
        yaml.safe_dump([record._asdict() for record in records], file, sort_keys=False, width=120)


def find_figures(
    records: list[Record], engine: str, model: str, hardware: str, options: dict[str, Any]
) -> dict[str, tuple[Figure, Record]]:
    """The newest figure of each workload for an engine in one setting, with the record that has it."""
    found = {}
    wanted = (engine, model, hardware, work_options(options))
    for record in sorted(records, key=lambda each: each.date):
        if (record.engine, record.model, record.hardware, work_options(record.options)) == wanted:
            found |= {name: (Figure.parse(text), record) for name, text in record.figures.items()}
    return found


def work_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that figures depend on, without one GPU as their number."""
    defaults = {"tensor_parallel_size": 1}
    return {name: value for name, value in (defaults | options).items() if name not in SAME_WORK}


def hardware() -> str:
    """What this machine has: the names of its GPUs, or the number of its cores."""
    names = {line.split(",")[0] for line in gpus()}
    return ", ".join(sorted(names)) or f"{os.cpu_count()} cores, no GPU"


def gpu_driver() -> dict[str, str]:
    """The version of the GPUs' driver, if there is one, under its name."""
    fields = [line.split(", ") for line in gpus()]
    return {"driver": fields[0][2]} if fields and len(fields[0]) > 2 else {}
