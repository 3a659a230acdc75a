"""sweep_tiles.py without a GPU: what it would time, that its calls are the kernels', and what it makes of times."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import sweep_tiles as sweep
from typer.testing import CliRunner

from rayllm.errors import ConfigError
from rayllm_kernels.linear.plans import Tiles


@pytest.mark.parametrize(("shapes", "option"), [(sweep.SWEPT, []), (sweep.OTHERS, ["--others"])])
def test_a_dry_run_names_shapes_and_candidates_that_fit(shapes, option):
    result = CliRunner().invoke(sweep.app, ["--dry-run", *option])
    assert result.exit_code == 0, result.exception
    for family, make in sweep.FAMILIES.items():
        products = list(make(family, sweep.H200, shapes))
        assert all(f"{product.name}: {len(product.candidates)} candidates" in result.stdout for product in products)
        assert all(4 <= len(product.candidates) <= 64 for product in products), family
        assert len({product.name for product in products}) == len(products)
        # What one process after the other would compile for minutes.
        kernels = {(product.branch, choice) for product in products for choice in product.candidates}
        assert len(kernels) < 500, (family, len(kernels))
    assert len(CliRunner().invoke(sweep.app, ["int4", "--dry-run", "--match", "16 x ", *option]).stdout) < len(
        result.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "text"), [(["int4"], "needs a GPU"), (["int5"], "no family is called 'int5'; there are experts-fp8")]
)
def test_what_cannot_be_swept_is_said(monkeypatch, arguments, text):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = CliRunner().invoke(sweep.app, arguments).exception
    assert isinstance(error, ConfigError)
    assert text in str(error)


QUICK = ["experts-fp8", "int4", "fp8-blocks"]  # families
INTERPRETED = """
import sys
import torch
import kernel_times as bench
import sweep_tiles as sweep
from rayllm_kernels import dispatch
from rayllm_kernels.linear.plans import HopperTile

bench.ROTATED_BYTES, bench.ROUTINGS = 1, 2
sweep.DENSE_TOKENS, sweep.EXPERTS_TOKENS = [16, 70], [1, 9]
one_token = [(48, 256, True, True), (96, 256, False, False)]
small = sweep.Shapes([(96, 128)], one_token, {("small", 1): bench.Mixture(128, 128, 4, 2)})
with dispatch.forced(triton=True):
    for family in sys.argv[1:]:
        seen = set()
        for product in sweep.FAMILIES[family](family, sweep.H200, small):
            if product.branch in seen:
                continue
            seen.add(product.branch)
            assert product.moved > 0 and product.flops > 0
            calls = product.operands("cpu")
            # The kernel of Hopper's plans is Gluon, which has no interpreter.
            choices = [c for c in (product.today, *product.candidates) if not isinstance(c[0], HopperTile)]
            today, last = (sweep.numbers(calls(choice)[0]()) for choice in (choices[0], choices[-1]))
            assert today.shape == last.shape, product.name
            # In the interpreter products of bf16 are no numbers.
            if product.rate == bench.FP8_FLOPS_PER_SECOND and "down" not in product.branch:
                error = (today - last).square().mean().sqrt() / today.square().mean().sqrt()
                assert error < sweep.CLOSE, (product.name, error)
        print(family, len(seen))
"""


def test_candidates_are_handed_to_the_kernels(full_matrix):
    """Of every branch, today's tile and the last candidate, on small shapes in Triton's interpreter.

    Of all families with --full-matrix.
    """
    families = list(sweep.FAMILIES) if full_matrix else QUICK
    paths = [os.path.dirname(sweep.__file__), *filter(None, sys.path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", INTERPRETED, *families]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == families


ONE, TWO, THREE = (Tiles(16, outputs, 128, 4, 3, True) for outputs in (16, 32, 64))


def product(shape, rows=16, branch="down, 16 rows"):
    return sweep.Product("experts-fp8", branch, shape, ONE, [TWO, THREE], None, 4.3e6, 0.0, 1.0, rows)


def timings(of, *times):
    return [sweep.Timing(of, choice, us) for choice, us in zip((ONE, TWO, THREE), times, strict=True)]


def test_the_best_tile_is_that_of_all_shapes():
    """Not the best of one of them, nor one that did not run everywhere."""
    found = timings(product("a"), 4.0, 1.0, 2.0) + timings(product("b"), 4.0, None, 2.0)
    assert sweep.best_of_branch(found) == (THREE, [2.0, 2.0])
    found = timings(product("a"), 4.0, 1.0, 3.0) + timings(product("b"), None, 3.5, 3.0)
    best, gains = sweep.best_of_branch(found)
    assert (best, gains[0]) == (TWO, 4.0)
    assert math.isinf(gains[1])
    assert sweep.best_of_branch(timings(product("a"), None, None, None)) is None
    line = sweep.report(timings(product("a"), 2.0, 1.25, None))
    assert line == (
        "experts-fp8 down, 16 rows, a: today Tiles(16, 16, 128, 4, 3, True) 2.0 us (0.50 of the limit, 2.15 TB/s); "
        "best Tiles(16, 32, 128, 4, 3, True) 1.2 us (0.80, 3.44 TB/s)"
    )


def test_lines_for_the_plans():
    found = timings(product("a"), 4.0, 1.0, 2.0) + timings(product("b"), 4.0, 4.0, 2.5)
    found += timings(product("a", 16, "gate and up, 16 rows"), 1.0, 2.0, 3.0)
    found += timings(product("a", 32, "down, 32 rows"), 5.0, 6.0, 7.0)
    found += timings(product("a", 32, "gate and up, 32 rows"), 5.0, 6.0, 7.0)
    lines = list(sweep.lines_for_plans(found))
    assert lines[:2] == [
        "# experts-fp8 down, 16 rows, now Tiles(16, 16, 128, 4, 3, True): 2.00 times as fast over 2 shapes, "
        "1.00 at least",
        "return Tiles(16, 32, 128, 4, 3, True)",
    ]
    assert lines[-2:] == [
        "# experts-fp8: today's tiles as fast as the best of each shape: 0.25 at worst, 2 of 5 under 0.95",
        "# experts-fp8 a, both products: 16 rows 2.0 us, 32 rows 10.0 us",
    ]
    assert sweep.text(Tiles(64, 128, 128, 8, 4, False, slices=4, copied=True)) == (
        "Tiles(64, 128, 128, 8, 4, False, slices=4, copied=True)"
    )
