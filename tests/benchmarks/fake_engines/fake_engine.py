"""What the fake engines share: notes of what they were asked, and a server that streams as theirs do."""

import json
import os
import subprocess
import sys

from support.sse_server import FakeServer


def note(**what):
    """Add a line to the file that the test reads."""
    assert "rayllm" not in sys.modules
    with open(os.environ["FAKE_ENGINE_NOTES"], "a") as file:
        file.write(json.dumps(what) + "\n")


def serve(args):
    """A server with a worker process, which outlives it; neither ends by SIGINT."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(server=vars(args), pids=[os.getpid(), worker.pid], folder=os.getcwd())
    print("the weights are loaded", flush=True)
    if args.load_format == "broken":
        sys.exit("no kernel image is available")

    def answer(handler, body):
        if args.load_format == "refuses":
            return handler.whole(500, {"error": {"message": "illegal memory access"}})
        handler.begin()
        for count in range(1, body["max_tokens"] + (args.load_format != "short")):
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            handler.event({"choices": [{"text": "x"}], "usage": usage})
        handler.end()

    FakeServer(answer, args.port).serve_forever()
