"""The directory: who is in it and for how long, in this process and as an actor of Ray that dies."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from support.driver import until, wait_for
from support.serve import LocalDirectory, engine_member

from rayllm import timeouts
from rayllm.api.types import Load
from rayllm.executor.ray_cluster import NAMESPACE
from rayllm.serve.cluster import directory as module
from rayllm.serve.cluster.directory import (
    Directory,
    DirectoryActor,
    DirectoryLink,
    Membership,
    Report,
    ServerMember,
    View,
)

ENGINE = engine_member("one")
SERVER = ServerMember("api", "here", ["m"], "127.0.0.1:80")


def report(member, **fields):
    return Report(member=member, load=Load(3, 40), **fields)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


# ---- who is in it


def test_members_see_each_other(clock):
    directory = Directory(clock)
    assert directory.beat(ENGINE).servers == []
    view = directory.beat(SERVER)
    assert (view.engines, view.servers) == ([ENGINE], [SERVER])
    assert directory.beat() == view, "who only asks is not in it"


def test_what_a_member_says_last_counts(clock):
    directory = Directory(clock)
    directory.beat(ENGINE)
    drains = msgspec.structs.replace(ENGINE, draining=True)
    assert directory.beat(drains).engines == [drains]
    assert directory.beat(SERVER).engines == [drains]


def test_members_that_leave_or_are_silent_go(clock):
    directory = Directory(clock)
    directory.beat(ENGINE)
    directory.beat(SERVER)
    clock.now += timeouts.MEMBER_SILENCE_S
    assert directory.beat(SERVER).engines == [ENGINE]
    clock.now += 0.1
    view = directory.beat(SERVER)
    assert (view.engines, view.servers) == ([], [SERVER])
    assert directory.beat(ENGINE).engines == [ENGINE], "it was only slow"
    assert directory.leave("one") is False
    assert directory.leave("one") is False
    assert directory.leave("api") is True, "nobody is left"


def test_all_hear_when_to_end(clock):
    directory = Directory(clock)
    assert directory.beat(ENGINE).stop_in is None
    directory.stop(10)
    clock.now += 4
    assert directory.beat(ENGINE).stop_in == 6
    assert directory.beat(SERVER).stop_in == 6
    clock.now += 7
    assert directory.beat(ENGINE).stop_in == 0


def test_api_servers_share_a_key_that_engines_know(clock):
    directory = Directory(clock)
    keys = directory.beat(ENGINE).front_keys
    assert directory.beat(SERVER).front_keys == keys
    assert len(keys.public) == len(keys.secret) == 40
    assert Directory(clock).beat().front_keys != keys
    view = directory.beat()
    assert Directory(clock).beat(SERVER, view).front_keys == keys, "a new directory takes them over"


def test_members_hear_only_what_is_new(clock, monkeypatch):
    directory = Directory(clock)
    first = directory.beat(SERVER)
    assert first.gone is None
    directory.beat(ENGINE)
    news = directory.beat(SERVER, first)
    assert (news.engines, news.servers, news.gone) == ([ENGINE], [], [])
    view = first.updated(news)
    assert (view.engines, view.servers, view.gone) == ([ENGINE], [SERVER], None)
    drains = msgspec.structs.replace(ENGINE, draining=True)
    directory.beat(drains)
    later = view.updated(directory.beat(SERVER, view))
    assert later.engines == [drains]
    directory.leave("one")
    last = later.updated(directory.beat(SERVER, later))
    assert (last.engines, last.servers) == ([], [SERVER])
    assert first.updated(directory.beat(SERVER, first)) == last, "who has missed a lot"
    directory.beat(SERVER, last)
    same = directory.beat(SERVER, last)
    assert (same.engines, same.servers, same.gone, same.version) == ([], [], [], last.version)
    new = Directory(clock)
    assert new.beat(ENGINE, last).gone is None, "another directory tells all"
    monkeypatch.setattr(module, "MAX_CHANGES", 2)
    for name in ("a", "b", "c"):
        directory.beat(engine_member(name))
    assert directory.beat(SERVER, last).gone is None, "what is new since then is not known any more"
    assert {each.member_id for each in directory.beat(SERVER, last).engines} == {"a", "b", "c"}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["beat", "drain", "leave", "wait", "look", "new"])),
        max_size=60,
    )
)
def test_a_view_that_is_kept_up_to_date_is_the_whole_one(events):
    clock = Clock()
    directory, view = Directory(clock), None
    for name, event in events:
        if event in ("beat", "drain"):
            directory.beat(engine_member(name, draining=event == "drain"))
        elif event == "leave":
            directory.leave(name)
        elif event == "wait":
            clock.now += 2
        elif event == "new":
            directory = Directory(clock)
        if event == "look":
            news = directory.beat(SERVER, view)
            view = news if view is None else view.updated(news)
            whole = directory.beat()
            assert sorted(view.engines, key=str) == sorted(whole.engines, key=str)
            assert (view.servers, view.version, view.gone) == ([SERVER], whole.version, None)


# ---- what it tells of them to `rayllm status`


def test_reports_come_and_go_with_their_members(clock):
    directory = Directory(clock)
    directory.tell(report(ENGINE))
    assert directory.status().reports == [], "it has not registered with this directory"
    for member in (ENGINE, SERVER):
        directory.beat(member)
        directory.tell(report(member))
    assert directory.status().reports == [report(ENGINE), report(SERVER)]
    directory.leave("one")
    directory.tell(report(ENGINE))  # which was still on its way
    status = directory.status()
    assert (status.reports, status.incidents) == ([report(SERVER)], []), "it left in good order"


def test_what_broke_lately(clock):
    directory = Directory(clock)
    for member in (ENGINE, SERVER):
        directory.beat(member)
    directory.tell(report(ENGINE, num_recoveries=1, recovery_seconds=0.5))
    assert directory.status().incidents == [], "of before the directory was made"
    directory.tell(report(ENGINE, num_recoveries=2, recovery_seconds=0.75))
    clock.now += timeouts.MEMBER_SILENCE_S + 0.1
    assert directory.status().reports == []
    directory.beat(SERVER)
    directory.tell(report(SERVER))
    incidents = directory.status().incidents
    assert [(each.member, each.seconds) for each in incidents] == [(ENGINE, 0.25), (ENGINE, None)]
    assert all(0 <= time.time() - each.at < 60 for each in incidents)


# ---- following it


def test_a_follower_says_what_it_is_and_hears_the_rest_and_outlives_errors():
    async def scenario():
        directory, member, views, stopped = LocalDirectory(), [ENGINE], [], []

        async def on_view(view):
            views.append(view)
            if len(views) == 1:
                raise RuntimeError("a bug")

        async def on_stop():
            stopped.append(membership.stop_at)

        membership = Membership(directory, lambda: member[0], lambda: report(member[0]), on_view, on_stop)
        await until(lambda: len(views) == 2)
        member[0] = msgspec.structs.replace(ENGINE, draining=True)
        directory.ask(SERVER)
        await until(lambda: views[-1].engines == member and views[-1].servers == [SERVER])
        directory.directory = Directory()  # it died, and is made anew
        await until(lambda: views[-1].servers == [] and views[-1].engines == member)
        await until(lambda: directory.directory.status().reports, 2 * timeouts.REPORT_S)
        assert directory.directory.status().reports == [report(member[0])]
        assert not membership.is_stopping
        directory.stop(60)
        await until(lambda: stopped)
        await membership.stop_within(10**9)  # it has stopped
        assert directory.ask().engines == []
        assert len(stopped) == 1 and stopped[0] <= time.monotonic() + 60

    asyncio.run(scenario())


# ---- the actor


@pytest.fixture
def links(ray_cluster, monkeypatch):
    """Two members' links to the same directory, which wait for Ray to start it on a busy machine."""
    monkeypatch.setattr(timeouts, "DIRECTORY_S", 30.0)
    found = DirectoryLink("test"), DirectoryLink("test")
    yield found
    found[0].remove()


