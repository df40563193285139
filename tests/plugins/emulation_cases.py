"""The small kernels of emulation_bugs/ with their inputs, launches and expected results."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import ClassVar

import torch

from plugins.emulation.runner import EmulatedRunner
from plugins.kernel import Kernel, Launch

SOURCES = Path(__file__).resolve().parent / "emulation_bugs"
DTYPES = {0: torch.float16, 1: torch.bfloat16}  # by ELEMENT
THREADS = 96
PIPELINE_SHARED = 64 + 512 + 2 * 256
PIPELINE_TILES = 7


def bugs_of(kernel: str) -> dict[str, int]:
    """The planted mistakes of a kernel by name; NONE is 0."""
    (names,) = re.findall(r"enum Bug \{(.*?)\};", (SOURCES / f"{kernel}.cu").read_text(), re.DOTALL)
    return {name: n for n, name in enumerate(re.findall(r"\w+", names))}


def pointers(*names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    return [(name, ctypes.c_void_p) for name in names]


class PipelineParams(ctypes.Structure):
    _fields_: ClassVar = [*pointers("a", "b", "out"), ("tiles", ctypes.c_int), ("bug", ctypes.c_int)]


class ExchangeParams(ctypes.Structure):
    _fields_: ClassVar = [*pointers("values", "out", "total", "peak"), ("bug", ctypes.c_int)]


class ValuesParams(ctypes.Structure):
    _fields_: ClassVar = pointers("x", "bits", "matrices", "out")


def pipeline_kernel(element: int = 0, no_bulk: int = 0) -> Kernel:
    return Kernel("pipeline", SOURCES / "pipeline.cu", (("ELEMENT", element), ("HW_NO_BULK", no_bulk)))


def exchange_kernel(no_bulk: int = 0) -> Kernel:
    return Kernel("exchange", SOURCES / "exchange.cu", (("HW_NO_BULK", no_bulk),))


def run_pipeline(
    runner: EmulatedRunner, bug: int = 0, element: int = 0, no_bulk: int = 0, shared_bytes: int = PIPELINE_SHARED
) -> None:
    """Runs it over 2 blocks of 7 tiles and compares with torch."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(16, 16, generator=generator).to(DTYPES[element])
    b = torch.randn(2, PIPELINE_TILES, 16, 8, generator=generator).to(DTYPES[element])
    out = torch.full((2, PIPELINE_TILES, 16, 8), float("nan"))
    params = PipelineParams(a.data_ptr(), b.data_ptr(), out.data_ptr(), PIPELINE_TILES, bug)
    runner.run(pipeline_kernel(element, no_bulk), "pipeline", Launch(2, THREADS, shared_bytes), params)
    torch.testing.assert_close(out, a.float() @ b.float())


def run_exchange(runner: EmulatedRunner, bug: int = 0, no_bulk: int = 0, missing_blocks: int = 0) -> None:
    """Runs it over 5 blocks and compares with torch. missing_blocks: `out` ends that many blocks early."""
    values = torch.randint(1, 2000, (5, THREADS), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    out = torch.full((5 - missing_blocks, THREADS), -1, dtype=torch.int32)
    total, peak = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.float16)
    params = ExchangeParams(values.data_ptr(), out.data_ptr(), total.data_ptr(), peak.data_ptr(), bug)
    runner.run(exchange_kernel(no_bulk), "exchange", Launch(5, THREADS, 2 * 4 * THREADS), params)
    largest = values.view(5, 3, 32).amax(2)
    assert torch.equal(out, values.flip(1) + largest.repeat_interleave(32, 1))
    assert total.item() == largest.sum().item()
    assert peak.item() == (largest.max().float() / 1024).half().item()


def sanitized(runner: EmulatedRunner) -> None:
    """Both kernels in both forms over a few seeds, and a launch that ends early."""
    for seed in range(4):
        runner.reseed(seed)
        for no_bulk in (0, 1):
            run_pipeline(runner, no_bulk=no_bulk)
            run_exchange(runner, no_bulk=no_bulk)


def sanitized_overrun(runner: EmulatedRunner) -> None:
    run_exchange(runner, missing_blocks=1)
