"""Blocks whose best keys have 8 bits and the others 4: what they hold, what they cost, and who reads them."""

from __future__ import annotations

import copy

import pytest
import torch

from plugins import blocks
from plugins.attend import cpu, reference
from plugins.commit import native
from plugins.commit.line import draw_line
from plugins.commit.params import LineParams
from plugins.commit.publish import publish
from plugins.layout import BlockLayout, PageLayout, geometry_defines
from tests.plugins.attend_cases import AttendCase, make_attend_case
from tests.plugins.commit_cases import CommitCase, make_state, plan_publish
from tests.plugins.native_forms import load

MIXED = BlockLayout("k84v4", 64, 64)
WIDE, NARROW = BlockLayout("k8v4", 64, 64), BlockLayout("int4", 64, 64)


def entries(layout: BlockLayout, count: int = 4) -> tuple[torch.Tensor, ...]:
    """Keys, values, bias, lens, score; blocks filled to different lengths."""
    gen = torch.Generator().manual_seed(1)
    shape = (count, layout.block_entries, layout.head_dim)
    keys = torch.randn(shape, generator=gen) * 3.0
    lens = torch.tensor([layout.block_entries, 20, 5, 40])[:count]
    score = torch.rand(shape[:2], generator=gen)
    score[0, 7] = torch.inf  # protected
    return keys, torch.randn(shape, generator=gen), torch.rand(shape[:2], generator=gen), lens, score


def test_the_best_scores_get_the_wide_keys() -> None:
    keys, values, bias, lens, score = entries(MIXED)
    raw, wide = (blocks.encode(keys, values, bias, lens, layout, score) for layout in (MIXED, WIDE))
    got, exact = blocks.read_keys(raw, MIXED), blocks.read_keys(wide, WIDE)
    for b, count in enumerate(lens.tolist()):
        best = set(score[b, :count].topk(min(count, MIXED.wide_entries)).indices.tolist())
        spread = keys[b, :count].amax(dim=0) - keys[b, :count].amin(dim=0)
        for i in range(count):
            error = (got[b, i] - keys[b, i]).abs()
            if i in best:
                assert torch.equal(got[b, i], exact[b, i]), "as in k8v4"
            assert bool((error <= 0.51 * spread / (255 if i in best else 15) + 1e-2).all())
        narrow = [i for i in range(count) if i not in best]
        assert not narrow or float((got[b, narrow] - exact[b, narrow]).abs().amax()) > 0.05, "in fact coarser"


def test_everything_but_keys_is_as_in_k8v4() -> None:
    keys, values, bias, lens, score = entries(MIXED)
    raw, wide = (blocks.encode(keys, values, bias, lens, layout, score) for layout in (MIXED, WIDE))
    filled = torch.arange(64) < lens[:, None]
    assert torch.equal(blocks.read_values(raw, MIXED)[filled], blocks.read_values(wide, WIDE)[filled])
    assert torch.equal(blocks.read_bias(raw, MIXED)[filled], blocks.read_bias(wide, WIDE)[filled])
    before = blocks.read_keys(raw, MIXED).clone()
    where = (torch.tensor([0, 3]), torch.tensor([9, 39]))
    blocks.write_values(raw, where, torch.ones(2, 64), MIXED)
    blocks.write_bias(raw, where, torch.tensor([1.0, 2.0]), MIXED)
    assert torch.equal(blocks.read_keys(raw, MIXED), before)


def test_bytes_lie_between_int4_and_k8v4() -> None:
    assert NARROW.block_bytes < MIXED.block_bytes < WIDE.block_bytes
    assert MIXED.block_bytes == WIDE.block_bytes - 48 * 32 + 64, "48 of 64 keys at half size, and a byte for each slot"
    for layout in (MIXED, BlockLayout("k84v4", 24, 80), BlockLayout("k84v4", 16, 16)):
        runs = (layout.v_codes, layout.k_scale, layout.v_scale, layout.bias, layout.slots, layout.block_bytes)
        assert all(at % 16 == 0 for at in runs) and list(runs) == sorted(runs)


def test_writing_what_was_read_changes_nothing() -> None:
    keys, values, bias, lens, score = entries(MIXED)
    once = blocks.encode(keys, values, bias, lens, MIXED, score)
    read = [f(once, MIXED) for f in (blocks.read_keys, blocks.read_values, blocks.read_bias)]
    again = blocks.encode(*read, lens, MIXED, score)
    filled = torch.arange(64) < lens[:, None]
    torch.testing.assert_close(blocks.read_keys(again, MIXED)[filled], read[0][filled], atol=0.02, rtol=0)


def test_garbage_in_unused_blocks_is_read_without_harm() -> None:
    raw = torch.full((2, MIXED.block_bytes), 255, dtype=torch.uint8)
    assert blocks.read_keys(raw, MIXED).shape == (2, 64, 64)


def test_kernels_are_told_of_one_width_only() -> None:
    page = PageLayout(num_layers=2, kv_heads=3, head_dim=64, page_tokens=16, element_bytes=2)
    with pytest.raises(ValueError, match=r"k84v4.*expected bf16 or a quantized format"):
        geometry_defines(page, MIXED, "bf16")


def test_attention_over_them_equals_the_reference() -> None:
    params = make_attend_case(AttendCase("mixed", rows=(5, 1), tokens=(17, 30), format="k84v4", record_skip=4))
    out, seen, score = reference.attend(params)
    cpu.attend(params)
    torch.testing.assert_close(params.out.double(), out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(params.seen.double(), seen, atol=2e-3, rtol=2e-3, equal_nan=True)
    torch.testing.assert_close(params.score.double(), score, atol=2e-3, rtol=2e-3, equal_nan=True)


def test_a_commit_spends_bits_by_score_and_native_forms_hand_it_over() -> None:
    case = CommitCase("mixed", staged=60, entries=60, format="k84v4")
    state = make_state(case, seed=4)
    params = LineParams(state.staged, state.table, 150, 2)
    decision = draw_line(state.memory, params)
    plan = plan_publish(state, decision, 0.35)
    other = copy.deepcopy(state.memory)
    counts = publish(state.memory, plan, decision)
    layout = state.memory.layout
    for b in plan.is_new.nonzero()[:, 0].tolist():
        block, count = int(plan.new.ids[b]), int(plan.new.lens[b])
        slots = state.memory.blocks[block, layout.slots : layout.slots + count].tolist()
        scores = state.memory.score[block, :count].tolist()
        wide = [s for s, slot in zip(scores, slots, strict=True) if slot < layout.wide_entries]
        rest = [s for s, slot in zip(scores, slots, strict=True) if slot >= layout.wide_entries]
        assert len(wide) == min(count, layout.wide_entries) and (not rest or min(wide) >= max(rest))
    library = load(native.library())
    if library is not None:
        assert native.NativePublish(library, None, 1)(other, plan, decision) == counts
        assert torch.equal(other.blocks, state.memory.blocks)
