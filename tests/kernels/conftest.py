"""Kernel tests run on a GPU where there is one, and in Triton's interpreter on the CPU otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rayllm_kernels.decode_work import DecodeSchedule
from rayllm_kernels.kv_format import FP8_MAX, KVScales

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Triton reads this when a kernel is decorated, its own helpers included, so it must be set before the first import.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tests/kernels: set TRITON_INTERPRET=1 for the whole run")
    os.environ["TRITON_INTERPRET"] = "1"

# Bounds on |actual - expected| / |expected|, Frobenius norms. Both sides round once to the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# The interpreter truncates to bf16 where a GPU rounds to nearest.
KERNEL_TOLERANCE = TOLERANCE if ON_GPU else TOLERANCE | {torch.bfloat16: 2e-2}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """NaN if either side holds one, so that no comparison passes."""
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm().clamp_min(1e-30))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The Triton launchers themselves, not the dispatch."""
    from rayllm_kernels import triton_kernels

    return triton_kernels


def check_close(actual: Tensor, expected: Tensor, tolerance: dict[torch.dtype, float]) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert relative_error(actual, expected) < tolerance[expected.dtype]


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """A reference against what it must be."""
    return lambda actual, expected: check_close(actual, expected, TOLERANCE)


@pytest.fixture
def assert_kernel_close() -> Callable[[Tensor, Tensor], None]:
    """A kernel against its reference."""
    return lambda actual, expected: check_close(actual, expected, KERNEL_TOLERANCE)


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    """Seeded normal numbers; the same call sequence gives the same numbers on every device."""
    generator = torch.Generator().manual_seed(1234)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw


@dataclass
class PagedCase:
    """Queries and a paged context for either attention, with poison wherever nothing may be read."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    scales: KVScales | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def decode(self, module: ModuleType, **options: object) -> Tensor:
        return module.paged_decode_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            scale=self.scale,
            kv_scales=self.scales,
            **options,
        )

    def schedule(self, module: ModuleType, **options: object) -> DecodeSchedule:
        return module.decode_schedule(self.q, self.k_cache, self.seq_lens, **options)

    def prefill(self, module: ModuleType, **options: object) -> Tensor:
        return module.paged_prefill_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            self.max_query_len,
            scale=self.scale,
            kv_scales=self.scales,
            **options,
        )


@pytest.fixture
def paged_case(randn: Callable[..., Tensor], device: torch.device) -> Callable[..., PagedCase]:
    """Builds a PagedCase: layer 1 of a block-major pool, shuffled blocks, NaN in every slot no sequence owns.

    cache_dtype: None is dtype; an fp8 one comes with scales from 0.5 to 2.
    """

    def build(
        seq_lens: list[int],
        query_lens: list[int] | None = None,
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        spread: float = 1.0,
        cache_dtype: torch.dtype | None = None,
    ) -> PagedCase:
        query_heads, kv_heads = heads
        query_lens = [1] * len(seq_lens) if query_lens is None else query_lens
        blocks = [-(-length // block_size) for length in seq_lens]
        pool = randn(sum(blocks) + 3, 2, 2, kv_heads, block_size, head_dim, dtype=dtype)
        order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(7))
        # Two entries more than the longest context needs; what is past a context is no valid block id.
        tables = torch.full((len(seq_lens), max(blocks, default=0) + 2), 1 << 30, dtype=torch.int32)
        owned = torch.zeros(pool.shape[0], block_size, dtype=torch.bool)
        for row, (length, count) in enumerate(zip(seq_lens, blocks, strict=True)):
            taken, order = order[:count], order[count:]
            tables[row, :count] = taken.to(torch.int32)
            owned[taken] = (torch.arange(count * block_size) < length).view(count, block_size)
        pool.masked_fill_(~owned[:, None, None, None, :, None].to(device), float("nan"))
        tokens = sum(query_lens)
        # The queries are a strided slice, as of a fused qkv tensor.
        qkv = randn(tokens, query_heads + 2 * kv_heads, head_dim, dtype=dtype) * spread
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
        scales = None
        if cache_dtype in FP8_MAX:
            pool = pool.to(cache_dtype)
            scales = KVScales(*torch.linspace(0.5, 2.0, 2 * kv_heads, device=device).view(2, kv_heads))
        return PagedCase(
            qkv[:, :query_heads],
            pool[:, 1, 0],
            pool[:, 1, 1],
            tables.to(device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            starts,
            max(query_lens, default=0),
            scales,
        )

    return build


@pytest.fixture
def run_compiler():
    """(script, environment variables) -> what the script prints, in a process that compiles and does not interpret."""

    def run(script: str, **variables: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-c", script]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
