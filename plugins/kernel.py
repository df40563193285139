"""A kernel, a launch of it, and what runs launches: a CUDA device (cuda_runner) or the CPU (emulation.runner).

Parameters travel as one `ctypes.Structure` with the fields of the kernel's Params struct in their order; pointers are
`c_void_p` holding addresses on the runner's device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from plugins.errors import LaunchError

MAX_THREADS = 1024
PLUGINS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Kernel:
    """One compiled unit: a source, which may hold several entries, with fixed defines."""

    op: str
    source: Path
    defines: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        """How messages name it: `attend(HEAD_DIM=64 ELEMENT=1)`."""
        return f"{self.op}({' '.join(f'{name}={value}' for name, value in self.defines)})"

    @property
    def headers(self) -> tuple[Path, ...]:
        """Headers that may be included: those beside the source and in `plugins`."""
        folders = (self.source.parent, PLUGINS)
        return tuple(dict.fromkeys(path for folder in folders for path in sorted(folder.glob("*.cuh"))))


@dataclass(frozen=True)
class Launch:
    """grid: blocks, 1-D. threads: of a block, a multiple of 32. shared_bytes: dynamic shared memory of a block.

    Raises LaunchError for what no device can launch.
    """

    grid: int
    threads: int
    shared_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.grid < 2**31:
            raise LaunchError(f"grid: got {self.grid} blocks, expected 1 to 2**31 - 1")
        if not 0 < self.threads <= MAX_THREADS or self.threads % 32:
            raise LaunchError(f"threads: got {self.threads}, expected a multiple of 32 from 32 to {MAX_THREADS}")
        if self.shared_bytes < 0:
            raise LaunchError(f"shared_bytes: got {self.shared_bytes}, expected 0 or more")


class KernelRunner(Protocol):
    """Launches kernels on one device, in order."""

    @property
    def device(self) -> torch.device:
        """Where tensors must live."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """For persistent grids."""
        ...

    def run(
        self, kernel: Kernel, entry: str, launch: Launch, params: ctypes.Structure, stream: int | None = None
    ) -> None:
        """Launches `entry` of `kernel`. stream: a CUDA stream handle; None: torch's current stream."""
        ...
