"""`vllm serve`, with the flags that the tests use."""

import argparse

from fake_engine import serve

parser = argparse.ArgumentParser()
command = parser.add_subparsers(required=True).add_parser("serve")
command.add_argument("model")
command.add_argument("--host")
command.add_argument("--port", type=int)
command.add_argument("--load-format", default="auto")
command.add_argument("--max-model-len", type=int)
command.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
serve(parser.parse_args())
