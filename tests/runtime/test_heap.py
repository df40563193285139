"""Freed memory really goes back, and no more often than asked."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest

from runtime.heap import Heap

CHUNK, COUNT = 64 << 10, 2000  # under malloc's threshold for maps of their own


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this C library does not trim")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    return libc


def test_what_lies_free_under_something_in_use_goes_back(libc: ctypes.CDLL) -> None:
    chunks = [libc.malloc(CHUNK) for _ in range(COUNT)]
    for chunk in chunks:
        ctypes.memset(chunk, 1, CHUNK)
    for chunk in chunks[:-1]:  # the last one keeps the heap's end where it is
        libc.free(chunk)
    before = resident_bytes()
    assert Heap(period_s=0.0).trim_when_due()
    assert before - resident_bytes() > CHUNK * COUNT // 2
    libc.free(chunks[-1])


def test_trims_once_a_period(libc: ctypes.CDLL) -> None:
    now = [0.0]
    heap = Heap(period_s=10.0, clock_s=lambda: now[0])
    calls: list[int] = []
    heap._trim = lambda pad: calls.append(pad) or 1  # type: ignore[func-returns-value]
    for now[0] in (5.0, 9.9, 10.0, 15.0, 19.9, 25.0):
        heap.trim_when_due()
    assert len(calls) == 2


def test_without_malloc_trim_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.heap._find_trim", lambda: None)
    assert not Heap(period_s=0.0).trim_when_due()
