"""What the compiler made of the kernels: instructions of every entry, and the occupancy planned for it.

Here every head size, type and block format in pairs for sm_90a, and one geometry for each other architecture;
`python -m plugins.occupancy` compiles all of them for all.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from test_compile import needs_nvrtc

from plugins import native_build
from plugins.compile import SMS, compile_cubin, include_folder, sass
from plugins.kv_tiles import SHARED_BYTES
from plugins.native_build import Library, Unit
from plugins.occupancy import (
    MAX_THREADS,
    PLANS,
    Geometry,
    OccupancyRow,
    geometries,
    occupancy_rows,
    planned_entries,
    resident_blocks,
    table,
)

pytestmark = [needs_nvrtc, pytest.mark.slow]

# Every block format, head size and dtype once or more; all of `geometries()` would take minutes to compile.
HOPPER = (
    Geometry(128, "bf16", "int4"),
    Geometry(64, "bf16", "k8v4"),
    Geometry(64, "fp16", "int8"),
    Geometry(128, "fp16", "fp16"),
)
OTHERS = {"sm_80": HOPPER[0], "sm_89": Geometry(128, "fp16", "k8v4"), "sm_120": HOPPER[1]}
READS_KV = ("attend_tiles", "score_tiles", "commit_rows")
MULTIPLIES = ("attend_tiles", "score_tiles")


def chosen(sm: str) -> tuple[Geometry, ...]:
    return HOPPER if sm == "sm_90a" else (OTHERS[sm],)


@cache
def rows_of(sm: str) -> tuple[OccupancyRow, ...]:
    return occupancy_rows(sm, chosen(sm))


def instruction_names(text: str) -> set[str]:
    """Of disassembled code, with their first suffix: HMMA.16816, UBLKCP, LDL.64."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*(?:\.\w+)?)", text)
    return set(found)


@pytest.mark.parametrize("sm", SMS)
def test_instructions(sm: str) -> None:
    rows_of(sm)  # compiles them, two at a time
    bulk = sm in ("sm_90a", "sm_120")
    for geometry in chosen(sm):
        for kernel in dict.fromkeys(entry.kernel for entry in planned_entries(sm, geometry)):
            for entry, text in sass(compile_cubin(kernel, sm)).items():
                where = f"{sm} {geometry.label} {entry}"
                found = instruction_names(text)
                names = {name.split(".")[0] for name in found}
                assert len(names) > 10, f"{where}: only {names} were read from the disassembly"
                assert not names & {"LDL", "STL"}, f"{where}: spills to local memory"
                if entry in READS_KV:
                    copies = {"UBLKCP", "SYNCS"} if bulk else {"LDGSTS"}
                    assert copies <= names, f"{where}: expected {copies}"
                    assert not (bulk and "LDGSTS" in names), f"{where}: copies that bypass the bulk unit"
                if entry in MULTIPLIES:
                    assert "HMMA.16816" in found, f"{where}: no tensor-core product of 16 x 8 x 16"


@pytest.mark.parametrize("sm", SMS)
def test_occupancy_is_as_planned(sm: str) -> None:
    rows = rows_of(sm)
    assert {row.planned.plan for row in rows} <= set(PLANS)
    assert not [row for row in rows if row.complaint], table(rows)


def test_the_plan_covers_every_entry_of_every_geometry() -> None:
    assert len(geometries()) == 16 and set(HOPPER) <= set(geometries())
    for sm in SMS:
        for geometry in geometries():
            for entry in planned_entries(sm, geometry):
                assert 1 <= entry.blocks <= entry.plan.blocks
                # What is asked for at launch and at compile time leaves room for the planned blocks.
                blocks, _ = resident_blocks(sm, entry.plan.threads, entry.plan.registers, entry.shared_bytes)
                assert blocks >= entry.blocks, f"{sm} {geometry.label} {entry.plan.entry}: {blocks}"


def test_resident_blocks() -> None:
    # 256 threads of 64 registers: 2048 registers a warp, 32 warps.
    assert resident_blocks("sm_90a", 256, 64, 0) == (4, "registers")
    assert resident_blocks("sm_90a", 256, 32, 0) == (8, "registers")
    assert resident_blocks("sm_89", 256, 16, 0) == (6, "threads")
    assert resident_blocks("sm_90a", 32, 16, 0) == (32, "blocks")
    # Two blocks of 113 KiB fill 228 KiB with 1 KiB each for the system; a byte more and one is left.
    assert resident_blocks("sm_90a", 160, 168, 113 * 1024) == (2, "registers")
    assert resident_blocks("sm_90a", 128, 32, 113 * 1024) == (2, "shared memory")
    assert resident_blocks("sm_90a", 128, 32, 113 * 1024 + 1) == (1, "shared memory")


@pytest.mark.skipif(native_build.find_compiler() is None, reason="needs a C++ compiler")
def test_resident_blocks_are_those_that_nvidia_counts() -> None:
    source = Path(__file__).parent / "cuda_occupancy.cpp"
    unit = Unit(source, (f"-I{include_folder()}", "-Wno-unused-parameter"))
    library = native_build.load(Library("cuda-occupancy", (unit,)))
    assert library is not None
    for sm, capability in (("sm_80", (8, 0)), ("sm_89", (8, 9)), ("sm_90a", (9, 0)), ("sm_120", (12, 0))):
        shared_of_sm = SHARED_BYTES[sm][0] * 1024
        for threads, registers, shared in product(
            (32, 128, 160, 192, 256), (24, 64, 128, 136, 168, 200), (0, 1, 40_000)
        ):
            for shared_bytes in (shared, shared_of_sm - 1024 - shared, shared_of_sm // 2 - 1024):
                nvidia = library.nvidia_blocks(
                    *capability, MAX_THREADS[sm], shared_of_sm, threads, registers, shared_bytes
                )
                ours = resident_blocks(sm, threads, registers, shared_bytes)[0]
                assert ours == nvidia, (sm, threads, registers, shared_bytes)


def test_what_misses_the_plan_is_said() -> None:
    (planned, *_) = planned_entries("sm_90a", Geometry(64, "fp16", "int4"))
    assert OccupancyRow(planned, 64, 0, 4, "registers").complaint is None
    for row, complaint in (
        (OccupancyRow(planned, 65, 0, 3, "registers"), "65 registers a thread, planned 64"),
        (OccupancyRow(planned, 64, 8, 4, "registers"), "8 bytes of local memory a thread, planned none"),
        (OccupancyRow(planned, 64, 0, 3, "threads"), "3 blocks of a multiprocessor (by threads), planned 4"),
    ):
        assert row.complaint == complaint
        assert f"missed: append_rows D=64 fp16/int4 page=16 block=64: {complaint}" in table((row,))
