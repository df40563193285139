"""What kernels are told of the geometry, and geometry that they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plugins.layout import BlockFormat, BlockLayout, Element, PageLayout, geometry_defines

PAGE = PageLayout(num_layers=2, kv_heads=3, head_dim=64, page_tokens=16, element_bytes=2)


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize(
    ("element", "format"), (("fp16", "int4"), ("bf16", "k8v4"), ("bf16", "int8"), ("bf16", "bf16"))
)
def test_runs_of_a_block_follow_each_other(element: Element, format: BlockFormat, head_dim: int) -> None:
    block = BlockLayout(format, 24, head_dim)
    told = dict(geometry_defines(replace(PAGE, head_dim=head_dim), block, element))
    assert (told["HEAD_DIM"], told["PAGE_TOKENS"], told["BLOCK_ENTRIES"]) == (head_dim, 16, 24)
    assert told["ELEMENT"] == ("fp16", "bf16").index(element)
    assert told["QUANTIZED"] == int(format != element)
    scales = 2 if told["QUANTIZED"] else 0
    runs = (
        ("K_CODES", 24 * head_dim * told["K_BITS"] // 8),
        ("V_CODES", 24 * head_dim * told["V_BITS"] // 8),
        ("K_SCALE", scales * head_dim),
        ("K_MIN", scales * head_dim),
        ("V_SCALE", scales * 24),
        ("V_MIN", scales * 24),
        ("BIAS", 2 * 24),
    )
    at = 0
    for name, num_bytes in runs:
        assert told[name] == at and at % 16 == 0, name
        at += -(-num_bytes // 16) * 16
    assert told["BLOCK_BYTES"] == at == block.block_bytes


@pytest.mark.parametrize(
    ("page", "block", "element", "complaint"),
    (
        (PAGE, BlockLayout("int4", 16, 64), "fp32", "element: got 'fp32', expected fp16 or bf16"),
        (replace(PAGE, element_bytes=4), BlockLayout("int4", 16, 64), "fp16", "element_bytes: got 4, expected 2"),
        (replace(PAGE, head_dim=80), BlockLayout("int4", 16, 80), "fp16", "head_dim: got 80 in pages and 80 in blocks"),
        (PAGE, BlockLayout("int4", 16, 128), "fp16", "head_dim: got 64 in pages and 128 in blocks"),
        (replace(PAGE, page_tokens=12), BlockLayout("int4", 16, 64), "fp16", "page_tokens: got 12, expected a multipl"),
        (PAGE, BlockLayout("int4", 4, 64), "fp16", "block_entries: got 4, expected a multiple of 8"),
        (PAGE, BlockLayout("bf16", 16, 64), "fp16", "got bf16 with fp16 pages, expected fp16 or a quantized"),
        (PAGE, BlockLayout("fp32", 16, 64), "bf16", "block format: got fp32 with bf16 pages"),
    ),
)  # fmt: skip
def test_geometry_without_kernels_is_refused(
    page: PageLayout, block: BlockLayout, element: Element, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        geometry_defines(page, block, element)
