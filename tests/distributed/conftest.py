"""Modules beside these tests are importable by name, here and in the actors, which get this process's module path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
