"""Every process of a server is killed, stopped or starved of memory among requests of every kind: what is lost? CPU.

    python benchmarks/kill_matrix.py [--target rank engine] [--signal KILL STOP] [--server ranks] [--list]

Each cell of the matrix sends the requests of `every_kind.py` all at once to a real `rayllm launch` with the bundled
model in its deterministic mode, and strikes one of its processes at a moment when all of them are in flight: those of
many tokens have begun, those of long prompts have not. Every answer must be that of an undisturbed run, to the bit.
Only connections that the API server or the ingress held may break off; what had come is a beginning of what the next
try brings. Afterwards the server must be whole again. Servers:

    ranks      one engine of two ranks; two API servers
    replicas   two engines; two API servers
    both       two engines of two ranks each; two API servers

| signal | what happens |
|---|---|
| KILL | SIGKILL |
| STOP | SIGSTOP, for good |
| pause | SIGSTOP, and SIGCONT after 3 s, before anybody takes it for dead |
| late | SIGSTOP, and SIGCONT when it has been given up |
| memory | the system gives no more memory (RLIMIT_AS, RLIMIT_DATA), and long prompts come |
| again | SIGKILL, and another one for a process that is to replace the first, so many seconds later |
| other engine | SIGKILL of a rank, and of the other engine while the rank is replaced |

What the kernel does when a host or a cgroup is out of memory is SIGKILL, the row KILL of each process. "memory" is the
other way to run out, and there are rows for those who compute. A rank has had what its largest step needs since its
start, so it may go on; the table says so.

A cell and all servers end in bounded time. Exit code 1 if anything was lost, different or left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import every_kind
import httpx
import psutil
from every_kind import Request, Result, ask, difference, make_requests, model_with_tools
from launched_server import (
    PROCESSES,
    STOP_LIMIT_S,
    free_port,
    is_stopped,
    own_session,
    processes_of,
    session_processes,
    wait_until_healthy,
)

from rayllm import timeouts

COMMON = ("--device", "cpu", "--deterministic", "--num-api-servers", "2", "--max-num-batched-tokens", "160")
SERVERS = {"ranks": ("--tp", "2"), "replicas": ("--num-replicas", "2"), "both": ("--tp", "2", "--num-replicas", "2")}
START_LIMIT_S = 180.0
BEGIN_LIMIT_S = 60.0  # for all requests to be in flight
ANSWER_LIMIT_S = 180.0  # for all answers, from the fault on
WHOLE_LIMIT_S = 120.0  # for the server to be whole again, from the end of the fault on
EXIT_LIMIT_S = 10.0  # of a launch that has lost Ray
AMONG_S = 0.5  # how long all streams go on before the late requests come
LATE_S = 0.1  # how long these are there before the fault
TOKENS = 96
PAUSE_S = 3.0
MEMORY_LIMIT_S = 60.0  # for a process that gets no more memory to fail
LONG_PROMPT, LONG_PROMPTS = 1900, 4  # tokens of a prompt that takes memory, and how many are computed at once
BREAKS = ("API server", "ingress")  # whose connections break off with them


class Server:
    """A launched server, and how many processes of each kind it has when it is whole."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], url: str):
        self.name, self.process, self.url = name, process, url
        self.counts: dict[str, int] = {}
        self.requests: list[Request] = []
        self.undisturbed: list[Result] = []
        self.rng = random.Random(0)

    def find(self, kind: str) -> list[int]:
        return processes_of(self.process.pid, kind)

    async def prepare(self, tokens: int) -> None:
        """Once it is up: count its processes, and have the undisturbed answers. Raises RuntimeError."""
        num_engines = 2 if "--num-replicas" in SERVERS[self.name] else 1
        await self._wait_for_replicas(num_engines, time.monotonic() + START_LIMIT_S)
        await asyncio.sleep(2)  # what starts beside the engines
        self.counts = {kind: len(self.find(kind)) for kind in PROCESSES}
        self.requests = await make_requests(self.url, tokens)
        started = time.monotonic()
        outcome = await run_requests(self, None, "undisturbed")
        self.undisturbed = outcome.results
        gap = longest_gap(self, outcome)
        print(f"  {self.name}, undisturbed: {time.monotonic() - started:.1f} s, longest gap {gap:.1f} s", flush=True)
        failed = [f"{r.kind}: {x.failure}" for r, x in zip(self.requests, outcome.results, strict=True) if x.failure]
        if failed:
            raise RuntimeError(f"undisturbed requests failed: {failed}")

    async def is_whole_again(self, gone: set[int]) -> bool:
        """Wait until it has all its processes, none of them `gone`, and answers; False if it takes too long."""
        deadline = time.monotonic() + WHOLE_LIMIT_S
        while time.monotonic() < deadline:
            found = {kind: self.find(kind) for kind in PROCESSES}
            everybody = [process for each in found.values() for process in each]
            if {kind: len(each) for kind, each in found.items()} == self.counts and not (
                gone & set(everybody) or any(map(is_stopped, everybody))
            ):
                try:
                    await self._wait_for_replicas(self.counts["engine"], deadline)
                except RuntimeError:
                    return False
                return True
            await asyncio.sleep(0.1)
        return False

    async def _wait_for_replicas(self, count: int, deadline: float) -> None:
        """Until two API servers in a row say that there are so many, and one has answered a question."""
        in_a_row = 0
        async with httpx.AsyncClient() as client:
            while time.monotonic() < deadline:
                try:
                    text = (await client.get(f"{self.url}/metrics", timeout=5, headers={"connection": "close"})).text
                    lines = [line for line in text.splitlines() if line.startswith("rayllm:num_replicas{")]
                    in_a_row = in_a_row + 1 if lines and float(lines[0].split()[-1]) == count else 0
                    if in_a_row >= 4:
                        body = {"prompt": "a", "max_tokens": 1}
                        answer = await client.post(f"{self.url}/v1/completions", json=body, timeout=20)
                        if answer.status_code == 200:
                            return
                except httpx.HTTPError:
                    in_a_row = 0
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the server has not had {count} engines in time")


