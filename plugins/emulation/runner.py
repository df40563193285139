"""Launches kernels on the CPU: compiles their source with the C++ compiler, runs it, raises what it finds.

Threads of a block are fibers. A seed chooses in which order warps and lanes run and how late copies arrive.
Every word of hw.cuh checks how it is used (machine.cpp, copies.cpp), and every access of shared memory must be ordered
after those it depends on by some barrier (shared_memory.hpp), whatever order the seed chose. Not shown: speed, and
accesses of global memory that race.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from plugins import native_build
from plugins.errors import CompileError, EmulationError, LaunchError
from plugins.kernel import PLUGINS, Kernel, Launch
from plugins.native_build import Library, Unit

HERE = Path(__file__).resolve().parent
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")
RESIDENT_BLOCKS = 3  # blocks that run at the same time
ERROR_BYTES = 4000


@dataclass
class Counters:
    """Bytes moved to and from global memory since the runner was made or reset.

    bulk: asynchronous copies, in either form; plain: loads and stores; atomic: each counted once.
    """

    bulk_read: int = 0
    bulk_written: int = 0
    plain_read: int = 0
    plain_written: int = 0
    atomic: int = 0

    @property
    def read(self) -> int:
        return self.bulk_read + self.plain_read

    @property
    def written(self) -> int:
        return self.bulk_written + self.plain_written

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)


class _KernelFacts(ctypes.Structure):
    _fields_ = (
        ("body", ctypes.c_void_p),
        ("params_bytes", ctypes.c_int),
        ("max_threads", ctypes.c_int),
        ("min_blocks", ctypes.c_int),
    )


class _LaunchPlan(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("resident_blocks", ctypes.c_int),
        ("seed", ctypes.c_uint64),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        *((field.name, ctypes.c_uint64) for field in fields(Counters)),
        ("error", ctypes.c_char * ERROR_BYTES),
    )


class EmulatedRunner:
    """A KernelRunner on the CPU. The same seed and the same launches run the same way.

    sanitize: compile with AddressSanitizer and UndefinedBehaviorSanitizer; the process must have been started with
    their library loaded first (tests/plugins/emulated_sanitized.py).
    """

    def __init__(self, seed: int = 0, sanitize: bool = False, cache_dir: Path | None = None) -> None:
        self.device = torch.device("cpu")
        self.num_multiprocessors = 4
        self.counters = Counters()
        self._seed = seed
        self._num_launches = 0
        self._flags = SANITIZE_FLAGS if sanitize else ("-O2",)
        self._cache_dir = cache_dir or native_build.default_cache_dir()
        self._libraries: dict[Kernel, ctypes.CDLL] = {}
        self._machine: ctypes.CDLL | None = None

    def reseed(self, seed: int) -> None:
        """Later launches run as those of a new runner with this seed."""
        self._seed, self._num_launches = seed, 0

    def run(
        self, kernel: Kernel, entry: str, launch: Launch, params: ctypes.Structure, stream: int | None = None
    ) -> None:
        """Runs the launch to its end. stream: must be None or 0, as there is one order only.

        Raises EmulationError, LaunchError (entry, Params or launch do not fit), CompileError.
        """
        if stream:
            raise LaunchError(f"stream: got {stream}, expected None: the emulation runs launches in order")
        library, machine = self.library(kernel), self._load_machine()
        facts = self._facts(kernel, library, entry, launch, params)
        plan = _LaunchPlan(launch.grid, launch.threads, launch.shared_bytes, RESIDENT_BLOCKS, self._next_seed())
        report = _Report()
        failed = machine.hw_launch(
            library.hw_set_machine,
            ctypes.byref(facts),
            ctypes.byref(params),
            ctypes.byref(plan),
            ctypes.byref(report),
        )
        for field in fields(Counters):
            setattr(self.counters, field.name, getattr(self.counters, field.name) + getattr(report, field.name))
        if failed:
            where = f"{launch.grid} x {launch.threads} threads, seed {self._seed}, {kernel.label}"
            raise EmulationError(f"{kernel.op} {entry}: {report.error.decode(errors='replace')} [{where}]")

    def library(self, kernel: Kernel) -> ctypes.CDLL:
        """The kernel compiled for the CPU, from the cache where possible. Raises CompileError."""
        if kernel not in self._libraries:
            defines = tuple(f"-D{name}={value}" for name, value in kernel.defines)
            flags = ("-x", "c++", "-DHW_EMULATED", *defines, f"-I{PLUGINS}", *self._flags)
            headers = (*kernel.headers, *sorted(HERE.glob("*.hpp")))
            built = Library(f"emulated-{kernel.op}", (Unit(kernel.source, flags),), headers, self._link_flags())
            self._libraries[kernel] = self._load(built, kernel.label)
        return self._libraries[kernel]

    def _load_machine(self) -> ctypes.CDLL:
        if self._machine is None:
            units = tuple(Unit(path, self._flags) for path in sorted(HERE.glob("*.cpp")))
            built = Library("emulation", units, tuple(sorted(HERE.glob("*.hpp"))), self._link_flags())
            self._machine = self._load(built, "the emulation")
        return self._machine

    def _link_flags(self) -> tuple[str, ...]:
        return tuple(flag for flag in self._flags if flag.startswith("-fsanitize"))

    def _load(self, library: Library, label: str) -> ctypes.CDLL:
        compiler = native_build.find_compiler()
        if compiler is None:
            raise CompileError(f"{label}: no C++ compiler found ({', '.join(native_build.COMPILERS)}); install one")
        try:
            return ctypes.CDLL(str(native_build.build(library, self._cache_dir, compiler)))
        except (native_build.BuildError, OSError) as error:
            raise CompileError(f"{label}: {error}") from error

    def _next_seed(self) -> int:
        self._num_launches += 1
        return (self._seed * 1_000_003 + self._num_launches) % 2**64

    @staticmethod
    def _facts(
        kernel: Kernel, library: ctypes.CDLL, entry: str, launch: Launch, params: ctypes.Structure
    ) -> _KernelFacts:
        try:
            facts = _KernelFacts.in_dll(library, entry)
        except ValueError as error:
            raise LaunchError(f"{kernel.label}: no entry {entry!r} in {kernel.source.name}") from error
        if facts.params_bytes != ctypes.sizeof(params):
            raise LaunchError(
                f"{kernel.label} {entry}: {type(params).__name__} has {ctypes.sizeof(params)} bytes, the kernel's "
                f"Params {facts.params_bytes}; the fields must be the same in the same order"
            )
        if launch.threads > facts.max_threads:
            raise LaunchError(
                f"{kernel.label} {entry}: launched with {launch.threads} threads, compiled for {facts.max_threads}"
            )
        return facts
