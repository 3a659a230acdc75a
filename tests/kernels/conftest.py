"""Kernel tests run on a GPU where there is one, and in Triton's interpreter on the CPU otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.few_cases import few_of
from torch import Tensor

from rayllm_kernels import dispatch, ops
from rayllm_kernels.cache.kv_cache import FP8_MAX
from rayllm_kernels.ops import AdapterSlots, Contexts, DecodeSchedule, KVCache, KVScales, Scoring, latent_cache

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Triton reads this when a kernel is decorated, its own helpers included, so it must be set before the first import.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tests/kernels: set TRITON_INTERPRET=1 for the whole run")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The interpreter is slow: there, each choice once instead of all combinations, unless with --full-matrix."""
    if ON_GPU or config.getoption("--full-matrix"):
        return
    tests = defaultdict(list)  # name -> cases
    for item in items:
        if hasattr(item, "callspec") and item.path.is_relative_to(Path(__file__).parent):
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = {case for cases in tests.values() for case in set(cases).difference(few_of(cases))}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


class Implementation:
    """The ops by one implementation, on whatever device their tensors are: `kernels.rms_norm(x, weight, eps)`."""

    def __init__(self, *, triton: bool):
        self._triton = triton

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with dispatch.forced(triton=self._triton):
                return op(*arguments, **options)

        return call


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """In the interpreter new tensors hold NaN: what a kernel leaves unwritten is not what the last test left there."""
    torch.use_deterministic_algorithms(not ON_GPU, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def kernels() -> Implementation:
    """The Triton kernels, on a CPU in the interpreter."""
    return Implementation(triton=True)


@pytest.fixture(scope="session")
def reference() -> Implementation:
    return Implementation(triton=False)


@pytest.fixture(params=["reference", "triton"])
def each(request: pytest.FixtureRequest) -> Implementation:
    """Both implementations, one after the other."""
    return Implementation(triton=request.param == "triton")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    """Seeded normal numbers; the same call sequence gives the same numbers on every device."""
    generator = torch.Generator().manual_seed(1234)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw


@pytest.fixture
def scaled(randn: Callable[..., Tensor]) -> Callable[[int, int, torch.dtype], Tensor]:
    """(outputs, inputs, dtype) -> weights that keep the size of what they multiply."""
    return lambda outputs, inputs, dtype: randn(outputs, inputs).mul_(inputs**-0.5).to(dtype)


@dataclass
class PagedCase:
    """Queries and a paged context for either attention, with poison wherever nothing may be read."""

    q: Tensor
    cache: KVCache
    contexts: Contexts
    query_start_loc: Tensor
    max_query_len: int

    @property
    def terms(self) -> int:
        """Products of the longest sum, for `check_close`: a score has one an entry of a key, a result one a key.

        What is off in a score is a factor of its key's weight, so scores of wide keys matter in short contexts.
        """
        return max(self.cache.k.shape[3], *self.contexts.seq_lens.tolist())

    def scoring(self, **options: Any) -> Scoring:
        """options: fields of `Scoring` but the scale."""
        return Scoring(self.q.shape[-1] ** -0.5, **options)

    def decode(
        self, module: Any, schedule: DecodeSchedule | None = None, out: Tensor | None = None, **options: Any
    ) -> Tensor:
        scoring = self.scoring(**options)
        return module.paged_decode_attention(self.q, self.cache, self.contexts, scoring, schedule=schedule, out=out)

    def schedule(self, module: Any, num_ranges: int | None = None, **options: Any) -> DecodeSchedule:
        return module.decode_schedule(self.q, self.cache, self.contexts, self.scoring(**options), num_ranges=num_ranges)

    def decode_in_ranges(
        self, module: Any, num_ranges: int | None, out: Tensor | None = None, **options: Any
    ) -> Tensor:
        schedule = self.schedule(module, num_ranges=num_ranges, sliding_window=options.get("sliding_window"))
        return self.decode(module, schedule, out, **options)

    def prefill(self, module: Any, out: Tensor | None = None, deterministic: bool = False, **options: Any) -> Tensor:
        chunks = self.query_start_loc, self.max_query_len
        return module.paged_prefill_attention(
            self.q, self.cache, self.contexts, self.scoring(**options), *chunks, out=out, deterministic=deterministic
        )


@pytest.fixture
def paged_case(randn: Callable[..., Tensor], device: torch.device) -> Callable[..., PagedCase]:
    """Builds a PagedCase: layer 1 of a block-major pool, shuffled blocks, NaN in every slot no sequence owns.

    cache_dtype: None is dtype; an fp8 one comes with scales from 0.5 to 2. value_dim: of a cache of latents.
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
        value_dim: int | None = None,
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
        # The queries are a strided slice, as of a fused qkv tensor.
        qkv = randn(sum(query_lens), query_heads + 2 * kv_heads, head_dim, dtype=dtype) * spread
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
        scales = None
        if cache_dtype in FP8_MAX:
            pool = pool.to(cache_dtype)
            scales = KVScales(*torch.linspace(0.5, 2.0, 2 * kv_heads, device=device).view(2, kv_heads))
        keys, values = pool[:, 1, 0], pool[:, 1, 1]
        return PagedCase(
            qkv[:, :query_heads],
            KVCache(keys, values, scales) if value_dim is None else latent_cache(keys, value_dim),
            Contexts(tables.to(device), torch.tensor(seq_lens, dtype=torch.int32, device=device)),
            starts,
            max(query_lens, default=0),
        )

    return build


@pytest.fixture
def sinks(randn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of so many heads: one far above every score, one far below, the others between."""

    def draw(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = 3.0 * randn(heads)
        drawn[:2] = torch.tensor([200.0, -200.0])[:heads]
        return drawn.to(dtype)

    return draw


@pytest.fixture
def places() -> int:
    """At multiples of so many rows a product's row is the same to the bit: on a GPU at any place.

    The interpreter's products are NumPy's. On some CPUs the order of their sums follows a row's place in its tile,
    which is 16 rows high.
    """
    return 1 if ON_GPU else 16


@pytest.fixture
def repeated(device: torch.device) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Calls a function and returns its result.

    On a GPU it calls it ten times more, with nothing of its arguments in the L2 cache, and asserts that the bits are
    the same: kernels that read too early, or too late, differ when memory is slow.
    """
    times, others = (10, torch.zeros(64 << 20, dtype=torch.int32, device=device)) if ON_GPU else (0, None)

    def check(function: Callable[[], Tensor]) -> Tensor:
        first = function()
        for _ in range(times):
            others.add_(1)
            assert torch.equal(function(), first)
        return first

    return check


@pytest.fixture
def assert_rows_independent() -> Callable[..., None]:
    """(function, tensors): rows of its results are the same to the bit in batches of any size, at any place.

    places: of these, those that are multiples of it.
    """

    def check(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, places: int = 1) -> None:
        whole = function(*tensors)
        count = tensors[0].shape[0]
        for size in (1, 2, 3, 7, 16, 17, 64, 128, 129, 200, count):
            for first in sorted({0, places, (count - size) // places * places}):
                if first + size <= count:
                    part = function(*(tensor[first : first + size] for tensor in tensors))
                    for ours, theirs in zip(part, whole, strict=True):
                        assert torch.equal(ours, theirs[first : first + size]), (first, size)

    return check


@pytest.fixture
def alibi_slopes(device: torch.device) -> Callable[[int], Tensor]:
    """Slopes of so many heads."""
    return lambda heads: 2.0 ** -torch.arange(1.0, heads + 1, device=device)


# A driver that knows for what to compile; whoever launches a kernel finds no launcher. Kernels then take CPU tensors.
COMPILER_ONLY = """
import triton
from triton.backends.compiler import GPUTarget

class Driver:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", CAPABILITY, 32)

triton.runtime.driver.set_active(Driver())
import torch
from rayllm_kernels import dispatch, ops
from rayllm_kernels.ops import *
"""


@pytest.fixture
def run_compiler() -> Callable[..., str]:
    """(script, compute capability, seconds it may take, environment variables) -> what the script prints.

    In a process that compiles and does not interpret.
    """

    def run(script: str, capability: tuple[int, int] = (9, 0), timeout: float = 300, **variables: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        start = COMPILER_ONLY.replace("CAPABILITY", str(10 * capability[0] + capability[1]))
        command = [sys.executable, "-c", start + script]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def make_slots(randn, device):
    """(inputs, rows, ranks by slot and projection, largest rank, dtype); beyond a rank is NaN in A, 1e4 in B."""

    def make(inputs: int, rows: tuple[int, ...], ranks: list[list[int]], most: int, dtype: torch.dtype) -> AdapterSlots:
        a = (randn(len(ranks), len(rows), most, inputs) * inputs**-0.5).to(dtype)
        b = randn(sum(rows), len(ranks), most, dtype=dtype)
        for slot, own in enumerate(ranks):
            first = 0
            for number, (rank, width) in enumerate(zip(own, rows, strict=True)):
                a[slot, number, rank:] = float("nan")
                b[first : first + width, slot, rank:] = 1e4
                first += width
        return AdapterSlots(a, b, torch.tensor(ranks, dtype=torch.int32, device=device), rows)

    return make
