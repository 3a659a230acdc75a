"""Adapters inside the Hopper projection kernel: every tile, mixed slots and ranks, replays; and what is shrunk."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.linear import plans, shrink_kernel
from rayllm_kernels.linear.plans import HOPPER_TILES, WIDE, hopper_takes_adapters
from rayllm_kernels.lora.lora import TokenAdapters

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# tokens, inputs, rows of each projection, ranks of each slot and projection, largest rank
CASES = [
    (3, 40, (72,), [[16]], 16),
    (8, 4096, (256,), [[16]] * 8, 16),
    (20, 520, (1000, 40), [[16, 4], [0, 16], [16, 16], [0, 0]], 16),
    (61, 4096, (1024, 256, 256), [[16, 8, 16]] * 8, 16),
    (128, 2056, (512, 512), [[40, 3], [0, 17], [8, 40]] * 4, 40),
    (100, 1024, (592, 592), [[24, 24]], 24),
    (33, 1032, (136, 8, 8, 400), [[4, 8, 8, 8], [1, 0, 2, 3]], 8),
    (2, 1496, (640,), [[64], [33]], 64),  # one slot is absent
    (2, 264, (600, 40), [[16, 5], [9, 0], [16, 16]], 16),  # and here, beside the other in its columns
]


@pytest.fixture
def adapted(make_slots, device):
    """(tokens, inputs, rows, ranks, largest rank, dtype) -> those of `make_slots`, of tokens in turn, of none too."""

    def make(
        tokens: int, inputs: int, rows: tuple[int, ...], ranks: list[list[int]], most: int, dtype: torch.dtype = DTYPE
    ) -> TokenAdapters:
        slots = torch.arange(tokens, device=device, dtype=torch.int32) % (len(ranks) + 1) - 1
        return TokenAdapters(slots, make_slots(inputs, rows, ranks, most, dtype))

    return make


def shrunk_of(x: torch.Tensor, adapters: TokenAdapters) -> torch.Tensor:
    """u [P, T, S, R] in float64, rounded as x is."""
    slots, (a, _b, ranks, _rows) = adapters
    u = x.new_zeros(a.shape[1], x.shape[0], a.shape[0], a.shape[2], dtype=torch.float64)
    for slot in range(a.shape[0]):
        tokens = (slots == slot).nonzero()[:, 0]
        for number, rank in enumerate(ranks[slot].tolist()):
            shrunk = x[tokens].double() @ a[slot, number, :rank].double().t()
            u[number, tokens, slot, :rank] = shrunk.to(x.dtype).double()
    return u


def columns_of(adapters: TokenAdapters) -> int:
    """The groups of 64 columns of u that are not zero, a bit each."""
    slots, (a, _b, ranks, _rows) = adapters
    groups = set()
    for slot in slots.unique().tolist():
        if slot >= 0:
            groups |= {(slot * a.shape[2] + column) // 64 for column in range(int(ranks[slot].max()))}
    return sum(1 << group for group in groups)


def expected_of(x: torch.Tensor, weight: torch.Tensor, adapters: TokenAdapters, gated: bool) -> torch.Tensor:
    """In float64, but for what is shrunk, which is rounded."""
    u, (_a, b, _ranks, rows) = shrunk_of(x, adapters), adapters.weights
    total, first = x.double() @ weight.double().t(), 0
    for number, width in enumerate(rows):
        of_rows = b[first : first + width].double().flatten(1)
        total[:, first : first + width] += u[number].flatten(1) @ of_rows.t()
        first += width
    if gated:
        gate, up = total.chunk(2, 1)
        total = torch.nn.functional.silu(gate) * up
    return total.to(x.dtype)


def takes_gated(weight: torch.Tensor, adapters: TokenAdapters) -> bool:
    return weight.shape[0] % 16 == 0 and hopper_takes_adapters(len(adapters.slots), adapters, gated=True)


def multiply(x, weight, plan, adapters, gated, bias=None):
    from rayllm_kernels.linear.hopper_kernel import linear_hopper

    return linear_hopper(x, weight, plan, bias, act="silu" if gated else None, adapters=adapters)


@pytest.mark.parametrize(
    "case", [case for case in CASES if HOPPER or case[1] < 2000], ids=lambda case: "-".join(map(str, case[:2]))
)
def test_shrinks(randn, adapted, device, case):
    """Launch after launch: the counters are as before."""
    tokens, inputs, _rows, ranks, most = case
    x, adapters = randn(tokens, inputs + 8, dtype=DTYPE)[:, :inputs], adapted(*case)
    zeros = {"dtype": torch.int32, "device": device}
    counters = torch.zeros(shrink_kernel.count_counters(tokens, len(ranks), len(ranks[0]), most), **zeros)
    ready, results = torch.zeros(200, **zeros), []
    for _launch in range(3):
        results.append(shrink_kernel.shrink(x, adapters, counters, ready, 132))
        assert ready.tolist() == [columns_of(adapters) - (1 << 31)] * 132 + [0] * 68
        assert not counters.any()
        ready.zero_()
    expected = shrunk_of(x, adapters).flatten(2).to(DTYPE)
    groups = torch.arange(expected.shape[2], device=device) // 64
    present = (columns_of(adapters) >> groups & 1).bool()  # others are not read
    check_close(results[0][..., present], expected[..., present], terms=inputs)
    assert not expected[..., ~present].any()
    assert all(torch.equal(u[..., present], results[0][..., present]) for u in results)


@on_hopper
@pytest.mark.parametrize("programs", [7, 132, 264])
@pytest.mark.parametrize("tile", HOPPER_TILES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:2])))
def test_each_token_gets_its_adapter(randn, scaled, adapted, case, tile, programs):
    tokens, inputs, rows, _, most = case
    x, weight, adapters = randn(tokens, inputs, dtype=DTYPE), scaled(sum(rows), inputs, DTYPE), adapted(*case)
    bias = randn(sum(rows), dtype=DTYPE)
    assert hopper_takes_adapters(tokens, adapters, gated=False)
    terms = inputs + most
    y = multiply(x, weight, (tile, programs), adapters, False, bias)
    expected = expected_of(x, weight, adapters, False)
    check_close(y, (expected.double() + bias.double()).to(DTYPE), terms=terms, slack=8)
    for gated in (False, True) if takes_gated(weight, adapters) else (False,):
        y = multiply(x, weight, (tile, programs), adapters, gated)
        check_close(y, expected_of(x, weight, adapters, gated), terms=terms, slack=8)
        for _ in range(5):
            assert torch.equal(y, multiply(x, weight, (tile, programs), adapters, gated))


@on_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [2, 24, 70])
def test_replays_with_other_slots(randn, scaled, adapted, gated, tokens):
    """What launches leave to each other is right again after each: of tokens with adapters, without, and others."""
    case = (tokens, 1024, (1024, 1024), [[16, 16]] * 4, 16)
    x, weight, adapters = randn(tokens, 1024, dtype=DTYPE), scaled(2048, 1024, DTYPE), adapted(*case)
    tile, graph = WIDE[max(16, 1 << (tokens - 1).bit_length())], torch.cuda.CUDAGraph()
    plans_in_turn = [(tile, 132), (tile, 16), (tile, 100)]
    multiply(x, weight, plans_in_turn[0], adapters, gated)
    multiply(x, weight, plans_in_turn[0], None, gated)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = [multiply(x, weight, plans_in_turn[i % 3], adapters if i % 4 else None, gated) for i in range(24)]
    none = torch.full_like(adapters.slots, -1)
    for slots in (adapters.slots.clone(), none, none + 1, none, adapters.slots.flip(0)) * 20:
        adapters.slots.copy_(slots)
        graph.replay()
        with_adapters = [(i % 3, y) for i, y in enumerate(results) if i % 4]
        for plan in range(3):
            same = [y for number, y in with_adapters if number == plan]
            assert all(torch.equal(y, same[0]) for y in same)
            check_close(same[0], expected_of(x, weight, adapters, gated), terms=1024, slack=8)


@on_hopper
def test_tokens_do_not_know_of_others(randn, scaled, adapted):
    case = (32, 4096, (4096,), [[16]] * 8, 16)
    x, weight, adapters = randn(32, 4096, dtype=DTYPE), scaled(4096, 4096, DTYPE), adapted(*case)
    whole = multiply(x, weight, (WIDE[32], 128), adapters, gated=False)
    for slot in range(-1, 8):
        own = adapters.slots == slot
        alone = adapters._replace(slots=torch.where(own, adapters.slots, -1))
        assert torch.equal(multiply(x, weight, (WIDE[32], 128), alone, gated=False)[own], whole[own])


@on_hopper
@pytest.mark.parametrize("tokens", [2, 8, 17, 40, 64, 65, 128])
def test_planned_products(randn, scaled, kernels, adapted, tokens):
    """What `plans` chooses for a layer: of Llama-3.1-8B, and of a small model."""
    for hidden, inner, heads in ((4096, 14336, (4096, 1024, 1024)), (1024, 3072, (2048, 1024, 1024))):
        for inputs, rows, gated in (
            (hidden, heads, False),
            (heads[0], (hidden,), False),
            (hidden, (inner, inner), True),
            (inner, (hidden,), False),
        ):
            adapters = adapted(tokens, inputs, rows, [[16] * len(rows)] * 8, 16)
            x, weight = randn(tokens, inputs, dtype=DTYPE), scaled(sum(rows), inputs, DTYPE)
            if gated:
                y = kernels.linear_act_mul(x, weight, "silu", adapters=adapters)
            else:
                y = kernels.linear(x, weight, adapters=adapters)
            check_close(y, expected_of(x, weight, adapters, gated), terms=inputs + 16, slack=16)


@pytest.mark.parametrize(
    ("rows", "slots", "most", "plain", "gated"),
    [
        ((64,), 8, 16, True, True),
        ((32, 32), 8, 16, True, True),
        ((40, 24), 8, 16, True, False),
        ((16, 16, 16, 16), 3, 8, True, False),
        ((16, 16, 16, 8, 8), 3, 8, False, False),
        ((64,), 1, 4, False, False),  # rows of B are no multiples of 16 bytes
        ((64,), 31, 64, True, True),
        ((64,), 32, 64, False, False),
    ],
)
def test_which_adapters_are_taken(adapted, rows, slots, most, plain, gated):
    adapters = adapted(8, 64, rows, [[most] * len(rows)] * slots, most)
    assert hopper_takes_adapters(8, adapters, gated=False) == plain
    assert hopper_takes_adapters(8, adapters, gated=True) == gated
    assert not hopper_takes_adapters(plans.MAX_HOPPER_TOKENS + 1, adapters, gated=False)


COMPILE = """
from rayllm_kernels.device import Hardware, assumed
from rayllm_kernels.linear import hopper_kernel, shrink_kernel
from rayllm_kernels.linear.plans import NARROW, WIDE