def actor():
    return ray.get_actor("directory of test", namespace=NAMESPACE)


def test_a_directory_that_dies_is_made_anew_and_members_register_again(links):
    one, two = links
    assert "test" not in [link.app_name for link in DirectoryLink.all()]
    one.ask(ENGINE)
    before = two.ask(SERVER)
    assert (before.engines, before.servers) == ([ENGINE], [SERVER])
    one.tell(report(ENGINE))
    (link,) = [link for link in DirectoryLink.all() if link.app_name == "test"]
    assert link.status().reports == [report(ENGINE)]

    def register():
        one.ask(ENGINE)
        view = two.ask(SERVER)
        return view is not None and (view.engines, view.servers) == ([ENGINE], [SERVER]) and view

    ray.kill(actor(), no_restart=False)  # Ray makes it anew
    wait_for(register, 60)
    ray.kill(actor())  # the members have to
    wait_for(register, 60)
    assert register().front_keys == before.front_keys, "members bring them along"


def test_the_last_one_takes_it_along(links):
    one, two = links
    one.ask(ENGINE)
    two.ask(SERVER)
    one.leave("one")
    assert two.ask().servers == [SERVER]
    two.leave("api")
    with pytest.raises(ValueError, match="directory of test"):
        actor()
    two.remove()  # which is no error


def test_members_go_on_without_an_answer(links, monkeypatch):
    monkeypatch.setattr(timeouts, "DIRECTORY_S", 0.0)
    assert links[0].ask(ENGINE) is None
    links[0].leave("one")
    monkeypatch.setattr(timeouts, "DIRECTORY_S", 30.0)
    assert links[0].ask(SERVER).servers == [SERVER]


def test_members_of_another_version_may_have_other_fields():
    class ServerMemberOfTomorrow(msgspec.Struct, tag="ServerMember"):
        member_id: str
        node_id: str
        colour: str = "blue"

    actor = DirectoryActor()
    seen = actor.beat(msgspec.msgpack.encode((ServerMemberOfTomorrow("new", "there"), None)))
    assert msgspec.msgpack.decode(seen, type=View).servers == [ServerMember("new", "there")]
    seen = actor.beat(msgspec.msgpack.encode((None, None)))
    assert msgspec.msgpack.decode(seen, type=View).servers[0].member_id == "new"


def test_a_member_is_not_silent_while_the_threads_of_its_loop_are_busy():
    async def check():
        directory, member = LocalDirectory(), ServerMember("me", "here", ["m"], "127.0.0.1:1")

        async def nothing(_view=None):
            pass

        membership = Membership(directory, lambda: member, lambda: Report(member=member, load=Load()), nothing, nothing)
        await until(lambda: directory.ask().servers)
        work = [asyncio.ensure_future(asyncio.to_thread(time.sleep, 0.2)) for _ in range(400)]
        await asyncio.sleep(timeouts.MEMBER_SILENCE_S + 1)
        assert directory.ask().servers
        for each in work:
            each.cancel()
        membership._following.cancel()

    asyncio.run(check())
