"""What kernels were planned to take of a multiprocessor, and what the compiler gave them.

PLANS is the plan: threads, registers and resident blocks of every entry. It holds when the compiled entry takes no more
registers than planned, keeps nothing in local memory, and as many blocks as planned fit one multiprocessor at once with
the shared memory that they ask for. Read from cubins; nothing here needs a GPU.

    python -m plugins.occupancy [sm_90a ...]       compiles every instantiation and prints the table
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from plugins.append.cuda import BLOCKS_PER_MULTIPROCESSOR as APPEND_BLOCKS
from plugins.append.cuda import append_kernel
from plugins.attend.cuda import CHUNK_ROWS, COMBINE_BLOCKS, DECODE_ROWS, AttendKernel
from plugins.commit.cuda import SHARED_BYTES as COMMIT_SHARED_BYTES
from plugins.commit.cuda import CommitSizes, commit_kernel, plan_commit
from plugins.compile import SMS, compile_all, resource_usage
from plugins.kernel import Kernel
from plugins.kv_tiles import RESERVED_BYTES, SHARED_BYTES, KvShape
from plugins.layout import ELEMENT_BYTES, ELEMENTS, KERNEL_HEAD_DIMS, QUANTIZED, BlockFormat, BlockLayout, Element
from plugins.layout import PageLayout as Page
from plugins.score.cuda import ScoreKernel

REGISTERS = 65536  # of a multiprocessor, on every architecture of SMS
REGISTER_GRANULE = 256  # that a warp's registers are rounded up to
SHARED_GRANULE = 128
# Threads and blocks of a multiprocessor (CUDA C++ programming guide, technical specifications per compute capability).
MAX_THREADS = {"sm_80": 2048, "sm_89": 1536, "sm_90a": 2048, "sm_120": 1536}
MAX_BLOCKS = {"sm_80": 32, "sm_89": 24, "sm_90a": 32, "sm_120": 24}
BULK_SMS = ("sm_90a", "sm_120")
OTHER_SMS = ("sm_80", "sm_89")
# The commit that these tables describe: 32 layers of 8 KV heads, 160 staged tokens or so, half of them below the line.
COMMIT_SIZES = {"rows": 256, "moving": 320, "below": 96, "old_blocks": 64, "dissolved_blocks": 2}


@dataclass(frozen=True)
class Plan:
    """Of one entry: threads of a block, registers of a thread at most, when so many blocks share a multiprocessor."""

    op: str
    entry: str
    threads: int
    registers: int
    blocks: int
    sms: tuple[str, ...] = SMS


# attend and score: three blocks for 64 channels and two for 128, fewer where shared memory or sm_80's registers end.
PLANS = (
    Plan("append", "append_rows", threads=256, registers=64, blocks=4),
    Plan("attend", "attend_tiles", threads=160, registers=128, blocks=3),
    Plan("attend", "attend_tiles", threads=160, registers=168, blocks=2),
    Plan("attend", "attend_tiles", threads=160, registers=255, blocks=1),
    Plan("attend", "attend_combine", threads=128, registers=128, blocks=4),
    Plan("score", "score_tiles", threads=160, registers=128, blocks=3),
    Plan("score", "score_tiles", threads=160, registers=168, blocks=2),
    Plan("score", "score_tiles", threads=160, registers=255, blocks=1),
    Plan("commit", "commit_rows", threads=256, registers=128, blocks=2, sms=BULK_SMS),
    Plan("commit", "commit_rows", threads=256, registers=255, blocks=1, sms=OTHER_SMS),
)


@dataclass(frozen=True)
class Geometry:
    """What kernels are compiled for."""

    head_dim: int
    element: Element
    format: BlockFormat
    page_tokens: int = 16
    block_entries: int = 64

    @property
    def page(self) -> Page:
        return Page(1, 1, self.head_dim, self.page_tokens, ELEMENT_BYTES)

    @property
    def block(self) -> BlockLayout:
        return BlockLayout(self.format, self.block_entries, self.head_dim)

    @property
    def label(self) -> str:
        return f"D={self.head_dim} {self.element}/{self.format} page={self.page_tokens} block={self.block_entries}"


def geometries() -> tuple[Geometry, ...]:
    """Every head size, type and block format with the default page and block lengths."""
    kinds = product(KERNEL_HEAD_DIMS, ELEMENTS)
    return tuple(Geometry(dim, element, fmt) for dim, element in kinds for fmt in (*QUANTIZED, element))


@dataclass(frozen=True)
class PlannedEntry:
    """One entry of a compiled unit, as it is launched on one architecture.

    shared_bytes: dynamic shared memory of a block. blocks: planned for a multiprocessor; fewer than `plan` has
    registers for where shared memory has room for fewer.
    """

    sm: str
    geometry: Geometry
    kernel: Kernel
    plan: Plan
    shared_bytes: int
    blocks: int


def planned_entries(sm: str, geometry: Geometry) -> Iterator[PlannedEntry]:
    """What one architecture launches for a geometry, all operations."""
    shape = KvShape(geometry.page, geometry.block, geometry.element, 1)

    def entry(kernel: Kernel, name: str, shared_bytes: int, blocks: int) -> PlannedEntry:
        plan = plan_of(sm, kernel.op, name, blocks)
        return PlannedEntry(sm, geometry, kernel, plan, shared_bytes, min(blocks, plan.blocks))

    yield entry(append_kernel(geometry.page, geometry.element), "append_rows", 0, APPEND_BLOCKS)
    for rows in (DECODE_ROWS, CHUNK_ROWS):
        attend = AttendKernel(shape, rows, sm)
        yield entry(attend.kernel, "attend_tiles", attend.residency.shared_bytes, attend.residency.blocks)
        yield entry(attend.kernel, "attend_combine", 4 * rows, COMBINE_BLOCKS)
    score = ScoreKernel(shape, sm)
    yield entry(score.kernel, "score_tiles", score.residency.shared_bytes, score.residency.blocks)
    sizes = CommitSizes(**COMMIT_SIZES, shared_bytes=COMMIT_SHARED_BYTES[sm])
    commit = plan_commit(geometry.block, sizes, 1)
    kernel = commit_kernel(geometry.page, geometry.block, geometry.element)
    yield entry(kernel, "commit_rows", commit.launch.shared_bytes, commit.launch.grid)


def plan_of(sm: str, op: str, entry: str, blocks: int) -> Plan:
    """The row of PLANS that has registers for so many blocks, or for as many as there can be."""
    rows = [plan for plan in PLANS if (plan.op, plan.entry) == (op, entry) and sm in plan.sms]
    return min(rows, key=lambda plan: (plan.blocks < blocks, abs(plan.blocks - blocks)))


@dataclass(frozen=True)
class OccupancyRow:
    """What one planned entry really takes. `limit`: what keeps more blocks from a multiprocessor."""

    planned: PlannedEntry
    registers: int
    stack_bytes: int
    blocks: int
    limit: str

    @property
    def complaint(self) -> str | None:
        """How the plan is missed, or None."""
        plan = self.planned.plan
        if self.registers > plan.registers:
            return f"{self.registers} registers a thread, planned {plan.registers}"
        if self.stack_bytes:
            return f"{self.stack_bytes} bytes of local memory a thread, planned none"
        if self.blocks < self.planned.blocks:
            return f"{self.blocks} blocks of a multiprocessor (by {self.limit}), planned {self.planned.blocks}"
        return None


def occupancy_rows(sm: str, which: tuple[Geometry, ...] | None = None) -> tuple[OccupancyRow, ...]:
    """One row per entry and geometry (default: all), for one architecture. Compiles what is not cached.

    Raises MissingPackageError, CompileError.
    """
    entries = [e for g in (geometries() if which is None else which) for e in planned_entries(sm, g)]
    usage = {
        (kernel, used.entry): used
        for kernel, cubin in compile_all((e.kernel for e in entries), sm).items()
        for used in resource_usage(cubin)
    }
    rows = []
    for planned in entries:
        used = usage[planned.kernel, planned.plan.entry]
        blocks, limit = resident_blocks(sm, planned.plan.threads, used.registers, planned.shared_bytes)
        rows.append(OccupancyRow(planned, used.registers, used.stack_bytes, blocks, limit))
    return tuple(rows)


def resident_blocks(sm: str, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """How many blocks fit a multiprocessor at once, and what keeps more out.

    registers: of a thread. shared_bytes: dynamic; every block costs RESERVED_BYTES more.
    """
    warp_registers = -(-registers * 32 // REGISTER_GRANULE) * REGISTER_GRANULE
    # Each of the four parts of a multiprocessor holds whole warps: five warps a block use them unevenly.
    warps = REGISTERS // 4 // warp_registers * 4
    shared = -(-(shared_bytes + RESERVED_BYTES) // SHARED_GRANULE) * SHARED_GRANULE
    limits = {
        "registers": warps // (threads // 32),
        "shared memory": SHARED_BYTES[sm][0] * 1024 // shared,
        "threads": MAX_THREADS[sm] // threads,
        "blocks": MAX_BLOCKS[sm],
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def table(rows: tuple[OccupancyRow, ...]) -> str:
    """The rows as text, and what misses the plan under it."""
    lines = [
        f"{'entry':<16}{'geometry':<38}{'threads':>8}{'registers':>15}{'shared bytes':>14}{'blocks':>12}  limit",
    ]
    for row in rows:
        planned = row.planned
        registers, blocks = f"{row.registers} of {planned.plan.registers}", f"{row.blocks} for {planned.blocks}"
        lines.append(
            f"{planned.plan.entry:<16}{planned.geometry.label:<38}{planned.plan.threads:>8}{registers:>15}"
            f"{planned.shared_bytes:>14,}{blocks:>12}  {row.limit}"
        )
    missed = [row for row in rows if row.complaint]
    lines += [f"missed: {r.planned.plan.entry} {r.planned.geometry.label}: {r.complaint}" for r in missed]
    return "\n".join(lines)


def main(sms: list[str]) -> int:
    missed = False
    for sm in sms or list(SMS):
        rows = occupancy_rows(sm)
        print(f"{sm}: registers and blocks as compiled, of and for those planned\n{table(rows)}\n", flush=True)
        missed |= any(row.complaint for row in rows)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
