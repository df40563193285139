"""Torch attention against the float64 reference, with NaN in everything that must not be read."""

from __future__ import annotations

import pytest
import torch

from plugins.attend import cpu, reference
from plugins.attend.params import RECORD_SQUARES, RECORD_SUM
from tests.plugins.attend_cases import CASES, AttendCase, make_attend_case

OUT_TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_reference(case: AttendCase, seed: int) -> None:
    params = make_attend_case(case, seed)
    out, seen, score = reference.attend(params)
    blocks_before = params.blocks.clone()
    cpu.attend(params)
    tolerance = OUT_TOLERANCE[case.dtype] * (20 if case.logit_scale > 1 else 1)
    torch.testing.assert_close(params.out.double(), out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(params.seen.double(), seen, atol=2e-3, rtol=2e-3, equal_nan=True)
    torch.testing.assert_close(params.score.double(), score, atol=2e-3, rtol=2e-3, equal_nan=True)
    assert torch.equal(params.blocks, blocks_before)
    assert not params.out.isnan().any()


def test_record_none_leaves_scores_alone() -> None:
    params = make_attend_case(AttendCase("none", record="none"))
    seen, score = params.seen.clone(), params.score.clone()
    cpu.attend(params)
    assert torch.equal(params.seen.view(torch.int16), seen.view(torch.int16))
    assert torch.equal(params.score.view(torch.int16), score.view(torch.int16))


def test_skipping_changes_scores_of_pages_only() -> None:
    plain, skipping = (make_attend_case(AttendCase("skip", rows=(4,), tokens=(30,), record_skip=n)) for n in (0, 9))
    before = plain.seen.clone()
    cpu.attend(plain)
    cpu.attend(skipping)
    assert torch.equal(plain.out, skipping.out)
    assert torch.equal(plain.score.view(torch.int16), skipping.score.view(torch.int16))
    tables, newest = plain.tables, 29
    for i, page in reversed(list(enumerate(tables.page_ids.tolist()))):
        for offset in reversed(range(int(tables.page_lens[i]))):
            old, all_, some = (seen[page, :, offset] for seen in (before, plain.seen, skipping.seen))
            # The first row sees tokens 0 to 26 and records 0 to 17, the last one 0 to 29 and 0 to 20.
            assert torch.equal(some, old) if newest > 20 else torch.equal(some, all_) or newest > 17
            newest -= 1


def test_tiles_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttendCase("tiles", rows=(50, 3), tokens=(90, 20), record="some", record_skip=7)
    whole, tiled = make_attend_case(case), make_attend_case(case)
    cpu.attend(whole)
    monkeypatch.setattr(cpu, "TILE_LOGITS", 1500)
    cpu.attend(tiled)
    torch.testing.assert_close(tiled.out, whole.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(tiled.seen, whole.seen, equal_nan=True)
    torch.testing.assert_close(tiled.score, whole.score, equal_nan=True)


def test_sequence_answers_the_same_alone_or_in_a_batch() -> None:
    case = AttendCase("batch", rows=(1, 4), tokens=(20, 30))
    batch, alone = make_attend_case(case), make_attend_case(case)
    t = alone.tables
    first_page, first_block = int(t.page_starts[1]), int(t.block_starts[case.kv_heads])
    tables = type(t)(
        t.row_starts[1:] - 1, t.page_starts[1:] - first_page, t.page_ids[first_page:], t.page_lens[first_page:],
        t.block_starts[case.kv_heads :] - first_block, t.block_ids[first_block:], t.block_lens[first_block:],
        t.record[1:], t.record_skip[1:],
    )  # fmt: skip
    fields = {**vars(alone), "q": alone.q[1:], "out": alone.out[1:], "tables": tables}
    cpu.attend(type(alone)(**fields))
    cpu.attend(batch)
    assert torch.equal(alone.out[1:], batch.out[1:])


def test_protected_entry_keeps_its_infinite_score() -> None:
    params = make_attend_case(AttendCase("decode"))
    protected = int(params.tables.block_ids[0])
    assert params.score[protected, 0] == torch.inf
    cpu.attend(params)
    assert params.score[protected, 0] == torch.inf


@pytest.mark.parametrize("mark", [RECORD_SUM, RECORD_SQUARES])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_weights_add_up_where_asked(case: AttendCase, mark: int) -> None:
    """fp16 holds the sums, so they are compared as loosely as it rounds."""
    params = make_attend_case(case)
    params.tables.record.mul_(mark)
    _, seen, score = reference.attend(params)
    cpu.attend(params)
    torch.testing.assert_close(params.seen.double(), seen, atol=4e-3, rtol=4e-3, equal_nan=True)
    torch.testing.assert_close(params.score.double(), score, atol=4e-3, rtol=4e-3, equal_nan=True)


def test_sums_hold_one_whole_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttendCase("sums", rows=(40,), tokens=(60,), max_entries=0)
    for tile in (1 << 21, 900):
        monkeypatch.setattr(cpu, "TILE_LOGITS", tile)
        params = make_attend_case(case)
        params.tables.record.fill_(RECORD_SUM)
        params.seen.zero_()
        cpu.attend(params)
        totals = params.seen.float().sum(dim=(0, 2))
        torch.testing.assert_close(totals, torch.full_like(totals, 40.0), atol=0.2, rtol=0.01)
