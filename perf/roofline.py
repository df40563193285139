"""What decode attention and commit must cost at least: `python -m perf.roofline`. Arithmetic, nothing is run.

Per shape and layer: bytes of K and V that must be read, operations on them, and the time floor at a card's memory
bandwidth. Bytes / bandwidth is the floor wherever operations per byte stay under the card's ridge (peak operations /
bandwidth), which every decode shape here does. The second table asks whether enough copies are under way: by Little's
law a card delivers its bandwidth only while bandwidth x latency bytes are in flight, and a kernel keeps
stages x stage bytes per block in flight, for each block that fits a multiprocessor.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from perf.kernel_shapes import ELEMENT_BYTES, HEADS, CommitShape, Heads, KernelShape, attend_shapes, commit_shapes
from plugins.attend.cuda import DECODE_ROWS, AttendKernel
from plugins.kv_tiles import KvShape
from plugins.layout import CODE_BITS, BlockFormat, PageLayout


@dataclass(frozen=True)
class Card:
    """Published figures of one GPU.   peak_flops: dense fp16 / bf16 tensor cores."""

    name: str
    bytes_per_s: float
    peak_flops: float
    num_multiprocessors: int

    @property
    def ridge(self) -> float:
        """Operations per byte above which arithmetic, not memory, is the floor."""
        return self.peak_flops / self.bytes_per_s


# NVIDIA's data sheets of the SXM5 cards.
H100 = Card("H100", 3.35e12, 989e12, 132)
H200 = Card("H200", 4.8e12, 989e12, 132)
CARDS = (H100, H200)

LATENCY_S = 1.0e-6
"""Of one bulk copy under load. Idle, a Hopper card's device memory answers in about half of that."""


@dataclass(frozen=True)
class Pipeline:
    """Copies that one kernel keeps under way.   stage_bytes: what one stage holds when full."""

    stages: int
    stage_bytes: int
    blocks_per_multiprocessor: int

    def in_flight(self, card: Card) -> int:
        """Bytes under way on the whole card."""
        return self.stages * self.stage_bytes * self.blocks_per_multiprocessor * card.num_multiprocessors

    def share(self, card: Card, latency_s: float) -> float:
        """Bytes under way over those that Little's law asks for; under 1 the card waits."""
        return self.in_flight(card) / (card.bytes_per_s * latency_s)


def floor_s(num_bytes: int, flops: int, card: Card) -> float:
    """The longer of reading and computing."""
    return max(num_bytes / card.bytes_per_s, flops / card.peak_flops)


