"""Both pools and the moves between them: random histories of simulated contents, and what a scheduler makes of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.scheduler import CHEAP, DEAR, EVEN, Harness

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest, KVCosts
from rayllm.core.memory import KVMemory, WriteBackLimits
from rayllm.core.sequence import Sequence, SequenceGroup

SIZE, NUM_BLOCKS, NUM_CPU_BLOCKS = 4, 10, 7
Content = tuple[int, tuple[int, ...]]  # group, tokens


def make_sequence(memory: KVMemory, ids: list[int], salt: str = "") -> Sequence:
    request = GenerationRequest(request_id="r", prompt_token_ids=ids, params=SamplingParams())
    return Sequence(SequenceGroup(request, root_hash=memory.root_hash(salt), max_len=999), 0, (0,))


class Pools(RuleBasedStateMachine):
    """device, host: what each block holds, as its group and the tokens up to its end.

    Steps are over when their plan is complete.
    """

    @initialize(
        caching=st.booleans(),
        costs=st.sampled_from([CHEAP, EVEN, DEAR]),
        windows=st.sampled_from([(None,), (None,), (1,), (5,), (8,), (None, 5), (8, None, 1), (5, 1), (None, 2, 2)]),
        write_back=st.sampled_from([0, 3, 20]),
    )
    def start(self, caching: bool, costs: KVCosts, windows: tuple[int | None, ...], write_back: int) -> None:
        self.memory = KVMemory(
            num_blocks=NUM_BLOCKS,
            num_cpu_blocks=NUM_CPU_BLOCKS,
            block_size=SIZE,
            caching=caching,
            costs=costs,
            windows=windows,
            write_back=WriteBackLimits(write_back, blocks_a_step=2, host_share=1),
        )
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.full: dict[int, int] = {}  # full blocks that a swapped sequence had
        self.entered: list[Sequence] = []  # in this step
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.step_id = 0
        self.leaving: list[tuple[int, int]] = []  # steps that write back, with the device blocks

    def write(self, block: int, content: Content) -> None:
        assert all(block != leaving for _step, leaving in self.leaving), "written before it was copied"
        self.device[block] = content

    @staticmethod
    def content(seq: Sequence, group: int, index: int, num_tokens: int) -> Content:
        return group, tuple(seq.token_ids[: min(num_tokens, (index + 1) * SIZE)])

    def enter(self, seq: Sequence) -> bool:
        match = self.memory.match(seq)
        assert match.end * SIZE < len(seq.token_ids), "nothing is left to compute"
        before = self.memory.num_free_after(match)
        missing = self.memory.num_groups * (self.memory.gpu.blocks_for(len(seq.token_ids)) - match.end)
        if before < missing:
            return False
        arriving = self.memory.claim(seq, match, len(seq.token_ids))
        assert self.memory.gpu.num_free == before - missing
        assert arriving or not match.host
        assert not seq.pinned
        seq.num_computed, seq.num_registered = match.end * SIZE, match.end
        self.entered.append(seq)
        return True

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, ids: list[int]) -> None:
        self.enter(make_sequence(self.memory, ids))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.swapped))
        full = self.full[id(seq)]
        if self.enter(seq):
            self.swapped.remove(seq)
            at_most = min(full, (len(seq.token_ids) - 1) // SIZE)
            assert seq.num_computed // SIZE >= at_most, "more than the last, partial block is computed again"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.memory.drop_behind(seq)
        assert not self.memory.swap_out(seq, "recompute") and not seq.pinned
        free, swapped = self.memory.cpu.num_free, data.draw(st.sampled_from(["cost", "swap"]))
        if not self.memory.swap_out(seq, swapped):
            assert self.memory.cpu.num_free == free and not seq.pinned
            return
        if seq.num_computed == len(seq.token_ids):
            seq.token_ids.append(0)  # sampled; its KV is not there yet
        held = sum(seq.num_computed // SIZE - first for first in seq.first_blocks)
        assert len(set(seq.pinned)) == len(seq.pinned) == held
        self.full[id(seq)] = seq.num_computed // SIZE
        self.memory.release(seq)
        self.running.remove(seq)
        self.swapped.append(seq)

    @precondition(lambda self: self.running or self.swapped)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running + self.swapped))
        (self.running if seq in self.running else self.swapped).remove(seq)
        self.memory.release(seq)
        self.memory.unpin(seq)

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        """Execute the moves, then compute some tokens of every sequence that entered before or just now."""
        step_id, num_tokens = self.step_id, data.draw(st.integers(0, 40))
        self.step_id += 1
        moves = self.memory.take_moves(step_id, num_tokens)
        self.leaving = [
            entry for entry in self.leaving if moves.await_write_backs is None or entry[0] > moves.await_write_backs
        ]
        assert len({host for _block, host in moves.swap_outs}) == len(moves.swap_outs)
        assert len({block for _host, block in moves.swap_ins}) == len(moves.swap_ins)
        for block, host in moves.swap_outs:
            self.host[host] = self.device[block]
        for block, content in [(block, self.host[host]) for host, block in moves.swap_ins]:
            self.write(block, content)
        moved = {host for _block, host in moves.swap_outs} | {host for host, _block in moves.swap_ins}
        for block, host in moves.write_backs:
            assert host not in moved
            moved.add(host)
            self.host[host] = self.device[block]
            self.leaving.append((step_id, block))
        self.running += self.entered
        self.entered = []
        for seq in self.running:
            for group, window in enumerate(self.memory.windows):
                seen = window.tokens or seq.num_computed + 1
                for i in range(max(0, seq.num_computed - seen + 1) // SIZE, -(-seq.num_computed // SIZE)):
                    expected = self.content(seq, group, i, seq.num_computed)
                    held = self.device[seq.block_tables[group][i - seq.first_blocks[group]]]
                    assert (held[0], held[1][: len(expected[1])]) == expected, "wrong KV"
            self.memory.drop_behind(seq)
        for seq in self.running:
            if seq.num_computed == len(seq.token_ids):
                continue
            seq.num_computed = data.draw(st.integers(seq.num_computed + 1, len(seq.token_ids)))
            for group, (first, table) in enumerate(zip(seq.first_blocks, seq.block_tables, strict=True)):
                for i, block in enumerate(table[: -(-seq.num_computed // SIZE) - first], first):
                    if len(self.device.get(block, (0, ()))[1]) <= i * SIZE or i >= seq.num_registered:
                        self.write(block, self.content(seq, group, i, seq.num_computed))
            if self.memory.caching:
                self.memory.register(seq, seq.num_computed)
        self.memory.check_integrity(self.running, [seq.pinned for seq in self.swapped])


Pools.TestCase.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
test_random_histories = Pools.TestCase


def tight(**options: object) -> Harness:
    """Room for two of three sequences at their full length, and a host pool; all enter, so that one is preempted."""
    room = {"num_blocks": 12, "block_size": 4, "num_cpu_blocks": 20, "max_num_batched_tokens": 64, "growth_blocks": 0}
    return Harness(**{**room, **options})


def fill(harness: Harness, count: int = 3, **params: object) -> None:
    for i in range(count):
        harness.add(f"r{i}", [i, *range(10, 21)], **{"max_tokens": 12, "seed": i, "ignore_eos": True, **params})


@pytest.mark.parametrize(("mode", "costs"), [("swap", DEAR), ("cost", CHEAP)])
def test_what_is_swapped_out_is_not_computed_again(mode, costs):
    harness = tight(preemption_mode=mode, costs=costs)
    fill(harness)
    harness.run()
    harness.check_done()
    stats = harness.scheduler.stats()
    assert stats.num_swap_preemptions == stats.num_preemptions > 0
    computed_again = harness.worker.num_tokens_computed - 3 * (12 + 12 - 1)
    assert 0 <= computed_again <= 3 * stats.num_preemptions, "a partial block each time"
    assert sum(delta.num_preemptions for delta in harness.last_deltas.values()) == stats.num_preemptions


@pytest.mark.parametrize(("mode", "costs"), [("recompute", CHEAP), ("cost", DEAR)])
def test_what_is_recomputed_is_not_moved(mode, costs):
    harness = tight(preemption_mode=mode, costs=costs, caching=False)
    fill(harness)
    harness.run()
    harness.check_done()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > stats.num_swap_preemptions == 0
    assert stats.swapped_out_blocks == stats.swapped_in_blocks == 0
    assert harness.worker.num_tokens_computed > 3 * (12 + 12 - 1)


def test_the_cost_of_a_victim_decides():
    """22 tokens, 6 blocks: out and in in 4 + 6 x 2.8 seconds, computed in 22. 14 tokens, 4 blocks: 15.2 and 14."""
    for prompt, swaps in ((list(range(20, 40)), True), (list(range(20, 32)), False)):
        harness = Harness(
            num_blocks=9,
            block_size=4,
            num_cpu_blocks=9,
            costs=EVEN,
            max_num_batched_tokens=64,
            policy="priority",
            caching=False,
            max_num_seqs=1,
        )
        harness.add("low", prompt, priority=1, max_tokens=9, seed=1, ignore_eos=True)
        for _ in range(3):
            harness.step()
        harness.add("high", [5], priority=0, max_tokens=2, seed=1, ignore_eos=True)
        harness.step()
        stats = harness.scheduler.stats()
        assert (stats.num_preemptions, stats.num_swap_preemptions, stats.num_swapped) == (1, swaps, swaps)
        harness.run()
        harness.check_done()


def test_blocks_that_others_keep_are_not_counted_as_lost():
    """Moving four blocks would be cheaper than computing them, but all but the last stay in the prefix cache."""
    harness = Harness(
        num_blocks=12,
        block_size=4,
        num_cpu_blocks=12,
        costs=EVEN,
        max_num_batched_tokens=64,
        policy="priority",
        max_num_seqs=2,
    )
    prompt = list(range(20, 36))
    harness.add("keeps", prompt, priority=0, max_tokens=12, seed=1, ignore_eos=True)
    harness.step()
    harness.add("low", prompt, priority=2, max_tokens=5, seed=2, ignore_eos=True)
    harness.step()
    harness.add("high", [5], priority=1, max_tokens=2, seed=1, ignore_eos=True)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions, stats.num_swap_preemptions) == (1, 0)
    harness.run()
    harness.check_done()


def test_a_full_host_pool_means_recompute():
    harness = tight(preemption_mode="swap", num_cpu_blocks=2, caching=False)
    fill(harness)
    harness.run()
    harness.check_done()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > stats.num_swap_preemptions == 0


def test_a_swapped_sequence_comes_back_before_new_ones_and_while_others_compute():
    harness = tight(preemption_mode="swap")
    fill(harness)
    while not harness.scheduler.stats().num_swapped:
        harness.step()
    harness.add("new", [1, 2], max_tokens=3, seed=1, ignore_eos=True)
    harness.run()
    harness.check_done()
    moving = [plan for plan in harness.plans if plan.swap_ins]
    assert moving and all(plan.rows and not plan.await_swap_ins for plan in moving)
    for plan in moving:
        arriving = {block for _host, block in plan.swap_ins}
        entering = {data.row for data in plan.new if arriving & set(data.block_tables[0])}
        assert entering and not entering & set(plan.rows), "computed before its blocks are there"
    newcomer = next(i for i, plan in enumerate(harness.plans) if any(len(d.token_ids) == 2 for d in plan.new))
    assert newcomer >= harness.plans.index(moving[0])


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_with_nothing_else_to_do_waits_for_its_blocks(caching):
    harness = tight(policy="priority", max_num_seqs=1, preemption_mode="swap", caching=caching)
    harness.add("low", list(range(20, 33)), priority=1, max_tokens=9, seed=1, ignore_eos=True)
    harness.step()
    harness.add("high", [5], priority=0, max_tokens=2, seed=1, ignore_eos=True)
    harness.run()
    harness.check_done()
    plans = [plan for plan in harness.plans if plan.swap_ins]
    if caching:
        assert not plans, "the full blocks are still on the device, and can be found there"
        return
    (plan,) = plans
    assert plan.await_swap_ins and len(plan.rows) == 1 and len(plan.swap_ins) == 3


@pytest.mark.parametrize("state", ["swapped", "arriving"])
def test_an_abort_frees_both_pools(state):
    harness = tight(preemption_mode="swap")
    fill(harness)
    while not (harness.scheduler.stats().num_swapped or state == "arriving"):
        harness.step()
    while not (state == "swapped" or (harness.plans and harness.plans[-1].swap_ins)):
        harness.step()
    for i in range(3):
        harness.abort(f"r{i}")
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_used_blocks == stats.num_used_cpu_blocks == stats.num_swapped == 0


def chat(harness: Harness, name: str, prompt: list[int], salt: str = "") -> int:
    """Run one request alone; returns how many of its prompt tokens were computed."""
    before = harness.worker.num_tokens_computed
    harness.add(name, prompt, salt=salt, max_tokens=1, seed=0, ignore_eos=True)
    harness.run()
    return harness.worker.num_tokens_computed - before


def test_the_prefix_cache_goes_on_in_host_memory():
    harness = Harness(num_blocks=10, block_size=4, num_cpu_blocks=30, max_num_batched_tokens=64)
    prompts = [[i, *range(10, 33)] for i in range(4)]  # 6 blocks each, so that the device holds one and a half
    for i, prompt in enumerate(prompts):
        assert chat(harness, f"first {i}", prompt) == 24
    for i, prompt in enumerate(prompts):
        assert chat(harness, f"second {i}", prompt) == 4, "at least one token is computed: here the last block"
    harness.check_done()
    stats = harness.scheduler.stats()
    assert stats.prefix_cache_hits == 4 * 20
    assert 0 < stats.cpu_prefix_cache_hits <= stats.prefix_cache_hits
    assert stats.cpu_prefix_cache_hits == stats.swapped_in_blocks * 4
    on_device = stats.prefix_cache_hits - stats.cpu_prefix_cache_hits
    assert stats.cpu_prefix_cache_queries == stats.prefix_cache_queries - on_device == 8 * 24 - on_device
    assert stats.num_cached_cpu_blocks > 10 and stats.num_used_cpu_blocks == 0
    out = stats.swapped_out_blocks
    assert chat(harness, "third", prompts[0]) == 4
    assert harness.scheduler.stats().swapped_out_blocks == out, "what the host has is not moved again"


def test_who_shares_blocks_that_arrive_waits_for_them_too():
    harness = Harness(num_blocks=20, block_size=4, num_cpu_blocks=40, max_num_batched_tokens=64)
    prompt = list(range(24))
    chat(harness, "first", prompt)
    for i in range(2):
        chat(harness, f"other {i}", [40 + i] * 72)
    harness.add("busy", [1, 2, 3], max_tokens=9, seed=0, ignore_eos=True)
    harness.step()
    for name in ("a", "b"):
        harness.add(name, prompt, max_tokens=2, seed=0, ignore_eos=True)
    harness.step()
    plan = harness.plans[-1]
    assert len(plan.swap_ins) == 5 and len(plan.new) == 2 and not plan.await_swap_ins
    assert len(plan.rows) == 1, "only the busy one computes"
    harness.run()
    harness.check_done()


def test_tenants_do_not_meet_in_host_memory():
    harness = Harness(num_blocks=10, block_size=4, num_cpu_blocks=30, max_num_batched_tokens=64)
    prompt, other = list(range(24)), list(range(20, 44))
    assert chat(harness, "a", prompt, salt="a") == 24
    assert chat(harness, "other", other) == 24
    assert chat(harness, "b", prompt, salt="b") == 24, "a hit across salts"
    assert chat(harness, "other again", other) == 4
    assert chat(harness, "a again", prompt, salt="a") == 4


@pytest.mark.parametrize(
    ("costs", "computed"),
    [
        (DEAR, 24),  # not even demoted
        (KVCosts(1.0, 0.1, 0.1, transfer=50.0), 24),  # blocks are cheap, but a transfer is not
        (KVCosts(1.0, 0.1, 0.1, transfer=5.0), 4),
    ],
)
def test_what_is_cheaper_to_compute_is_computed(costs, computed):
    harness = Harness(num_blocks=10, block_size=4, num_cpu_blocks=30, max_num_batched_tokens=64, costs=costs)
    prompt = list(range(24))
    chat(harness, "first", prompt)
    for i in range(2):
        chat(harness, f"other {i}", [i + 40] * 36)
    assert chat(harness, "again", prompt) == computed
    assert (harness.scheduler.stats().swapped_out_blocks == 0) == (costs is DEAR)


def test_the_host_tier_forgets_the_least_recently_used():
    harness = Harness(num_blocks=6, block_size=4, num_cpu_blocks=10, max_num_batched_tokens=64)
    prompts = [[i, *range(10, 29)] for i in range(4)]  # 5 blocks, 4 of which are looked up
    for i, prompt in enumerate(prompts):
        chat(harness, f"{i}", prompt)
    assert chat(harness, "recent", prompts[2]) == 4
    assert chat(harness, "old", prompts[0]) == 20


def test_what_is_reused_next_is_on_the_host_before_and_holds_nothing_up():
    """Prompts that have nothing in common fill the pool again and again; blocks leave beside steps that decode."""
    harness = Harness(
        num_blocks=32, block_size=4, num_cpu_blocks=64, max_num_batched_tokens=24, max_num_seqs=2, costs=CHEAP
    )
    for i in range(20):
        harness.add(f"r{i}", [i % 7, i // 7, *range(18)], max_tokens=12, ignore_eos=True, seed=i)
        harness.run()
    harness.check_done()
    demoted = sum(len(plan.swap_outs) for plan in harness.plans)
    assert harness.worker.num_written_back > 5 * demoted
    waits = [plan.step_id - plan.await_write_backs for plan in harness.plans if plan.await_write_backs is not None]
    assert waits and min(waits) > 1, "no step waits for what the one before has just begun to copy"


def test_what_is_written_back_is_found_when_the_device_has_reused_it():
    harness = Harness(
        num_blocks=16, block_size=4, num_cpu_blocks=64, max_num_batched_tokens=64, max_num_seqs=1, costs=CHEAP
    )
    prompts = [[i, *range(20)] for i in range(4)]
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            harness.add(f"r{i}/{turn}", prompt, max_tokens=8, ignore_eos=True, seed=i)
            harness.run()
    harness.check_done()
    stats = harness.scheduler.stats()
    assert harness.worker.num_written_back > 0
    assert stats.cpu_prefix_cache_hits >= 2 * 4 * 20 - 3 * 20, "all but what the device still had"
    assert stats.swapped_out_blocks == harness.worker.num_written_back + sum(
        len(plan.swap_outs) for plan in harness.plans
    )
