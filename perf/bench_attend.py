"""The native `attend` beside this machine's read bandwidth and torch's attention: `python -m perf.bench_attend`.

Decode: SmolLM2's shape (9 query heads, 3 KV heads of 64), one token per sequence, every layer with its own arena, so
that K and V come from memory as they do in a model. GB/s counts the K and V bytes (codes, scales, biases) of the
tokens read. Weights are recorded only with `--record`: commitkv scores by re-reading, not by what steps look at.
Prefill: 512 rows over a cache whose last 512 tokens are theirs. Peers run alternately in one loop; the table shows
medians, and medians of per-round ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from plugins.attend import native
from plugins.attend.params import AttendParams, AttendTables
from plugins.layout import BlockFormat, BlockLayout

KV_HEADS, GROUP, HEAD_DIM, PAGE_TOKENS, BLOCK_ENTRIES, RECORD_SKIP = 3, 3, 64, 16, 64, 128
Call = Callable[[], object]
COLD_BYTES = 96 << 20  # arenas of one round together, so that none is left in a private cache from the round before


@dataclass(frozen=True)
class Shape:
    """batch sequences of `rows` query rows over `tokens` cached tokens, all in pages or all in blocks of `format`.

    record: every row of a decode step and every eighth of a prefill raises the scores of what it looks at.
    """

    batch: int
    rows: int
    tokens: int
    format: BlockFormat | None
    record: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V (with scales and biases) that one layer reads."""
        if self.format is None:
            return self.batch * self.tokens * KV_HEADS * HEAD_DIM * 2 * 2
        layout = BlockLayout(self.format, BLOCK_ENTRIES, HEAD_DIM)
        return self.batch * self.tokens // BLOCK_ENTRIES * KV_HEADS * layout.block_bytes


def starts(count: int, each: int) -> torch.Tensor:
    return torch.arange(0, (count + 1) * each, each, dtype=torch.int32) if each else torch.zeros(count + 1).int()


def make_params(shape: Shape) -> AttendParams:
    """One layer with shuffled pages or blocks; the rows of a prefill see pages causally, so it uses pages only."""
    in_pages = shape.format is None
    layout = BlockLayout(shape.format or "int8", BLOCK_ENTRIES, HEAD_DIM)
    pages_each = shape.tokens // PAGE_TOKENS if in_pages else 0
    blocks_each = 0 if in_pages else shape.tokens // BLOCK_ENTRIES
    num_pages, num_blocks = max(1, shape.batch * pages_each), max(1, shape.batch * KV_HEADS * blocks_each)
    pages = torch.randn(num_pages, KV_HEADS, 2, PAGE_TOKENS, HEAD_DIM).bfloat16()
    blocks = torch.randint(0, 256, (num_blocks, layout.block_bytes), dtype=torch.uint8)
    for offset in (layout.k_scale, layout.k_min, layout.v_scale, layout.v_min, layout.bias):
        end = offset + 2 * (HEAD_DIM if offset in (layout.k_scale, layout.k_min) else BLOCK_ENTRIES)
        blocks[:, offset:end].view(torch.float16).fill_(0.01)
    q = torch.randn(shape.batch * shape.rows, KV_HEADS * GROUP, HEAD_DIM).bfloat16()
    tables = AttendTables(
        row_starts=starts(shape.batch, shape.rows),
        page_starts=starts(shape.batch, pages_each),
        page_ids=torch.randperm(num_pages).int(),
        page_lens=torch.full((num_pages,), PAGE_TOKENS, dtype=torch.int32),
        block_starts=starts(shape.batch * KV_HEADS, blocks_each),
        block_ids=torch.randperm(num_blocks).int(),
        block_lens=torch.full((num_blocks,), BLOCK_ENTRIES, dtype=torch.int32),
        record=(torch.arange(shape.batch * shape.rows) % (1 if shape.rows == 1 else 8) == 0).to(torch.uint8)
        * shape.record,
        record_skip=torch.full((shape.batch,), RECORD_SKIP, dtype=torch.int32),
    )
    seen = torch.zeros(num_pages, KV_HEADS, PAGE_TOKENS, dtype=torch.float16)
    score = torch.zeros(num_blocks, BLOCK_ENTRIES, dtype=torch.float16)
    return AttendParams(q, torch.empty_like(q), pages, seen, blocks, score, layout, tables, HEAD_DIM**-0.5)


def sdpa_layers(shape: Shape, count: int) -> list[Call]:
    """torch's attention over equally long contiguous bf16 caches, heads of a group sharing K and V."""
    return [_sdpa_layer(shape) for _ in range(count)]


def _sdpa_layer(shape: Shape) -> Call:
    q = torch.randn(shape.batch, KV_HEADS * GROUP, shape.rows, HEAD_DIM).bfloat16()
    k, v = (torch.randn(shape.batch, KV_HEADS, shape.tokens, HEAD_DIM).bfloat16() for _ in range(2))
    mask = None
    if shape.rows > 1:
        mask = torch.ones(shape.rows, shape.tokens, dtype=torch.bool).tril(shape.tokens - shape.rows)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def seconds(calls: list[Call]) -> float:
    """Mean time of one of `calls`, run in turn."""
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls)


def layers_for(num_bytes: int) -> int:
    return max(2, min(30, -(-COLD_BYTES // num_bytes)))


def measure(shape: Shape, threads: int, rounds: int) -> str:
    """One line of the table."""
    torch.set_num_threads(threads)
    attend = native.make_attend(threads)
    if attend is None:
        sys.exit("bench_attend: got no C++ compiler, expected g++ or clang++; install one")
    ours_params = [make_params(shape) for _ in range(layers_for(shape.kv_bytes))]
    ours: list[Call] = [partial(attend, params) for params in ours_params]
    theirs: list[Call] = list(sdpa_layers(shape, layers_for(Shape(shape.batch, 1, shape.tokens, None).kv_bytes)))
    memory = torch.ones(32 << 20)
    reads: list[Call] = [memory.sum]
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds + 1):
        times.append((seconds(ours), seconds(theirs), seconds(reads)))
    times = times[1:]
    mine, torch_s, read_s = (statistics.median(column) for column in zip(*times, strict=True))
    speedup = statistics.median(b / a for a, b, _ in times)
    share = statistics.median(shape.kv_bytes / a / (memory.nbytes / c) for a, _, c in times)
    what = "prefill" if shape.rows > 1 else "decode"
    cells = (what, shape.format or "bf16 pages", shape.batch, threads, f"{mine * 1e6:.0f}", f"{torch_s * 1e6:.0f}")
    rates = (shape.kv_bytes / mine / 1e9, memory.nbytes / read_s / 1e9)
    return "| " + " | ".join((*map(str, cells), f"{speedup:.2f}", *(f"{x:.1f}" for x in rates), f"{share:.2f}")) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096, help="cached tokens per sequence, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=9, help="alternated rounds; medians are over them")
    parser.add_argument("--record", action="store_true", help="record weights, as policies that score by them ask for")
    options = parser.parse_args()
    print("| step | cache | batch | threads | us | torch us | torch / ours | GB/s | read GB/s | share |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    formats: tuple[BlockFormat | None, ...] = (None, "int8", "k8v4", "int4")
    for threads in (1, 2):
        steps = [(batch, 1, format_) for batch in (1, 8) for format_ in formats]
        steps += [(1, 512, format_) for format_ in formats[:3]]
        for batch, rows, format_ in steps:
            shape = Shape(batch, rows, options.tokens, format_, options.record)
            print(measure(shape, threads, options.rounds), flush=True)


if __name__ == "__main__":
    main()
