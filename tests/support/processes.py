"""Whether a process runs."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """Not after its end, whether its parent has noticed that or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