Strike = Callable[["Fault"], Coroutine[None, None, None]]


@dataclass
class Fault:
    """Strikes a server. victims: processes that must not be there when the server is whole again."""

    server: Server
    kind: str
    when: float = 0.0  # time.monotonic() of the first blow
    victims: set[int] = field(default_factory=set)
    stopped: list[int] = field(default_factory=list)
    note: str = ""  # what is wrong with the blow itself
    remark: str = ""  # what is worth saying, and not wrong
    ends_server: bool = False

    async def strike(self, strike: Strike) -> float | None:
        """Strike; seconds until the server is whole again, None if it is not within WHOLE_LIMIT_S."""
        await strike(self)
        if self.ends_server or not await self.server.is_whole_again(self.victims):
            return None
        return time.monotonic() - self.when

    def pick(self) -> int:
        return self.server.rng.choice(self.server.find(self.kind))

    def send(self, process: int, number: int) -> None:
        self.when = self.when or time.monotonic()
        os.kill(process, number)

    def kill(self, process: int) -> None:
        self.send(process, signal.SIGKILL)
        self.victims.add(process)

    def stop(self) -> int:
        process = self.pick()
        self.send(process, signal.SIGSTOP)
        self.stopped.append(process)
        return process

    def clean_up(self) -> None:
        """Let nothing stand still."""
        for process in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


async def strike_kill(fault: Fault) -> None:
    fault.kill(fault.pick())


async def strike_stop(fault: Fault) -> None:
    fault.victims.add(fault.stop())


async def strike_pause(fault: Fault, seconds: float = PAUSE_S) -> None:
    process = fault.stop()
    await asyncio.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # it was given up and killed
        os.kill(process, signal.SIGCONT)