x, weight = torch.zeros(16, 128, dtype=torch.bfloat16), torch.zeros(256, 128, dtype=torch.bfloat16)
slots = torch.zeros(16, dtype=torch.int32)
known = set()
for rows, tile, programs, act in (((256,), NARROW[16], 2, None), ((128, 128), WIDE[32], 1, "silu")):
    a, b = weight.new_zeros(8, len(rows), 16, 128), weight.new_zeros(256, 8, 16)
    weights = ops.AdapterSlots(a, b, slots.new_zeros(8, len(rows)), rows)
    with assumed(x.device, Hardware(132, 232448, (9, 0))), ops.compile_only():
        hopper_kernel.linear_hopper(x, weight, (tile, 132), act=act, adapters=TokenAdapters(slots, weights))
    for module, name in ((hopper_kernel, "_linear_hopper_kernel"), (shrink_kernel, "_shrink_columns_kernel")):
        [kernel] = set(getattr(module, name).device_caches[0][0].values()) - known
        known.add(kernel)
        print(kernel.asm["ptx"].count("mma"), kernel.metadata.shared, programs)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_the_kernels_compile_and_fit(run_compiler, tmp_path):
    """Programs of the product beside one that shrinks."""
    script = "from rayllm_kernels.lora.lora import TokenAdapters\n" + COMPILE
    lines = run_compiler(script, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    found = [tuple(map(int, line.split())) for line in lines]
    assert len(found) == 4
    for product, shrink in (found[:2], found[2:]):
        assert product[0] > 0
        assert shrink[0] > 0
        # Bytes of a multiprocessor, of which each program costs 1,024.
        assert product[2] * (product[1] + 1024) + shrink[1] + 1024 <= 228 << 10
