"""One client's bad requests beside others' streams: how long does anybody wait, and what memory stays? CPU.

    python benchmarks/hostile.py [--model FOLDER] [--mib 31 2.9] [--copies 1] [--only text ids]

Starts the server, keeps streams going, asks /health every 20 ms, and sends each input of `BODIES`, made as long as each
of --mib says, --copies at once; then the connections of `CONNECTIONS`, all from another process. Prints for each the
statuses, its time, the longest time that /health took and that a stream went without a token, and the memory of all of
the server's processes before and after. Exit code 1 if a stream broke off.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from http_load import first_model
from launched_server import launched
from serve_soak import memory_mib

NUM_STREAMS = 2
SILENT_CONNECTIONS = 4100
ATTACKER = "127.0.0.2"  # whence they come: an address that floods is closed out, and others are not
SILENT_S = 5.0  # how long they are watched
LIMIT_S = 300.0  # of one request

WORDS = "The quick brown fox, it jumps over the lazy dog {again} [and] again. "


def filled(begin: str, unit: str, end: str, size: int) -> bytes:
    """A text of about `size` bytes: `unit` again and again between `begin` and `end`; a # in it becomes a number."""
    count = size // len(unit)
    many = "".join(unit.replace("#", str(i)) for i in range(count)) if "#" in unit else unit * count
    return f"{begin}{many.rstrip(',')}{end}".encode()


# name -> (path, the body: what stands before, what is repeated, what stands behind)
BODIES: dict[str, tuple[str, str, str, str]] = {
    "text": ("/v1/completions", '{"prompt": "', WORDS, '"}'),
    "one word": ("/v1/completions", '{"prompt": "', "a", '"}'),
    "spaces": ("/v1/completions", '{"prompt": "', " ", '"}'),
    "escapes": ("/v1/completions", '{"prompt": "', "\\u00e9", '"}'),
    "tokenize": ("/tokenize", '{"prompt": "', WORDS, '"}'),
    "tokenize messages": ("/tokenize", '{"messages": [', '{"role":"user","content":"a"},', "]}"),
    "embeddings": ("/v1/embeddings", '{"input": "', WORDS, '"}'),
    "many embeddings": ("/v1/embeddings", '{"input": [', '"a",', "]}"),
    "chat": ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "', WORDS, '"}]}'),
    "messages": ("/v1/chat/completions", '{"messages": [', '{"role":"user","content":"a"},', "]}"),
    "wrong messages": ("/v1/chat/completions", '{"messages": [', "{},", "]}"),
    "parts": (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": [',
        '{"type":"text","text":"a"},',
        "]}]}",
    ),
    "long messages": ("/v1/chat/completions", '{"messages": [', f'{{"role":"user","content":"{WORDS * 30}"}},', "]}"),
    "ids": ("/v1/completions", '{"prompt": [', "1234,", "]}"),
    "prompts of ids": ("/v1/completions", '{"prompt": [', "[1],", "]}"),
    "prompts of text": ("/v1/completions", '{"prompt": [', '"a",', "]}"),
    "1,000 prompts": ("/v1/completions", '{"max_tokens": 1, "prompt": [', "", "]}"),  # of an equal length each
    "1,000 prompts of ids": ("/v1/completions", '{"max_tokens": 1, "prompt": [', "", "]}"),
    "detokenize": ("/detokenize", '{"tokens": [', "100,", "]}"),
    "unknown fields": ("/v1/completions", '{"prompt": "a", "_": 1, ', '"a#": 1,', "}"),
    "biases": ("/v1/completions", '{"prompt": "a", "logit_bias": {', '"#": 1,', "}}"),
    "stops": ("/v1/completions", '{"prompt": "a", "stop": [', "1,", "]}"),
    "metadata": ("/v1/completions", '{"prompt": "a", "metadata": {', '"a#": 1,', "}}"),
    "schema": (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": '
        '{"name": "a", "schema": {"properties": {',
        '"a#": {"type": "string"},',
        "}}}}}",
    ),
    "nested": ("/v1/completions", '{"prompt": ', "[", ""),
    "no JSON": ("/v1/completions", "", "x", ""),
}


