"""SGLang's server, with the flags that the tests use."""

import argparse

from fake_engine import serve

parser = argparse.ArgumentParser()
parser.add_argument("--model-path", dest="model")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--load-format", default="auto")
parser.add_argument("--context-length", type=int, dest="max_model_len")
serve(parser.parse_args())
