"""The cases of kernel_times.py, small and on the CPU: their calls run, and their floors are what is claimed."""

from __future__ import annotations

import kernel_times as bench
import pytest
import torch
from typer.testing import CliRunner

from rayllm.errors import ConfigError

MIXTURE = bench.Mixture(96, 64, 4, 2)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "ROTATED_BYTES", 1)
    for name, value in {"HIDDEN": 64, "INTERMEDIATE": 32, "VOCAB_SIZE": 200, "LATENT_SIZES": (16, 8, 12, 20)}.items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.parametrize(
    "case",
    [
        lambda: bench.decode("", [5, 40], 4, 2, 16),
        lambda: bench.decode("", [5, 40], 4, 2, 16, torch.float8_e4m3fn),
        lambda: bench.decode("", [5, 40], 4, 1, 24, value_dim=16),
        lambda: bench.prefill("", 2, 9, 20),
        lambda: bench.prefill("", 2, 9, 20, torch.float8_e5m2),
        lambda: bench.latent_prefill("", 9, 20, 2, expanded=False),
        lambda: bench.latent_prefill("", 9, 20, 2, expanded=True),
        lambda: bench.add_norm("", 3),
        lambda: bench.silu("", 3),
        lambda: bench.norm_rope_cache("", 3),
        lambda: bench.norm_rope_cache("", 3, torch.float8_e4m3fn),
        lambda: bench.linear("", 3, 16, 24),
        lambda: bench.linear_fp8("", 3, 64, 24, 1, None, wide=False),
        lambda: bench.linear_fp8("", 3, 64, 24, 8, 32, wide=True),
        lambda: bench.linear_fp8("", 1, 64, 24, 8, 32, wide=False),
        lambda: bench.copy("", 64),
        lambda: bench.linear_int4("", 3, 64, 24, 32, symmetric=False),
        lambda: bench.experts("", 3, MIXTURE, bench.EXPERTS_FORMATS["bf16"]),
        lambda: bench.experts("", 3, MIXTURE, bench.EXPERTS_FORMATS["fp8 rows"]),
        lambda: bench.experts("", 3, MIXTURE, bench.EXPERTS_FORMATS["fp8 weights"]),
        lambda: bench.experts("", 3, MIXTURE, bench.EXPERTS_FORMATS["int4 g32"]),
        lambda: bench.experts("", 3, MIXTURE, bench.EXPERTS_FORMATS["mxfp4"]),
        lambda: bench.rounding("", 3, 32),
        lambda: bench.silu_fp8("", 3, None),
        lambda: bench.gumbel("", 3),
    ],
)
def test_every_kind_of_case_runs(case):
    made = case()
    assert len(made.calls) >= 2
    for call in made.calls[:2]:
        call()
    assert made.floor_us() > 0


def test_floors():
    tokens, kv_heads, head_dim = 45, 2, 16
    q_and_out = 2 * 2 * 4 * 16 * 2
    decode = bench.decode("", [5, 40], 4, kv_heads, head_dim)
    assert decode.bytes == tokens * kv_heads * head_dim * 2 * 2 + q_and_out
    assert decode.floor_us() == decode.bytes / 4.3e12 * 1e6
    small = bench.decode("", [5, 40], 4, kv_heads, head_dim, torch.float8_e5m2)
    assert small.bytes == tokens * kv_heads * head_dim * 2 + q_and_out
    latents = bench.decode("", [5, 40], 4, 1, 24, value_dim=16)
    assert latents.bytes == tokens * 24 * 2 + 2 * 4 * (24 + 16) * 2
    assert latents.flops == 2 * tokens * 4 * (24 + 16)
    write, small_write = (bench.norm_rope_cache("", 3, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    assert write.bytes - small_write.bytes == 3 * 2 * bench.KV_HEADS * bench.HEAD_DIM
    product = bench.linear("", 3000, 16, 24)
    assert product.flops == 2 * 3000 * 16 * 24
    fp8, int4 = (
        bench.linear_fp8("", 1, 64, 24, 1, None, wide=False),
        bench.linear_int4("", 1, 64, 24, 32, symmetric=True),
    )
    assert fp8.bytes == 64 * 24 + 4 * 24 + 2 * 64 + 2 * 24
    one, of_tokens = 3 * 96 * 64, 2 * 2 * 96  # numbers of an expert; x and y of a token
    plain, rows = (bench.experts("", 1, MIXTURE, bench.EXPERTS_FORMATS[each]) for each in ("bf16", "fp8 rows"))
    assert plain.bytes == 2 * (2 * one) + of_tokens  # a token goes through two
    assert plain.flops == rows.flops == 2 * (2 * one)
    assert rows.bytes == 2 * (one + 4 * (2 * 64 + 96)) + of_tokens
    mxfp4 = bench.experts("", 300, MIXTURE, bench.EXPERTS_FORMATS["mxfp4"])
    # Groups of 32 inputs have a byte of exponent, and 96 inputs are filled up to two halves of two groups.
    assert mxfp4.bytes == 4 * (128 * (64 + 3) + 96 * (32 + 2)) + 300 * of_tokens
    assert int4.bytes == 64 * 24 // 2 + 4 * 2 * 24 + 2 * (64 + 24)


@pytest.mark.parametrize(
    ("name", "text"),
    [("decode", "needs a GPU"), ("nothing", "no kernel case begins with 'nothing'; they begin with decode")],
)
def test_what_cannot_be_measured_is_said(monkeypatch, name, text):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = CliRunner().invoke(bench.app, [name]).exception
    assert isinstance(error, ConfigError)
    assert text in str(error)


def test_names_are_unique_and_made_on_demand():
    names = list(bench.cases())
    assert len(names) > 60
    assert {name.split()[0] for name in names} >= {"decode", "prefill", "linear", "draw"}