async def strike_memory(fault: Fault) -> None:
    process = psutil.Process(victim := fault.pick())
    fault.when = time.monotonic()
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        process.rlimit(limit, (1, process.rlimit(limit)[1]))
    fault.victims.add(victim)
    # What was allocated for the requests before may be enough for the rest of them, so others go on asking for more.
    needing = [asyncio.create_task(_need_memory(fault, process)) for _ in range(LONG_PROMPTS)]
    try:
        await asyncio.to_thread(process.wait, MEMORY_LIMIT_S)
    except psutil.TimeoutExpired:
        fault.remark = f"it needed no more memory in {MEMORY_LIMIT_S:g} s"
        fault.victims.clear()
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            process.rlimit(limit, (process.rlimit(limit)[1],) * 2)
    await asyncio.gather(*needing)


async def _need_memory(fault: Fault, process: psutil.Process) -> None:
    """Send long prompts, one after the other, while the process is there; each must be answered as all others."""
    deadline = time.monotonic() + MEMORY_LIMIT_S
    async with every_kind.new_client() as client:
        while process.is_running() and time.monotonic() < deadline:
            prompt = [fault.server.rng.randrange(100, 400) for _ in range(LONG_PROMPT)]
            request = Request("long prompt", "/v1/completions", {"prompt": prompt, "max_tokens": 8})
            result = await ask(client, fault.server.url, request, Result())
            if result.failure is not None:
                fault.note = f"{request.kind} failed: {result.failure}"
                return


async def strike_again(fault: Fault, delay: float) -> None:
    """A process is killed, and so many seconds later one of those that are to replace it, as far as that has come."""
    server = fault.server
    everybody, old = set(session_processes(server.process.pid)), set(server.find(fault.kind))
    fault.kill(fault.pick())
    await asyncio.sleep(delay)
    # Ray starts a process before it makes an actor of it, by which it gets its name.
    starting = set(session_processes(server.process.pid, "ray::IDLE")) - everybody
    starting |= set(session_processes(server.process.pid, "default_worker.py")) - everybody
    if new := set(server.find(fault.kind)) - old or starting:
        fault.kill(max(new))
    else:
        fault.note = "there was no new process yet"


async def strike_both(fault: Fault, delay: float) -> None:
    """A rank of one engine is killed, and the other engine while the first one has its ranks replaced."""
    rank = fault.pick()
    engines = fault.server.find("engine")
    other = next(each for each in engines if not _talks(each, rank))
    fault.kill(rank)
    await asyncio.sleep(delay)
    fault.victims |= {each for each in fault.server.find("rank") if _talks(other, each)}
    fault.kill(other)


def _talks(one: int, other: int) -> bool:
    """Whether there is a TCP connection between two processes."""
    ports = {each.laddr.port for each in psutil.Process(one).net_connections("tcp") if each.laddr}
    return any(each.raddr.port in ports for each in psutil.Process(other).net_connections("tcp") if each.raddr)


@dataclass(frozen=True)
class Cell:
    server: str
    target: str
    signal: str
    strike: Strike


def _cells() -> Iterator[Cell]:
    silences = {"rank": timeouts.RANK_SILENCE_S, "engine": timeouts.SILENCE_S}
    for server, target in (
        ("ranks", "rank"),
        ("ranks", "standby"),
        ("ranks", "engine"),
        ("replicas", "engine"),
        ("replicas", "API server"),
        ("replicas", "ingress"),
        ("replicas", "raylet"),
        ("replicas", "GCS"),
    ):
        yield Cell(server, target, "KILL", strike_kill)
        yield Cell(server, target, "STOP", strike_stop)
        yield Cell(server, target, "pause", strike_pause)
        if target in silences:
            yield Cell(server, target, "late", partial(strike_pause, seconds=silences[target] + 2))
            yield Cell(server, target, "memory", strike_memory)
    for delay in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0):
        yield Cell("ranks", "rank", f"again after {delay:g} s", partial(strike_again, delay=delay))
    for delay in (2.0, 4.0, 8.0):
        yield Cell("replicas", "engine", f"again after {delay:g} s", partial(strike_again, delay=delay))
    for delay in (0.5, 2.0):
        yield Cell("both", "rank", f"other engine after {delay:g} s", partial(strike_both, delay=delay))


