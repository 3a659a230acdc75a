"""Adapters inside the Hopper projection kernel: every tile, mixed slots and ranks, replays, and how work is shared."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.linear import plans
from rayllm_kernels.linear.plans import HOPPER_TILES, NARROW, WIDE, hopper_takes_adapters, share_with_adapters
from rayllm_kernels.lora.lora import AdapterSlots, TokenAdapters

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
BF16 = torch.bfloat16
# tokens, inputs, rows of each projection, ranks of each slot, largest rank
CASES = [
    (3, 40, (72,), [[16]], 16),
    (20, 520, (1000, 40), [[16, 4], [0, 16], [16, 16], [0, 0]], 16),
    (61, 4096, (1024, 256, 256), [[16, 8, 16]] * 8, 16),
    (128, 2056, (512, 512), [[40, 3], [0, 17], [8, 40]] * 4, 40),
    (100, 1024, (592, 592), [[24, 24]], 24),
]


@pytest.fixture
def adapted(randn, device):
    """(tokens, inputs, rows, ranks, largest rank) -> adapters of tokens in turn, of none too; NaN beyond the ranks."""

    def make(tokens: int, inputs: int, rows: tuple[int, ...], ranks: list[list[int]], most: int) -> TokenAdapters:
        a = (randn(len(ranks), len(rows), most, inputs) * inputs**-0.5).to(BF16)
        b = randn(len(ranks), sum(rows), most, dtype=BF16)
        for slot, own in enumerate(ranks):
            first = 0
            for number, (rank, width) in enumerate(zip(own, rows, strict=True)):
                a[slot, number, rank:] = float("nan")
                b[slot, first : first + width, rank:] = float("nan")
                first += width
        slots = torch.arange(tokens, device=device, dtype=torch.int32) % (len(ranks) + 1) - 1
        return TokenAdapters(slots, AdapterSlots(a, b, torch.tensor(ranks, dtype=torch.int32, device=device), rows))

    return make


def expected_of(x: torch.Tensor, weight: torch.Tensor, adapters: TokenAdapters, gated: bool) -> torch.Tensor:
    """In float64, but for what is shrunk, which is rounded."""
    slots, (a, b, ranks, rows) = adapters
    total = x.double() @ weight.double().t()
    for slot in range(a.shape[0]):
        tokens, first = (slots == slot).nonzero()[:, 0], 0
        for number, width in enumerate(rows):
            rank = int(ranks[slot, number])
            shrunk = (x[tokens].double() @ a[slot, number, :rank].double().t()).to(x.dtype).double()
            total[tokens, first : first + width] += shrunk @ b[slot, first : first + width, :rank].double().t()
            first += width
    if gated:
        gate, up = total.chunk(2, 1)
        total = torch.nn.functional.silu(gate) * up
    return total.to(x.dtype)


def multiply(x, weight, plan, adapters, gated):
    from rayllm_kernels.linear.hopper_kernel import linear_hopper

    return linear_hopper(x, weight, plan, act="silu" if gated else None, adapters=adapters)


@on_hopper
@pytest.mark.parametrize("programs", [7, 132])
@pytest.mark.parametrize("tile", HOPPER_TILES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:2])))
def test_each_token_gets_its_adapter(randn, scaled, adapted, case, tile, programs):
    tokens, inputs, rows, _, most = case
    x, weight, adapters = randn(tokens, inputs, dtype=BF16), scaled(sum(rows), inputs, BF16), adapted(*case)
    assert hopper_takes_adapters(x, adapters)
    for gated in (False, True) if rows[0] == sum(rows) / 2 else (False,):
        y = multiply(x, weight, (tile, programs), adapters, gated)
        check_close(y, expected_of(x, weight, adapters, gated), terms=inputs + most, slack=8)
        for _ in range(5):
            assert torch.equal(y, multiply(x, weight, (tile, programs), adapters, gated))


@on_hopper
@pytest.mark.parametrize("gated", [False, True])
def test_replays_with_other_slots(randn, scaled, adapted, gated):
    """The counters are right again after each: of tokens with adapters, without, and of other kernels between."""
    case = (24, 1024, (1024, 1024), [[16, 16]] * 4, 16)
    x, weight, adapters = randn(24, 1024, dtype=BF16), scaled(2048, 1024, BF16), adapted(*case)
    plan, graph = plans.plan_hopper(24, 2048, 1024, gated, 132), torch.cuda.CUDAGraph()
    assert plan is not None
    multiply(x, weight, plan, adapters, gated)
    multiply(x, weight, plan, None, gated)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = [multiply(x, weight, plan, adapters if i % 3 else None, gated) for i in range(12)]
    none = torch.full_like(adapters.slots, -1)
    for slots in (adapters.slots.clone(), none, none + 1, none, adapters.slots.flip(0)) * 20:
        adapters.slots.copy_(slots)
        graph.replay()
        assert all(torch.equal(y, results[1]) for i, y in enumerate(results) if i % 3)
        check_close(results[1], expected_of(x, weight, adapters, gated), terms=1024, slack=8)


@on_hopper
def test_tokens_do_not_know_of_others(randn, scaled, adapted):
    case = (32, 4096, (4096,), [[16]] * 8, 16)
    x, weight, adapters = randn(32, 4096, dtype=BF16), scaled(4096, 4096, BF16), adapted(*case)
    whole = multiply(x, weight, (WIDE[32], 128), adapters, gated=False)
    for slot in range(-1, 8):
        own = adapters.slots == slot
        alone = adapters._replace(slots=torch.where(own, adapters.slots, -1))
        assert torch.equal(multiply(x, weight, (WIDE[32], 128), alone, gated=False)[own], whole[own])


@pytest.mark.parametrize("blocks", [1, 24, 300])
@pytest.mark.parametrize("steps", [1, 3, 64, 224])
@pytest.mark.parametrize("tiles", [1, 3, 32, 48, 132, 224, 264, 700])
@pytest.mark.parametrize("tile", [NARROW[16], WIDE[16]])
def test_every_program_has_units(tile, tiles, steps, blocks):
    """As the kernel counts them: what the shrinkers have is theirs evenly, and what is left is the others' evenly."""
    most = 132 if tile.consumers > 1 else 264
    for programs in (1, 100, tiles, most // tiles * tiles, most):
        if not 0 < programs <= most:
            continue
        shrinkers, units, count = share_with_adapters((tile, programs), tiles, steps, blocks, 132)
        assert 0 < shrinkers <= steps
        assert count <= most
        others, left = count - shrinkers, tiles * steps - units
        assert units == 0 or units >= shrinkers
        assert (others == 0) == (left == 0)
        assert left >= others


COMPILE = """
from rayllm_kernels.device import Hardware, assumed
from rayllm_kernels.linear import hopper_kernel
from rayllm_kernels.linear.plans import NARROW, WIDE

x, weight = torch.zeros(16, 128, dtype=torch.bfloat16), torch.zeros(256, 128, dtype=torch.bfloat16)
slots = torch.zeros(16, dtype=torch.int32)
known = set()
for rows, tile, programs, act in (((256,), NARROW[16], 2, None), ((128, 128), WIDE[32], 1, "silu")):
    a, b = weight.new_zeros(8, len(rows), 16, 128), weight.new_zeros(8, 256, 16)
    weights = ops.AdapterSlots(a, b, slots.new_zeros(8, len(rows)), rows)
    with assumed(x.device, Hardware(132, 232448, (9, 0))), ops.compile_only():
        hopper_kernel.linear_hopper(x, weight, (tile, 132), act=act, adapters=TokenAdapters(slots, weights))
    [kernel] = set(hopper_kernel._linear_hopper_kernel.device_caches[0][0].values()) - known
    known.add(kernel)
    print(kernel.asm["ptx"].count("wgmma.mma"), kernel.metadata.shared, programs)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler, tmp_path):
    script = "from rayllm_kernels.lora.lora import TokenAdapters\n" + COMPILE
    for line in run_compiler(script, TRITON_CACHE_DIR=str(tmp_path)).splitlines():
        products, shared, programs = map(int, line.split())
        assert products > 0
        assert programs * (shared + 1024) <= 228 << 10  # bytes of a multiprocessor, of which each program costs 1,024
