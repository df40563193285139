"""Tables of one step on their way to a device: gathered in one pinned buffer, copied in one transfer.

    staging.begin()                   # the step before has been copied
    ids = staging.put(host_ids)       # a view of device memory; valid once flushed
    lens = staging.put(host_lens)
    staging.flush()                   # one asynchronous copy on the current stream
    ... launches that read ids and lens ...

A device of type cpu (emulated kernels) goes the same way through ordinary memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 16
FIRST_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class _Pair:
    """A buffer on the host and its copy on the device, [num_bytes] uint8 each."""

    host: torch.Tensor
    device: torch.Tensor

    @classmethod
    def make(cls, num_bytes: int, device: torch.device) -> _Pair:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return cls(host, torch.empty(num_bytes, dtype=torch.uint8, device=device))


class TableStaging:
    """Gathers host tables and copies them at once. One step at a time, from one thread."""

    def __init__(self, device: torch.device, num_bytes: int = FIRST_BYTES) -> None:
        """num_bytes: first size of the buffer; it grows when a step needs more (which then takes two copies)."""
        self.device = device
        self._pairs = [_Pair.make(num_bytes, device)]
        self._used = 0  # of the last pair
        self._full: list[int] = []  # bytes used of the pairs before it
        self._flushed = True
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.num_copies = 0

    def begin(self) -> None:
        """A new step: tables of the last one are dropped, once the device has taken them."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._pairs) > 1:
            size = sum(pair.host.shape[0] for pair in self._pairs)
            self._pairs = [_Pair.make(2 * size, self.device)]
        self._full, self._used, self._flushed = [], 0, False

    def put(self, table: torch.Tensor) -> torch.Tensor:
        """A contiguous host table of any shape and dtype; returns its place on the device, 16-byte aligned."""
        assert not self._flushed, "put belongs between begin and flush"
        assert table.device.type == "cpu" and table.is_contiguous()
        num_bytes = table.numel() * table.element_size()
        if self._used + num_bytes > self._pairs[-1].host.shape[0]:
            self._full.append(self._used)
            self._pairs.append(_Pair.make(max(num_bytes, self._pairs[-1].host.shape[0]), self.device))
            self._used = 0
        pair, start = self._pairs[-1], self._used
        if num_bytes:
            pair.host[start : start + num_bytes] = table.reshape(-1).view(torch.uint8)
        self._used = -(-(start + num_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return pair.device[start : start + num_bytes].view(table.dtype).view(table.shape)

    def flush(self) -> None:
        """Copies what was put; launches on the current stream come after it."""
        assert not self._flushed
        for pair, used in zip(self._pairs, (*self._full, min(self._used, self._pairs[-1].host.shape[0])), strict=True):
            pair.device[:used].copy_(pair.host[:used], non_blocking=True)
            self.num_copies += used > 0
        if self._copied is not None:
            self._copied.record()
        self._flushed = True