@dataclass
class Outcome:
    """What came of requests, in their order. missing: what was wrong with the moment of the fault.

    whole: seconds from the fault until the server had got over it; None if it has not.
    """

    results: list[Result]
    whole: float | None = None
    missing: list[str] = field(default_factory=list)


async def run_requests(
    server: Server, fault: Fault | None, salt: str, strike: Strike | None = None, retry: bool = True
) -> Outcome:
    """Send all requests; strike when all are in flight; return when all are answered, or time is up."""
    requests = [request.salted(salt) if request.late else request for request in server.requests]
    outcome = Outcome([Result() for _ in requests])
    tasks: dict[int, asyncio.Task[Result]] = {}

    async with every_kind.new_client() as client:

        def send(late: bool) -> None:
            for number, request in enumerate(requests):
                if request.late == late:
                    work = ask(client, server.url, request, outcome.results[number], retry)
                    tasks[number] = asyncio.create_task(work)

        send(late=False)
        deadline = time.monotonic() + BEGIN_LIMIT_S
        while any(requests[n].stream and outcome.results[n].first is None and not tasks[n].done() for n in tasks):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(AMONG_S)
        send(late=True)
        await asyncio.sleep(LATE_S)
        for number, request in enumerate(requests):
            if tasks[number].done():
                outcome.missing.append(f"{request.kind} was over before the fault")
            elif request.stream and (outcome.results[number].first is None) != request.late:
                outcome.missing.append(f"{request.kind} had {'' if request.late else 'not '}begun before the fault")
        striking = None if fault is None or strike is None else asyncio.create_task(fault.strike(strike))
        _, late = await asyncio.wait(tasks.values(), timeout=ANSWER_LIMIT_S)
        for number, task in tasks.items():
            if task in late:
                task.cancel()
                outcome.results[number].failure = f"no answer within {ANSWER_LIMIT_S:g} s"
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for number, task in tasks.items():
            if not task.cancelled() and task.exception() is not None:
                outcome.results[number].failure = repr(task.exception())
        if striking is not None:
            outcome.whole = await striking
    return outcome


def longest_gap(server: Server, outcome: Outcome) -> float:
    """Seconds between two events of a stream that has an event soon after each token."""
    return max(x.gap for request, x in zip(server.requests, outcome.results, strict=True) if request.is_even)


def judge(server: Server, outcome: Outcome, may_break: bool, is_lost: bool) -> tuple[list[str], Counter[str]]:
    """(what is wrong, the figures of the table's row). is_lost: whether the server is gone, with what it had."""
    wrong, figures = list(outcome.missing), Counter[str](streams=len(outcome.results))
    for request, result, before in zip(server.requests, outcome.results, server.undisturbed, strict=True):
        figures["broken"] += bool(result.breaks)
        if result.failure is not None or (result.breaks and not may_break):
            figures["failed"] += 1
            wrong.append(f"{request.kind} failed: {result.failure or 'the connection broke off'}")
            continue
        found = difference(request, result, before.answer, is_answered=not (is_lost and result.breaks))
        if found is not None:
            figures["different"] += 1
            wrong.append(f"{request.kind} is different: {found}")
    return wrong, figures


HEADER = """\
| server | target | signal | streams | failed | broken with the process | different | longest gap, s | whole again, s |
|---|---|---|---|---|---|---|---|---|"""


def print_row(cell: Cell, figures: Counter[str], gap: str, whole: str) -> None:
    counted = " | ".join(str(figures[name]) for name in ("streams", "failed", "broken", "different"))
    print(f"| {cell.server} | {cell.target} | {cell.signal} | {counted} | {gap} | {whole} |", flush=True)


