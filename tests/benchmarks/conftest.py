"""The benchmarks are scripts, which import one another by their plain names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
