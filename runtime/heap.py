"""Gives memory that was freed, and that the C library keeps for later, back to the operating system.

Steps free and take tensors of ever different sizes; without this the resident memory of a server that runs for days
creeps up, though nothing leaks.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

PERIOD_S = 30.0


def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; other C libraries have none."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (ctypes.c_size_t,), ctypes.c_int
    return lambda pad: int(found(pad))


class Heap:
    """Trims the process's heap every `period_s` seconds at most; does nothing where the C library cannot."""

    def __init__(self, period_s: float = PERIOD_S, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._trim, self._period_s, self._clock_s = _find_trim(), period_s, clock_s
        self._due_s = clock_s() + period_s

    def trim_when_due(self) -> bool:
        """Whether it was time, and the C library gave something back."""
        now_s = self._clock_s()
        if self._trim is None or now_s < self._due_s:
            return False
        self._due_s = now_s + self._period_s
        given_back = self._trim(0) == 1
        log.debug("trimmed the heap in %.1f ms", 1e3 * (self._clock_s() - now_s))
        return given_back
