"""Times of launches on a GPU: CUDA events, nothing in L2, medians; the card's own copy bandwidth as the yardstick.

Writing `FLUSH_BYTES` before each measured call evicts what the call before left in L2, and gives the host time to queue
the call's launches, so that they follow each other without gaps.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from plugins.kernel import Kernel, KernelRunner, Launch

FLUSH_BYTES = 1 << 30
COPY_BYTES = 2 << 30
WARM_UPS = 3
Call = Callable[[], object]


class Stopwatch:
    """Times calls on one GPU."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def flush(self) -> None:
        """Puts other bytes into L2."""
        self._flush.zero_()

    def seconds(self, call: Call) -> float:
        """Median time of `call`, from its first launch to the end of its last."""
        for _ in range(WARM_UPS):
            call()
        times = []
        for _ in range(self.rounds):
            self.flush()
            begin, end = _event(), _event()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e-3)
        return statistics.median(times)

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written by a device copy of `COPY_BYTES`, per second."""
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self.seconds(lambda: target.copy_(source))

    def read_bytes_per_s(self) -> float:
        """Bytes read per second by torch's largest value of `COPY_BYTES`."""
        source = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device=self.device)
        return COPY_BYTES / self.seconds(source.amax)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass
class TimedRunner:
    """A `KernelRunner` that times each launch by itself, for operations whose host side waits for the device."""

    inner: KernelRunner
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def num_multiprocessors(self) -> int:
        return self.inner.num_multiprocessors

    def run(
        self, kernel: Kernel, entry: str, launch: Launch, params: ctypes.Structure, stream: int | None = None
    ) -> None:
        begin, end = _event(), _event()
        begin.record()
        self.inner.run(kernel, entry, launch, params, stream)
        end.record()
        self.spans.append((begin, end))

    def take_seconds(self) -> float:
        """Time of all launches since the last call."""
        torch.cuda.synchronize(self.device)
        total = sum(float(begin.elapsed_time(end)) for begin, end in self.spans) * 1e-3
        self.spans.clear()
        return total


@dataclass(frozen=True)
class DefinedRunner:
    """A `KernelRunner` that compiles every kernel with further defines, such as HW_NO_BULK=1."""

    inner: KernelRunner
    defines: tuple[tuple[str, int], ...]

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def num_multiprocessors(self) -> int:
        return self.inner.num_multiprocessors

    def run(
        self, kernel: Kernel, entry: str, launch: Launch, params: ctypes.Structure, stream: int | None = None
    ) -> None:
        defined = replace(kernel, defines=(*kernel.defines, *self.defines))
        self.inner.run(defined, entry, launch, params, stream)