async def run_cell(server: Server, cell: Cell, number: int) -> list[str]:
    """Print a cell's row; returns what is wrong. A server that has lost Ray has to end, or to let itself be ended."""
    is_lost = cell.target in ("raylet", "GCS") and cell.signal in ("KILL", "STOP")
    breaks_all = is_lost and cell.signal == "KILL"
    fault, wrong = Fault(server, cell.target, ends_server=is_lost), []
    try:
        outcome = await run_requests(server, fault, f"cell {number}", cell.strike, retry=not breaks_all)
        if is_lost:
            wrong = await asyncio.to_thread(_wait_for_end, server, cell)
    finally:
        fault.clean_up()
    answers, figures = judge(server, outcome, cell.target in BREAKS or breaks_all, breaks_all)
    whole = "-" if is_lost else "never" if outcome.whole is None else f"{outcome.whole:.1f}"
    if whole == "never":
        now = {kind: len(server.find(kind)) for kind in PROCESSES}
        wrong.append(f"the server is not whole again: {now} processes instead of {server.counts}")
    print_row(cell, figures, f"{longest_gap(server, outcome):.1f}", whole)
    if fault.remark:
        print(f"  {fault.remark}", flush=True)
    return answers + wrong + ([fault.note] if fault.note else [])


def _wait_for_end(server: Server, cell: Cell) -> list[str]:
    """What is wrong with the end of a server whose raylet or GCS is lost."""
    process, wrong = server.process, []
    if cell.signal != "KILL":
        process.terminate()
    try:
        code = process.wait(EXIT_LIMIT_S if cell.signal == "KILL" else STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        return ["`rayllm launch` has not ended"]
    if code == 0 and cell.signal == "KILL":
        wrong.append("exit code 0")
    if left := session_processes(process.pid):
        wrong.append(f"{len(left)} processes are left")
    return wrong


@contextlib.contextmanager
def launched(name: str, port: int, log: Path | None = None) -> Iterator[Server]:
    """A server that is up; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "rayllm.cli", "launch", "--port", str(port), *COMMON, *SERVERS[name]]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command.append(str(model_with_tools(Path(folder))))
        process = stack.enter_context(own_session(command, log=log))
        wait_until_healthy(process, url, START_LIMIT_S, log)
        yield Server(name, process, url)


def run(cells: list[Cell], tokens: int, log: Path | None = None) -> list[str]:
    """Print the table of these cells; returns what is wrong."""
    wrong: list[str] = []
    print(HEADER, flush=True)
    port = free_port()
    for name in dict.fromkeys(cell.server for cell in cells):
        own = [cell for cell in cells if cell.server == name]
        with contextlib.ExitStack() as stack:
            server = None
            for number, cell in enumerate(own):
                if server is None:
                    server = stack.enter_context(launched(name, port, log))
                    asyncio.run(server.prepare(tokens))
                if not server.counts[cell.target]:
                    print_row(cell, Counter(), "-", "not there")
                    continue
                found = asyncio.run(run_cell(server, cell, number))
                for line in found:
                    print(f"  {line}", flush=True)
                wrong += found
                if found or cell.target in ("raylet", "GCS"):  # the same port has to serve again
                    stack.close()
                    server = None
            if own[-1].target in ("raylet", "GCS"):
                stack.enter_context(launched(name, port, log))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=PROCESSES, default=list(PROCESSES))
    parser.add_argument("--signal", nargs="+", help="names of signals, or their first words")
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of most streams")
    parser.add_argument("--log", type=Path, help="file for what the last server says")
    parser.add_argument("--list", action="store_true", help="only list the cells")
    args = parser.parse_args()
    cells = [
        cell
        for cell in _cells()
        if cell.target in args.target
        and cell.server in args.server
        and (args.signal is None or any(cell.signal.startswith(each) for each in args.signal))
    ]
    if args.list:
        for cell in cells:
            print(f"{cell.server}: {cell.target}, {cell.signal}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    wrong = run(cells, args.tokens, args.log)
    print(f"{len(wrong)} things are wrong" if wrong else "nothing was lost, nothing was different, nothing is left")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
