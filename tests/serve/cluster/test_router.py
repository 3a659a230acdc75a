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
    ROUTING_BLOCK,
    TOKENS_A_COMPLETION,
    PrefixIndex,
    Router,
    prefix_hashes,
    weight,
)

SIZE = ROUTING_BLOCK


def test_hashes_are_of_whole_blocks_and_of_all_before():
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
    index.add([1, 2, 3])
    index.add([1, 7])
    assert index.match([1, 2, 3]) == 3
    index.add([1, 8])
    assert index.match([1, 2, 3]) == 2
    index.add([9])
    assert [index.match(each) for each in ([1, 2, 3], [1, 7], [1, 8], [9])] == [1, 2, 2, 1]
    index.add([11, 12, 13, 14, 15, 16])
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
        index.add(chain)
        index.check_integrity()
        seen.update(chain)
        assert index.match(chain) == min(len(chain), capacity)
        assert len(index) <= capacity
        assert set(index._parents) <= seen


def make_router(*names, kv_tokens=1000 * SIZE, seed=0):
    router = Router(random.Random(seed))
    for name in names:
        router.add_replica(name, kv_tokens)
    return router


def test_a_prompt_goes_where_most_of_it_is():
    router = make_router("a", "b")
    idle = {"a": Load(), "b": Load()}
    one, two = [1, 2, 3, 4], [1, 2, 7, 8]
    first = router.choose(one, idle)
    assert first.cached_tokens == 0
    other = "b" if first.replica_id == "a" else "a"
    busy = {first.replica_id: Load(100, 0), other: Load()}
    assert router.choose(two, busy) == (other, 0)
    assert router.choose(one, idle) == (first.replica_id, 4 * SIZE)
    assert router.choose([*two, 9], idle) == (other, 4 * SIZE)
    assert router.choose([1, 2, 3, 5], {other: Load()}) == (other, 2 * SIZE), "a replica that is not offered"


@pytest.mark.parametrize("least", [0, 3, 100])
def test_a_replica_that_is_too_busy_is_not_preferred(least):
    limit = max(least * BUSY_FACTOR, least + BUSY_AMOUNT)
    for load, preferred in ((int(limit), True), (int(limit) + 1, False)):
        router = make_router("a", "b")
        router.choose([1], {"a": Load()})
        chosen = router.choose([1], {"a": Load(load, 0), "b": Load(least, 0)})
        assert (chosen.replica_id == "a") is preferred, (load, limit)


def test_a_long_prefix_may_wait_longer():
    def chosen(blocks, queued):
        router = make_router("a", "b", kv_tokens=10**6)
        hashes = list(range(blocks))
        router.choose(hashes, {"a": Load()})
        return router.choose(hashes, {"a": Load(1, queued), "b": Load()}).replica_id

    queued = 20 * TOKENS_A_COMPLETION
    assert chosen(2, queued) == "b"
    assert chosen(queued // SIZE, queued) == "a"


def test_without_a_prefix_the_least_busy_one_is_chosen_and_of_equals_the_emptiest():
    router = make_router(*"abc")
    loads = {"a": Load(5, 0), "b": Load(4, 0), "c": Load(3, 2 * TOKENS_A_COMPLETION)}
    assert {router.choose([i], loads).replica_id for i in range(20)} == {"b"}
    idle = {name: Load() for name in "abc"}
    chosen = [router.choose([100 + i], idle).replica_id for i in range(40)]
    assert set(chosen) == {"a", "c"}, "b has 20 prompts already, these two get as many"
    assert sorted(router.choose([200 + i], idle).replica_id for i in range(9)) == list("aaabbbccc")
    assert len({make_router(*"abc", seed=seed).choose([1], idle).replica_id for seed in range(20)}) == 3


def test_a_replica_that_went_is_forgotten():
    router = make_router("a", "b")
    router.choose([1, 2], {"a": Load()})
    router.remove_replica("a")
    router.remove_replica("a")
    router.add_replica("a", 1000)
    assert set(router._indexes) == {"a", "b"}
    assert router.choose([1, 2], {"a": Load()}) == ("a", 0)


def test_an_index_is_as_large_as_the_replicas_cache(monkeypatch):
    router = make_router("a", kv_tokens=3 * SIZE)
    router.choose([1, 2, 3, 4, 5], {"a": Load()})
    assert router.choose([1, 2, 3, 4, 5], {"a": Load()}).cached_tokens == 3 * SIZE
    monkeypatch.setattr(module, "MAX_INDEX_BLOCKS", 2)
    router.add_replica("a", 10**9)
    router.choose([1, 2, 3], {"a": Load()})
    assert router.choose([1, 2, 3], {"a": Load()}).cached_tokens == 2 * SIZE
    make_router("tiny", kv_tokens=1).choose([1], {"tiny": Load()})


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
        elif event == "remove" and len(router._indexes) > 1:
            router.remove_replica(rng.choice(sorted(router._indexes)))
        loads = {name: Load(rng.randint(0, completions), rng.randint(0, queued)) for name in sorted(router._indexes)}
        chain = [hash((1, *prompt[: i + 1])) for i in range(len(prompt))]
        cached = {name: router._indexes[name].match(chain) * SIZE for name in loads}
        choice = router.choose(chain, loads)
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
