"""`give_back_memory`: what this process has freed, back to the system."""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD = -1  # malloc.h
KEPT_BYTES = 2**20  # that an arena may keep free at its end


def give_back_memory() -> None:
    """Give the system the pages that this process has freed, and keep fewer from now on.

    glibc keeps them: each thread frees into an arena of its own, which shrinks only from its end, and only by what is
    beyond twice the largest block that was ever freed, up to 64 MiB. A text of 1 MiB that is tokenized takes 130 MiB,
    in arenas that differ from one time to the next. malloc_trim gives back all but the ends, and the threshold those.
    It takes 10 to 20 ms after such a text, in which other Python threads run. Without effect where there is no glibc.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.malloc_trim(0)
