"""Which replica gets a prompt: the index of what was sent where, and the bounds on the preference for it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayllm.api.types import Load
from rayllm.serve.cluster import router as module
from rayllm.serve.cluster.router import (
    BUSY_AMOUNT,
    BUSY_FACTOR,
    CANDIDATES,
    HOME_TOKENS,
    HOMES,
    ROUTING_BLOCK,
    TOKENS_A_COMPLETION,
    PrefixIndex,
    Prompt,
    Router,
    weight,
)

SIZE = ROUTING_BLOCK


def test_hashes_are_of_whole_blocks_and_of_all_before():
    def prefix_hashes(*prompt):
        return Router(b"key").prompt(*prompt).hashes

    ids = list(range(3 * SIZE + 1))
    hashes = prefix_hashes(ids)
    assert len(hashes) == len(set(hashes)) == 3
    assert prefix_hashes(ids[: 2 * SIZE]) == hashes[:2]
    assert prefix_hashes(ids[: SIZE - 1]) == prefix_hashes([]) == []
    changed = prefix_hashes([9, *ids[1:]])
    assert not set(changed) & set(hashes), "a block is another one after another beginning"
    assert not set(prefix_hashes(ids, "tenant")) & set(hashes)
    assert prefix_hashes([0] * 2 * SIZE)[0] != prefix_hashes([0] * 2 * SIZE)[1]


def test_the_end_of_the_oldest_prompt_is_forgotten_first():
    index = PrefixIndex(4)
    index.add([1, 2, 3], 9)
    index.add([1, 7], 9)
    assert index.match([1, 2, 3]) == 3
    index.add([1, 8], 9)
    assert index.match([1, 2, 3]) == 2
    index.add([9], 9)
    assert [index.match(each) for each in ([1, 2, 3], [1, 7], [1, 8], [9])] == [1, 2, 2, 1]
    index.add([11, 12, 13, 14, 15, 16], 9)
    assert len(index) == 4
    assert index.match([11, 12, 13, 14, 15, 16]) == 4


prompts = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.lists(prompts, max_size=40))
def test_an_index_is_bounded_and_never_holds_a_block_without_its_prefix(capacity, sent):
    """Against a model: what is matched was sent, and the prompt sent last is matched as far as there is room."""
    index = PrefixIndex(capacity)
    seen = set()
    for prompt in sent:
        chain = [hash((0, *prompt[: i + 1])) for i in range(len(prompt))]
        before = set(index)
        new, forgotten = index.add(chain, 100)
        index.check_integrity()
        seen.update(chain)
        assert (before | set(new)) - set(forgotten) == set(index) and not before & set(new)
        assert index.match(chain) == min(len(chain), capacity)
        assert len(index) <= capacity
        assert set(index) <= seen


def make_router(*names, kv_tokens=1000 * SIZE, seed=0):
    router = Router(b"key", random.Random(seed))
    for name in names:
        router.add_replica(name, kv_tokens)
    return router


def choose(router, hashes, loads, point=None):
    """The choice for a prompt of these blocks, by default without a home."""
    return router.choose(Prompt(hashes, point), list(loads), loads.get)


def test_a_prompt_goes_where_most_of_it_is():
    router = make_router("a", "b")
    idle = {"a": Load(), "b": Load()}
    one, two = [1, 2, 3, 4], [1, 2, 7, 8]
    first = choose(router, one, idle)
    assert first.cached_tokens == 0
    other = "b" if first.replica_id == "a" else "a"
    busy = {first.replica_id: Load(100, 0), other: Load()}
    assert choose(router, two, busy) == (other, 0)
    assert choose(router, one, idle) == (first.replica_id, 4 * SIZE)
    assert choose(router, [*two, 9], idle) == (other, 4 * SIZE)
    assert choose(router, [1, 2, 3, 5], {other: Load()}) == (other, 2 * SIZE), "a replica that is not offered"


@pytest.mark.parametrize("least", [0, 3, 100])
def test_a_replica_that_is_too_busy_is_not_preferred(least):
    limit = max(least * BUSY_FACTOR, least + BUSY_AMOUNT)
    for load, preferred in ((int(limit), True), (int(limit) + 1, False)):
        router = make_router("a", "b")
        choose(router, [1], {"a": Load()})
        chosen = choose(router, [1], {"a": Load(load, 0), "b": Load(least, 0)})
        assert (chosen.replica_id == "a") is preferred, (load, limit)


def test_a_long_prefix_may_wait_longer():
    def chosen(blocks, queued):
        router = make_router("a", "b", kv_tokens=10**6)
        hashes = list(range(blocks))
        choose(router, hashes, {"a": Load()})
        return choose(router, hashes, {"a": Load(1, queued), "b": Load()}).replica_id

    queued = 20 * TOKENS_A_COMPLETION
    assert chosen(2, queued) == "b"
    assert chosen(queued // SIZE, queued) == "a"


def test_without_a_prefix_the_least_busy_one_is_chosen_and_of_equals_the_emptiest():
    router = make_router(*"abc")
    loads = {"a": Load(5, 0), "b": Load(4, 0), "c": Load(3, 2 * TOKENS_A_COMPLETION)}
    assert {choose(router, [i], loads).replica_id for i in range(20)} == {"b"}
    idle = {name: Load() for name in "abc"}
    chosen = [choose(router, [100 + i], idle).replica_id for i in range(40)]
    assert set(chosen) == {"a", "c"}, "b has 20 prompts already, these two get as many"
    assert sorted(choose(router, [200 + i], idle).replica_id for i in range(9)) == list("aaabbbccc")
    assert len({choose(make_router(*"abc", seed=seed), [1], idle).replica_id for seed in range(20)}) == 3


def test_a_replica_that_went_is_forgotten():
    router = make_router("a", "b")
    choose(router, [1, 2], {"a": Load()})
    router.remove_replica("a")
    router.remove_replica("a")
    router.add_replica("a", 1000)
    assert router.replicas == {"a", "b"}
    assert choose(router, [1, 2], {"a": Load()}) == ("a", 0)


def test_an_index_is_as_large_as_the_replicas_cache(monkeypatch):
    router = make_router("a", kv_tokens=3 * SIZE)
    choose(router, [1, 2, 3, 4, 5], {"a": Load()})
    assert choose(router, [1, 2, 3, 4, 5], {"a": Load()}).cached_tokens == 3 * SIZE
    monkeypatch.setattr(module, "MAX_INDEX_BLOCKS", 2)
    router.remove_replica("a")
    router.add_replica("a", 10**9)
    choose(router, [1, 2, 3], {"a": Load()})
    assert choose(router, [1, 2, 3], {"a": Load()}).cached_tokens == 2 * SIZE
    choose(make_router("tiny", kv_tokens=1), [1], {"tiny": Load()})


def test_fronts_agree_on_where_a_new_beginning_goes_and_restarts_change_nothing():
    names = [f"r{i}" for i in range(100)]
    idle = dict.fromkeys(names, Load())
    beginnings = [list(range(n, n + HOME_TOKENS)) for n in range(200)]

    def places(seed, key=b"key", tail=0):
        router = Router(key, random.Random(seed))
        for name in random.Random(seed).sample(names, len(names)):  # heard of in any order
            router.add_replica(name, 10**6)
        prompts = [router.prompt([*each, *range(tail)]) for each in beginnings]
        return [set(router._homes(prompt.point, idle.get)) for prompt in prompts], [
            choose(router, prompt.hashes, idle, prompt.point).replica_id for prompt in prompts
        ]

    homes, chosen = places(1)
    assert places(2, tail=40)[0] == homes, "tails differ"
    assert all(len(each) == HOMES and one in each for each, one in zip(homes, chosen, strict=True))
    assert places(1, b"other key")[0] != homes
    assert max(chosen.count(name) for name in names) < 12, "2 on average"
    router = make_router("a")
    assert router.prompt(list(range(HOME_TOKENS - 1))).point is None
    assert router.prompt(list(range(HOME_TOKENS))).point != router.prompt(list(range(HOME_TOKENS)), "tenant").point


def test_a_cache_key_stands_for_the_beginning():
    """Requests with the same key have the same homes, whatever their prompts and however short these are."""
    names = [f"r{i}" for i in range(16)]
    routers = [Router(b"key", random.Random(seed)) for seed in range(2)]
    for router in routers:
        for name in names:
            router.add_replica(name, 10**6)
    idle = lambda _: Load()  # noqa: E731
    chosen = {
        router.choose(router.prompt([seed, seed + 1], cache_key="mine"), names, idle).replica_id
        for seed, router in enumerate(routers * 20)
    }
    assert len(chosen) <= 2
    others = {routers[0].choose(routers[0].prompt([1], cache_key=str(i)), names, idle).replica_id for i in range(100)}
    assert len(others) > 8


def test_a_change_of_replicas_moves_what_it_must():
    names = [f"r{i}" for i in range(100)]
    router = make_router(*names)
    points = [router.prompt([n] * HOME_TOKENS).point for n in range(1000)]

    def homes():
        return [list(router._homes(point, dict.fromkeys(router.replicas, Load()).get)) for point in points]

    before = homes()
    for name in names[:10]:
        router.remove_replica(name)
    for old, new in zip(before, homes(), strict=True):
        kept = [each for each in old if each not in names[:10]]
        assert new[: len(kept)] == kept
    for name in names[:10]:
        router.add_replica(name, 1000 * SIZE)
    assert homes() == before


def test_a_home_that_is_too_busy_is_passed_over():
    router = make_router("a", "b", "c")
    prompt = router.prompt(list(range(HOME_TOKENS)))
    homes = list(router._homes(prompt.point, lambda _: Load()))
    (stranger,) = router.replicas - set(homes)
    loads = {homes[0]: Load(8), homes[1]: Load(9), stranger: Load()}
    assert choose(router, prompt.hashes, loads, prompt.point).replica_id == homes[0]
    loads[homes[0]] = Load(9)
    other = router.prompt(list(range(HOME_TOKENS)))
    router.remove_replica(homes[0])
    router.add_replica(homes[0], 1000 * SIZE)  # it has forgotten what it got
    assert choose(router, other.hashes, loads, other.point).replica_id == stranger


@pytest.mark.parametrize("num_replicas", [50, 500])
def test_a_choice_looks_at_a_few_replicas_and_finds_the_one_with_the_prompt(num_replicas):
    names = [f"r{i}" for i in range(num_replicas)]
    router = make_router(*names)
    asked = []

    def load(name):
        asked.append(name)
        return Load()

    header = [1, 2]
    for name in names:  # which all have
        choose(router, header, {name: Load()})
    first = router.choose(Prompt([*header, 3, 4, 5], 0), names, load)
    assert first.cached_tokens == 2 * SIZE
    asked.clear()
    assert router.choose(Prompt([*header, 3, 4, 5, 6], 0), names, load) == (first.replica_id, 5 * SIZE)
    assert len(asked) <= 2 * HOMES + 3 * CANDIDATES
    assert first.replica_id == choose(router, [*header, 3], dict.fromkeys(names, Load())).replica_id


def test_all_indexes_together_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCKS", 12)
    router = make_router("a", "b", "c")
    for i in range(60):
        choose(router, [10 * i + j for j in range(3)], {"abc"[i % 3]: Load()})
        router.check_integrity()
        assert len(router._holders) <= 12


steps = st.lists(
    st.tuples(prompts, st.integers(0, 40), st.integers(0, 20_000), st.sampled_from(["", "add", "remove"])), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 2**32))
def test_the_choice_keeps_its_promises(traffic, seed):
    """Among what is offered; never busier than the bound allows for what it has cached; else one of the least busy."""
    rng = random.Random(seed)
    router = make_router("a", "b", kv_tokens=8 * SIZE, seed=seed)
    added = 0
    for prompt, completions, queued, event in traffic:
        if event == "add":
            added += 1
            router.add_replica(f"n{added}", 4 * SIZE)
        elif event == "remove" and len(router.replicas) > 1:
            router.remove_replica(rng.choice(sorted(router.replicas)))
        loads = {name: Load(rng.randint(0, completions), rng.randint(0, queued)) for name in sorted(router.replicas)}
        if len(loads) > CANDIDATES:
            continue
        chain = [hash((1, *prompt[: i + 1])) for i in range(len(prompt))]
        cached = {name: router._indexes[name].match(chain) * SIZE for name in loads}
        choice = choose(router, chain, loads)
        router.check_integrity()
        assert choice.replica_id in loads
        assert choice.cached_tokens == cached[choice.replica_id]
        busy = {name: weight(load) for name, load in loads.items()}
        least = min(busy.values())
        limit = max(least * BUSY_FACTOR, least + BUSY_AMOUNT)
        fit = {name for name in loads if cached[name] and busy[name] - cached[name] / TOKENS_A_COMPLETION <= limit}
        if fit:
            assert choice.replica_id in fit
            assert choice.cached_tokens == max(cached[name] for name in fit)
        else:
            assert busy[choice.replica_id] == least
        assert router._indexes[choice.replica_id].match(chain) == min(
            len(chain), router._indexes[choice.replica_id].capacity
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(0, 40), st.integers(0, 9)), max_size=40), st.integers(0, 2**32))
def test_with_many_replicas_the_choice_is_sound(traffic, seed):
    """More than it looks at, some of them not usable: what it says is cached is, and the records agree."""
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(3 * CANDIDATES)]
    router = make_router(*names, kv_tokens=8 * SIZE, seed=seed)
    for prompt, completions, event in traffic:
        if event == 0:
            gone = rng.choice(names)
            router.remove_replica(gone)
            router.add_replica(gone, 8 * SIZE)
        loads = {name: Load(rng.randint(0, completions)) for name in names if rng.random() < 0.8}
        chain = [hash((1, *prompt[: i + 1])) for i in range(len(prompt))]
        known = {name: router._indexes[name].match(chain) for name in names}
        choice = choose(router, chain, loads or {"r0": Load()}, rng.choice([None, rng.getrandbits(64)]))
        router.check_integrity()
        assert choice.replica_id in (loads or {"r0"})
        assert choice.cached_tokens == known[choice.replica_id] * SIZE
        assert router._indexes[choice.replica_id].match(chain) == len(chain[:8])