def attend_row(shape: KernelShape) -> str:
    """One line of the first table."""
    cells = [
        shape.heads.name, str(shape.batch), f"{shape.tokens // 1024}k", f"{shape.committed_ratio:.0%}", shape.format,
        f"{shape.kv_bytes / 1e6:.2f}", f"{shape.flops / 1e6:.1f}", f"{shape.flops / shape.kv_bytes:.1f}",
        *(f"{floor_s(shape.kv_bytes, shape.flops, card) * 1e6:.1f}" for card in CARDS),
        *(f"{floor_s(shape.kv_bytes, shape.flops, card) * shape.heads.num_layers * 1e3:.2f}" for card in CARDS),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def commit_row(shape: CommitShape) -> str:
    """One line of the commit table."""
    cells = [
        shape.heads.name, str(shape.staged), f"{shape.keep_ratio:.0%}", shape.format,
        f"{shape.read_bytes / 1e6:.2f}", f"{shape.written_bytes / 1e6:.2f}",
        *(f"{floor_s(shape.kv_bytes, 0, card) * 1e6:.1f}" for card in CARDS),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def heading(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells)


def ridge_sentence(shapes: Sequence[KernelShape]) -> str:
    """Whether memory is the floor. Tensor cores work on DECODE_ROWS rows whatever the group, so those are counted."""
    most = max(shape.flops / shape.kv_bytes * DECODE_ROWS / shape.heads.group_size for shape in shapes)
    ridges = ", ".join(f"{card.name} {card.ridge:.0f}" for card in CARDS)
    floor = "memory is the floor everywhere" if most < min(card.ridge for card in CARDS) else "arithmetic is the floor"
    return (
        f"Operations per byte: at most {most:.0f}, padded to {DECODE_ROWS} rows; the cards' ridges: {ridges}; {floor}."
    )


def pipeline(shape: KernelShape, sm: str = "sm_90a") -> Pipeline:
    """What the decode kernel keeps under way at this geometry, as it is launched."""
    heads = shape.heads
    page = PageLayout(heads.num_layers, heads.kv_heads, heads.head_dim, shape.page_tokens, ELEMENT_BYTES)
    kv = KvShape(page, shape.block, "bf16", heads.group_size)
    residency = AttendKernel(kv, DECODE_ROWS, sm).residency
    stage_bytes = shape.block.block_bytes if shape.committed_ratio else kv.unit_pages * kv.page_bytes
    return Pipeline(residency.num_stages, stage_bytes, residency.blocks)


def pipeline_row(shape: KernelShape, latency_s: float) -> str:
    """One line of the table of copies under way."""
    kept = pipeline(shape)
    cells = [
        shape.heads.name, f"{shape.format} blocks" if shape.committed_ratio else "bf16 pages",
        str(kept.stages), f"{kept.stage_bytes:,}", str(kept.blocks_per_multiprocessor),
        f"{kept.in_flight(H100) / 1e6:.1f}",
        *(f"{card.bytes_per_s * latency_s / 1e6:.1f}" for card in CARDS),
        *(f"{kept.share(card, latency_s):.1f}" for card in CARDS),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def in_flight_shapes(heads: Heads) -> tuple[KernelShape, ...]:
    """Pages, then blocks of every format that kernels have."""
    formats = [name for name in CODE_BITS if name not in ("fp16", "fp32")]
    return (KernelShape(heads, 1, 4096), *(KernelShape(heads, 1, 4096, 0.5, name) for name in formats))


def print_tables(models: Sequence[Heads], format_: BlockFormat, latency_s: float) -> None:
    print("### Decode attention, one layer; the last two columns are all layers\n")
    print(heading(
        "model", "batch", "context", "committed", "format", "KV MB", "MFLOP", "FLOP/B",
        *(f"{card.name} us" for card in CARDS), *(f"{card.name} ms/token" for card in CARDS),
    ))  # fmt: skip
    for heads in models:
        for shape in attend_shapes(heads, format_):
            print(attend_row(shape))
    print("\n" + ridge_sentence([shape for heads in models for shape in attend_shapes(heads, format_)]) + "\n")
    print("### Commit (publish), one layer\n")
    print(heading("model", "staged", "kept", "format", "read MB", "written MB", *(f"{card.name} us" for card in CARDS)))
    for heads in models:
        for commit in commit_shapes(heads, format_):
            print(commit_row(commit))
    print(f"\n### Copies under way against bandwidth x latency ({latency_s * 1e9:.0f} ns under load)\n")
    print(heading(
        "model", "reads", "stages", "stage bytes", "blocks / SM", "MB in flight",
        *(f"{card.name} needs MB" for card in CARDS), *(f"{card.name} share" for card in CARDS),
    ))  # fmt: skip
    for heads in models:
        for shape in in_flight_shapes(heads):
            print(pipeline_row(shape, latency_s))


def main(argv: Sequence[str] | None = None) -> int:
    names = [heads.name for heads in HEADS]
    parser = argparse.ArgumentParser(prog="python -m perf.roofline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=names, action="append", help="one or more (default: all)")
    parser.add_argument("--format", choices=tuple(CODE_BITS), default="k8v4", help="blocks (default %(default)s)")
    parser.add_argument("--latency-ns", type=float, default=LATENCY_S * 1e9, help="of a copy (default %(default).0f)")
    options = parser.parse_args(argv)
    chosen = [heads for heads in HEADS if heads.name in (options.model or names)]
    print_tables(chosen, options.format, options.latency_ns * 1e-9)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
