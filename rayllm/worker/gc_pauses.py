"""Keeps the garbage collector's full passes short while an engine runs.

A full pass visits every container in the process: libraries, model and configuration alone take 100 to 200 ms, during
which no step is scheduled. Frozen objects are left out of it; what requests create later is still collected.
"""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect garbage once, then take everything that is alive out of later passes."""
    gc.collect()
    gc.freeze()


def thaw_heap() -> None:
    """Undo `freeze_heap` for the whole process, so that what an engine leaves behind can be collected."""
    gc.unfreeze()
