"""The roofline page: figures worked out by hand, and the pipeline that the kernels really have."""

from __future__ import annotations

import pytest

from perf import roofline
from perf.kernel_shapes import HEADS, CommitShape, KernelShape, attend_shapes
from plugins.attend.cuda import DECODE_ROWS, AttendKernel
from plugins.kv_tiles import KvShape
from plugins.layout import BlockLayout, PageLayout

LLAMA = next(heads for heads in HEADS if heads.name == "Llama-3.1-8B")


def test_bytes_and_floor_of_a_full_cache() -> None:
    """8 KV heads x 128 channels x K and V x 2 bytes = 4 KiB a token and layer."""
    shape = KernelShape(LLAMA, 4, 65536)
    assert shape.kv_bytes == 4 * 65536 * 4096
    assert shape.flops == 4 * 65536 * 32 * 128 * 4  # 32 query heads, q.k and p.v, multiply and add
    assert roofline.floor_s(shape.kv_bytes, shape.flops, roofline.H100) == pytest.approx(320.5e-6, rel=1e-3)
    assert roofline.floor_s(1, 10**12, roofline.H100) == pytest.approx(10**12 / 989e12)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: h.name)
def test_committed_shapes_hold_every_token_once(heads) -> None:  # type: ignore[no-untyped-def]
    for shape in attend_shapes(heads):
        held = shape.active_tokens + shape.num_blocks * shape.block_entries
        assert held == shape.tokens
        assert abs(shape.num_blocks * shape.block_entries - shape.committed_ratio * shape.tokens) < shape.block_entries
        layout = BlockLayout(shape.format, shape.block_entries, heads.head_dim)
        blocks = shape.batch * heads.kv_heads * shape.num_blocks * layout.block_bytes
        assert shape.block_bytes == blocks and shape.kv_bytes == blocks + shape.page_bytes


def test_a_chunk_reads_what_each_tile_of_its_rows_sees() -> None:
    """Groups of 4: tiles of 16 rows. 40 rows over 100 tokens, none committed: tiles see 76, 92 and 100 of them."""
    shape = KernelShape(LLAMA, 1, 100, rows=40)
    assert shape.kv_bytes == (76 + 92 + 100) * 4096
    assert shape.key_bytes == shape.kv_bytes // 2


def test_commit_bytes() -> None:
    shape = CommitShape(LLAMA, 512, keep_ratio=0.5, format="int8", gate=None)
    assert shape.kept == 256 and shape.num_blocks == 4
    assert shape.read_bytes == 256 * 4096
    gated = CommitShape(LLAMA, 512, keep_ratio=0.5, format="int8")
    assert gated.read_bytes == (512 + 256) * 2048, "all keys are compared, kept values are moved"
    assert shape.written_bytes == 8 * 4 * BlockLayout("int8", 64, 128).block_bytes


def test_the_pipeline_is_that_of_the_kernel() -> None:
    shape = KernelShape(LLAMA, 1, 4096, 0.5, "int8")
    page = PageLayout(32, 8, 128, 16, 2)
    planned = AttendKernel(KvShape(page, shape.block, "bf16", 4), DECODE_ROWS, "sm_90a").residency
    kept = roofline.pipeline(shape)
    assert (kept.stages, kept.blocks_per_multiprocessor) == (planned.num_stages, planned.blocks)
    assert kept.stage_bytes == shape.block.block_bytes
    assert kept.in_flight(roofline.H100) == planned.num_stages * planned.blocks * 132 * shape.block.block_bytes


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: h.name)
def test_every_pipeline_covers_bandwidth_times_latency(heads) -> None:  # type: ignore[no-untyped-def]
    for shape in roofline.in_flight_shapes(heads):
        assert all(roofline.pipeline(shape).share(card, roofline.LATENCY_S) > 1 for card in roofline.CARDS), shape


def test_the_sentence_follows_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 query heads, padded to 16 rows: 16 operations per byte of K and V."""
    shapes = [KernelShape(LLAMA, 1, 4096)]
    assert "at most 16, padded to 16 rows" in roofline.ridge_sentence(shapes)
    assert "memory is the floor everywhere" in roofline.ridge_sentence(shapes)
    monkeypatch.setattr(roofline, "CARDS", (roofline.Card("slow", 1e12, 10e12, 132),))
    assert "arithmetic is the floor" in roofline.ridge_sentence(shapes)


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--model", "Qwen2.5-7B", "--format", "int4"]) == 0
    text = capsys.readouterr().out
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1, table
    assert "Qwen2.5-7B | 8 | 64k | 90% | int4" in text
    with pytest.raises(SystemExit):
        roofline.main(["--model", "nothing"])
