"""docs/architecture.md lists the files that a streamed chat request crosses: what runs must be what it lists."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx

from rayllm.api.wire import CurveKeys
from rayllm.config.options import BUNDLED_MODEL, EngineConfig
from rayllm.engine.build import start_engine
from rayllm.engine.driver import EngineDriver
from rayllm.engine.socket import EngineSocket
from rayllm.serve.cluster.directory import EngineMember
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.http.app import create_app
from rayllm.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
MOST_FILES = 25
ON_GPUS = {"rayllm/worker/graphs.py"}  # a CPU captures nothing
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 8}


def listed() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("<!-- path -->")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)


class Crossed:
    """While it is `on`: the project's files whose functions are called, in all threads started since `watch`."""

    def __init__(self):
        self.files, self.on = {}, False

    def watch(self):
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def stop(self):
        threading.setprofile(None)
        sys.setprofile(None)

    def _called(self, frame, event, _argument):
        if self.on and event == "call" and frame.f_code.co_name != "<module>":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests") and ".venv" not in path.parts:
                self.files[str(path.relative_to(ROOT))] = None


async def serve_twice(crossed: Crossed) -> None:
    driver = EngineDriver(start_engine(EngineConfig(device="cpu", max_model_len=256)))
    socket = EngineSocket(driver)
    front = ModelFront(FrontModel(name="m", folder=BUNDLED_MODEL), load_tokenizer(BUNDLED_MODEL), "front", "node")
    try:
        while not front.num_replicas:
            await front.update([EngineMember("one", "m", 0, "node", socket.endpoint, False)], CurveKeys("", ""))
            await asyncio.sleep(0.05)
        app = create_app(SimpleNamespace(models={"m": front}, door=front.admission), front.server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for crossed.on in (False, True):
                sys.setprofile(crossed._called)
                answer = await client.post("/v1/chat/completions", json=BODY)
                assert answer.text.count("data:") > 8, answer.text
            crossed.on = False
    finally:
        await front.close()
        socket.close()
        driver.shutdown()


def main() -> None:
    """Print the files that a request crosses."""
    crossed = Crossed()
    crossed.watch()
    asyncio.run(serve_twice(crossed))
    crossed.stop()
    print(json.dumps(list(crossed.files)))


def test_the_way_of_a_request():
    # In a process of its own, where no other test has left anything.
    done = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True, timeout=240)
    files = json.loads(done.stdout.splitlines()[-1])
    way = listed()
    assert len(way) == len(set(way)) <= MOST_FILES
    assert all((ROOT / path).exists() for path in way)
    assert set(way) - set(files) == ON_GPUS
    print(f"{len(files)} files in all:", *sorted(files), sep="\n")


if __name__ == "__main__":
    main()