def make_body(name: str, size: int) -> bytes:
    _, begin, unit, end = BODIES[name]
    if not unit:
        each = size // 1000 - 4
        text = (WORDS * (each // len(WORDS) + 1))[:each]
        unit = f"[{'1234,' * (each // 5)}1]," if "ids" in name else f'"{text}",'
    return filled(begin, unit, end, size)


class Watch:
    """Streams and /health, asked all the time by threads. `worst` gives the longest waits since it was last called."""

    def __init__(self, host: str, model: str):
        self._host, self._model = host, model
        self._token = json.loads(ask(host, "POST", "/tokenize", b'{"prompt": "a"}')[1])["tokens"][-1]
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._worst: Counter[str] = Counter()
        self._since: dict[object, tuple[str, float]] = {}  # what is being waited for -> (its kind, since when)
        self.broken: list[str] = []  # what was wrong with streams that ended early
        self._threads = [threading.Thread(target=self._ask_health)]
        self._threads += [threading.Thread(target=self._stream) for _ in range(NUM_STREAMS)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        time.sleep(2)
        self.worst()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def worst(self) -> tuple[float, float]:
        """The longest times in seconds since the last call: of /health, and between two events of a stream."""
        now = time.monotonic()
        with self._lock:
            for kind, since in self._since.values():
                self._worst[kind] = max(self._worst[kind], now - since)
            found, self._worst = self._worst, Counter()
        return found["health"], found["stream"]

    @contextlib.contextmanager
    def _waiting(self, kind: str) -> Iterator[None]:
        key, start = object(), time.monotonic()
        with self._lock:
            self._since[key] = kind, start
        try:
            yield
        finally:
            with self._lock:
                del self._since[key]
                self._worst[kind] = max(self._worst[kind], time.monotonic() - start)

    def _ask_health(self) -> None:
        while not self._stop.wait(0.02):
            with self._waiting("health"):
                status = ask(self._host, "GET", "/health")[0]
            if status != 200:
                self.broken.append(f"/health: {status}")

    def _stream(self) -> None:
        body = {"model": self._model, "prompt": [5] * 16, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        body["logit_bias"] = {str(self._token): 100}  # parts of characters would give no event
        while not self._stop.is_set():
            connection = http.client.HTTPConnection(self._host, timeout=LIMIT_S)
            with contextlib.closing(connection):
                connection.request("POST", "/v1/completions", json.dumps(body))
                response, line = connection.getresponse(), b"-"
                last = line
                while line and not self._stop.is_set():
                    with self._waiting("stream"):
                        line = response.readline()
                    last = line if line.strip() else last
                    if b'{"error"' in line:
                        self.broken.append(line.decode()[:200])
                if not self._stop.is_set() and last.strip() != b"data: [DONE]":
                    self.broken.append(f"ended with {last[:80]!r}")


def ask(host: str, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    """(status, body) of the answer; (0, what went wrong) for none."""
    try:
        with contextlib.closing(http.client.HTTPConnection(host, timeout=LIMIT_S)) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # answered before the body was through
                connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read(200).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, type(error).__name__


def nothing() -> str:
    time.sleep(SILENT_S)
    return ""


def silent(host: str, data: bytes) -> str:
    """Open connections that send `data` and no more; how many were taken, and how many are open after `SILENT_S`."""
    name, _, port = host.partition(":")
    found: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(SILENT_CONNECTIONS):
            try:
                each = socket.create_connection((name, int(port)), timeout=2, source_address=(ATTACKER, 0))
                stack.enter_context(each)
                each.sendall(data)
            except OSError as error:
                found[type(error).__name__] += 1
            else:
                opened.append(each)
        time.sleep(SILENT_S)
        for each in opened:
            each.setblocking(False)
            try:
                found["answered" if each.recv(1) else "closed"] += 1
            except BlockingIOError:
                found["open"] += 1
            except OSError:
                found["closed"] += 1
    return ", ".join(f"{n} {what}" for what, n in found.items())


POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b"
CONNECTIONS: dict[str, bytes] = {
    "silent connections": b"",
    "half-sent headers": b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n",
    "half-sent bodies": POST % (100, b'{"prompt": '),
    "half-sent long bodies": POST % (40_000, b" " * 30_000),
    "half-sent longest bodies": POST % (400_000, b" " * 300_000),
}


def several(copies: int, call: Callable[[], tuple[int, str]]) -> str:
    """What `copies` calls at once gave, counted."""
    found: list[str] = []

    def one() -> None:
        status, text = call()
        found.append(f"{status} {text[:70]}" if status != 200 else "200")

    threads = [threading.Thread(target=one) for _ in range(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ", ".join(f"{n} x {text}" for text, n in Counter(found).items())


def attack(host: str, name: str, mib: float, copies: int) -> str:
    """Send one of the inputs; what came of it."""
    if name in BODIES:
        body, path = make_body(name, int(mib * 2**20)), BODIES[name][0]
        return several(copies, partial(ask, host, "POST", path, body))
    return silent(host, CONNECTIONS[name]) if name in CONNECTIONS else nothing()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint; the bundled one if absent")
    parser.add_argument("--mib", type=float, nargs="+", default=[31.0, 2.9])
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of inputs")
    args = parser.parse_args()
    options = ["--device", "cpu"] if args.model is None else [args.model, "--device", "cpu"]
    with launched(*options) as (url, session_id):
        host, model = url.removeprefix("http://"), first_model(url)

        def memory() -> float:
            return sum(memory_mib(session_id).values())

        print("| input | MiB | answer | s | /health, ms | between tokens, ms | memory, MiB |", flush=True)
        print("|---|---|---|---|---|---|---|", flush=True)
        spawn = multiprocessing.get_context("spawn")
        with Watch(host, model) as watch, ProcessPoolExecutor(1, mp_context=spawn) as attackers:

            def measure(name: str, size: float) -> None:
                before = memory()
                watch.worst()
                start = time.monotonic()
                answer = attackers.submit(attack, host, name, size, args.copies).result()
                seconds = time.monotonic() - start
                time.sleep(0.5)
                health, gap = watch.worst()
                print(
                    f"| {name} | {size:g} | {answer} | {seconds:.1f} | {health * 1e3:.0f} | {gap * 1e3:.0f} "
                    f"| {before:.0f} - {memory():.0f} |",
                    flush=True,
                )

            attackers.submit(nothing).result()  # it has started
            for name in args.only or ["nothing", *BODIES, *CONNECTIONS]:
                for size in args.mib if name in BODIES else [0]:
                    measure(name, size)
    for line, count in Counter(watch.broken).items():
        print(f"{count} x {line}")
    return 1 if watch.broken else 0


if __name__ == "__main__":
    sys.exit(main())
