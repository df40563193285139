"""The emulation finds each planted mistake, runs the correct twins right, and its words compute what the GPU's do."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from plugins import native_build
from plugins.emulation.runner import EmulatedRunner
from plugins.errors import CompileError, EmulationError, LaunchError
from plugins.kernel import Kernel, Launch

pytestmark = pytest.mark.skipif(native_build.find_compiler() is None, reason="needs a C++ compiler")

SOURCES = Path(__file__).parent / "emulation_bugs"
SEEDS = range(6)
DTYPES = {0: torch.float16, 1: torch.bfloat16}  # by ELEMENT


def numbered(source: Path) -> dict[str, int]:
    """The planted mistakes of a kernel by name; NONE is 0."""
    (names,) = re.findall(r"enum Bug \{(.*?)\};", source.read_text(), re.DOTALL)
    return {name: n for n, name in enumerate(re.findall(r"\w+", names))}


class PipelineParams(ctypes.Structure):
    _fields_: ClassVar = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tiles", ctypes.c_int),
        ("bug", ctypes.c_int),
    ]


class ExchangeParams(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("values", "out", "total", "peak")),
        ("bug", ctypes.c_int),
    ]


PIPELINE_SHARED = 64 + 512 + 2 * 256
THREADS = 96


@pytest.fixture(scope="module")
def emulated() -> EmulatedRunner:
    """One for all tests, so that each kernel is compiled and loaded once."""
    return EmulatedRunner()


def run_pipeline(
    runner: EmulatedRunner, bug: int = 0, element: int = 0, no_bulk: int = 0, shared_bytes: int = PIPELINE_SHARED
) -> None:
    """Runs it over 2 blocks of 7 tiles and compares with torch."""
    kernel = Kernel("pipeline", SOURCES / "pipeline.cu", (("ELEMENT", element), ("HW_NO_BULK", no_bulk)))
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(16, 16, generator=generator).to(DTYPES[element])
    b = torch.randn(2, 7, 16, 8, generator=generator).to(DTYPES[element])
    out = torch.full((2, 7, 16, 8), float("nan"))
    params = PipelineParams(a.data_ptr(), b.data_ptr(), out.data_ptr(), 7, bug)
    runner.run(kernel, "pipeline", Launch(2, THREADS, shared_bytes), params)
    torch.testing.assert_close(out, a.float() @ b.float())


def run_exchange(runner: EmulatedRunner, bug: int = 0, no_bulk: int = 0) -> None:
    """Runs it over 5 blocks and compares with torch."""
    kernel = Kernel("exchange", SOURCES / "exchange.cu", (("HW_NO_BULK", no_bulk),))
    values = torch.randint(1, 2000, (5, THREADS), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    out, total = torch.full((5, THREADS), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    peak = torch.zeros(1, dtype=torch.float16)
    params = ExchangeParams(values.data_ptr(), out.data_ptr(), total.data_ptr(), peak.data_ptr(), bug)
    runner.run(kernel, "exchange", Launch(5, THREADS, 2 * 4 * THREADS), params)
    largest = values.view(5, 3, 32).amax(2)
    assert torch.equal(out, values.flip(1) + largest.repeat_interleave(32, 1))
    assert total.item() == largest.sum().item()
    assert peak.item() == (largest.max().float() / 1024).half().item()


PIPELINE_BUGS = {
    "NO_SYNC_AFTER_INIT": "nothing orders it after barrier_init|no barrier was initialised|never written|after the write",
    "NO_INIT_FENCE": "barrier_init_fence was not called",
    "TOO_FEW_BYTES_ANNOUNCED": "announced 240 bytes to the barrier at byte 0, the copies have 256",
    "MISALIGNED_SOURCE": "copy at global address 0x[0-9a-f]+2: not a multiple of 16",
    "MISALIGNED_DESTINATION": "copy at byte 584 of shared memory: not a multiple of 16",
    "ODD_COPY_SIZE": "copy of 248 bytes: not a positive multiple of 16",
    "WRONG_PHASE_CONSUMER": "was never written|still arriving|after the write by the copy|after the read by thread",
    "WRONG_PHASE_PRODUCER": "deadlock in block .*warp 2: waiting for parity 0 of the barrier at byte 16",
    "NO_WAIT_FOR_EMPTY": "copy by thread .* after the (read|write) by|part of another copy under way|already has its",
    "NO_WAIT_FOR_FULL": "was never written|still arriving|after the write by the copy",
    "STAGE_OVERRUN": "copy of 256 bytes at byte 1088 of shared memory: the launch has 1088 bytes",
    "A_ROW_NEVER_WRITTEN": "byte 544 was never written",
    "TOO_FEW_ARRIVALS_COUNTED": "nothing orders it after|another copy|one too many|still arriving|went on|deadlock",
    "ARRIVAL_MISSING": "deadlock .*warp 2: waiting for parity 0 of the barrier at byte 16 .*1 of 2 arrivals",
    "ARRIVAL_TWICE": "nothing orders it after|another copy|one too many|still arriving|went on|deadlock",
    "NO_WARP_SYNC_BEFORE_ARRIVAL": "copy by thread .* after the read by thread",
    "DIVERGENT_MMA": "deadlock|other lanes of its warp are at",
    "NO_COPY_END": "copy_end of the barrier at byte 0 is missing",
    "COPY_OVER_COPY": "part of another copy under way|after the write by the copy",
    "NO_WAIT_AT_END": "ended while an asynchronous copy into|deadlock",
    "BARRIER_OVERWRITTEN": "write of 4 bytes at byte 4 of shared memory: byte 4 belongs to a barrier",
    "BARRIER_NOT_INITIALISED": "no barrier was initialised at byte",
}
EXCHANGE_BUGS = {
    "NO_BLOCK_SYNC": "was never written|nothing orders it after the (write|read) by thread",
    "NAMED_SYNC_OTHER_COUNT": r"named_sync\(1, \d+\): warp \d waits at this barrier for \d+ threads",
    "WARP_SKIPS_SYNC": "deadlock .*at block barrier 1 .64 of 96 threads.*warp 2: ended",
    "NO_FENCE_ASYNC": "did not call fence_async since",
    "NO_STORE_WAIT": "is being copied out",
    "WRITE_BEFORE_STORE_WAIT": "is being copied out",
    "VIEW_OVERRUN": "4 bytes at element 96 of a view of 96 elements",
    "MISALIGNED_SHARED_VECTOR": "write of 8 bytes at byte 4 of shared memory: not aligned",
    "MISALIGNED_GLOBAL_VECTOR": "load of 8 bytes at global address .*: not aligned",
    "NULL_POINTER": "load of 4 bytes at global address",
    "STORE_OF_UNWRITTEN": "bulk_store of 384 bytes from byte 384 of shared memory: byte 452 was never written",
    "NO_WARP_SYNC": "was never written|nothing orders it after the (write|read) by thread",
    "NEGATIVE_ATOMIC_MAX": "atomic_max of -",
    "CHECK_FAILS": r"block \d, thread 5 \(warp 0, lane 5\): thread 5 is not welcome",
    "SYNC_OF_PART_OF_A_WARP": r"named_sync\(1, 80\): expected a multiple of 32",
    "NO_SYNC_BEFORE_STORE": "was never written|bulk_store by thread 0 .* after the write by thread",
    "LANE_ENDS_EARLY": "deadlock .*warp 2: lanes 0-5 at block_sync .31 of 32 lanes., lanes 6-6 ended, lanes 7-31 at",
    "SHUFFLE_OUTSIDE": "shuffle of lane 0 with 32: outside the warp",
}


@pytest.mark.parametrize("no_bulk", (0, 1))
@pytest.mark.parametrize("name", PIPELINE_BUGS)
def test_a_bug_of_the_pipeline_is_found_on_every_seed(emulated: EmulatedRunner, name: str, no_bulk: int) -> None:
    if no_bulk and name == "NO_COPY_END":
        pytest.skip("without copy_end the next copy_begin complains in both forms; one is enough")
    bug = numbered(SOURCES / "pipeline.cu")[name]
    for seed in SEEDS:
        emulated.reseed(seed)
        with pytest.raises(EmulationError, match=PIPELINE_BUGS[name]):
            run_pipeline(emulated, bug, no_bulk=no_bulk)


@pytest.mark.parametrize("name", EXCHANGE_BUGS)
def test_a_bug_of_the_exchange_is_found_on_every_seed(emulated: EmulatedRunner, name: str) -> None:
    bug = numbered(SOURCES / "exchange.cu")[name]
    for seed in SEEDS:
        emulated.reseed(seed)
        with pytest.raises(EmulationError, match=EXCHANGE_BUGS[name]):
            run_exchange(emulated, bug)


def test_every_planted_bug_has_a_test() -> None:
    assert ["NONE", *PIPELINE_BUGS] == list(numbered(SOURCES / "pipeline.cu"))
    assert ["NONE", *EXCHANGE_BUGS] == list(numbered(SOURCES / "exchange.cu"))


@pytest.mark.parametrize("no_bulk", (0, 1))
@pytest.mark.parametrize("element", (0, 1))
def test_the_correct_pipeline(emulated: EmulatedRunner, element: int, no_bulk: int) -> None:
    for seed in range(24):
        emulated.reseed(seed)
        run_pipeline(emulated, element=element, no_bulk=no_bulk)


@pytest.mark.parametrize("no_bulk", (0, 1))
def test_the_correct_exchange(emulated: EmulatedRunner, no_bulk: int) -> None:
    for seed in range(24):
        emulated.reseed(seed)
        run_exchange(emulated, no_bulk=no_bulk)
