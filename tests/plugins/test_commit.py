"""Both halves of a commit against the float64 brute force, and what a commit must conserve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from plugins import blocks as block_bytes
from plugins.attend import reference as attend_reference
from plugins.attend.params import AttendParams, AttendTables
from plugins.commit import native, reference
from plugins.commit.line import draw_line as torch_line
from plugins.commit.params import Decision, LineParams, PublishParams, RowTable
from plugins.commit.publish import publish as torch_publish
from plugins.layout import BlockFormat
from plugins.memory import KvMemory
from tests.plugins.commit_cases import CASES, PAGE_TOKENS, CommitCase, CommitState, make_state, plan_publish
from tests.plugins.native_forms import SANITIZERS, forms_of, load, run_sanitized

Line = Callable[[KvMemory, LineParams], Decision]
Publish = Callable[[KvMemory, PublishParams, Decision], tuple[int, int]]
LIBRARY = load(native.library())
LINE: dict[str, Line] = {"torch": torch_line} | ({"native": native.NativeLine(LIBRARY)} if LIBRARY else {})
PUBLISH: dict[str, Publish] = {
    "torch": torch_publish,
    **forms_of(LIBRARY, "commitkv_publish", native.NativePublish),
}
draw_line = list(LINE.values())[-1]


@pytest.fixture(params=LINE)
def line(request: pytest.FixtureRequest) -> Line:
    return LINE[request.param]


@pytest.fixture(params=PUBLISH)
def publish(request: pytest.FixtureRequest) -> Publish:
    return PUBLISH[request.param]


def line_params(state: CommitState, keep: int, floor: int = 3, **rules: object) -> LineParams:
    return LineParams(state.staged, state.table, keep, floor, **rules)  # type: ignore[arg-type]


def num_stored(state: CommitState) -> int:
    return int(state.table.lens.sum()) + state.staged.shape[0] * state.memory.num_rows


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rules", [{}, {"floor": 0}, {"floor": 1000}, {"layer_scale": (2.0, 0.0)}, {"outlier_z": 2.0}],
                         ids=str)  # fmt: skip
def test_line_equals_full_sort(line: Line, case: CommitCase, share: float, rules: dict[str, object]) -> None:
    state = make_state(case)
    params = line_params(state, int(share * num_stored(state)), **rules)  # type: ignore[arg-type]
    expected, got = reference.draw_line(state.memory, params), line(state.memory, params)
    assert torch.equal(got.staged_keep, expected.staged_keep)
    assert torch.equal(got.alive, expected.alive)
    assert torch.equal(got.staged_score, expected.staged_score)
    assert got.line == pytest.approx(expected.line, rel=1e-6)


def test_line_keeps_exactly_the_budget_unless_forced(line: Line) -> None:
    state = make_state(CommitCase("ties", equal=True))
    for keep in (0, 1, 40, 41, num_stored(state), num_stored(state) + 5):
        decision = line(state.memory, line_params(state, keep, floor=2))
        kept = int(decision.staged_keep.sum() + decision.alive.sum())
        assert kept == min(max(keep, 2 * state.memory.num_rows), num_stored(state))


def test_outlier_is_protected_for_good(line: Line, publish: Publish) -> None:
    state = make_state(CommitCase("outlier", staged=40, entries=0))
    for seen in state.memory.seen:
        seen.copy_(torch.where(seen.isnan(), seen, 0.01))
    slot = int(state.staged[7])
    state.memory.seen[1][slot // PAGE_TOKENS, 0, slot % PAGE_TOKENS] = 0.9
    decision = line(state.memory, line_params(state, 12, outlier_z=4.0))
    assert decision.staged_score.isinf().nonzero().tolist() == [[2, 7]]
    params = plan_publish(state, decision, 0.35)
    publish(state.memory, params, decision)
    assert int(state.memory.score[params.new.ids].isinf().sum()) == 1


def expected_bytes(state: CommitState, params: PublishParams, outcome: reference.PublishOutcome) -> KvMemory:
    """Block and score arenas as the reference's outcome says, quantized the one way there is."""
    memory, layout = copy.deepcopy(state.memory), state.memory.layout
    for row, entries in enumerate(outcome.written):
        new = [b for b in range(params.new.starts[row], params.new.starts[row + 1]) if params.is_new[b]]
        for b, first in zip(new, range(0, len(entries), layout.block_entries), strict=True):
            part = entries[first : first + layout.block_entries]
            keys, values = torch.zeros(2, 1, layout.block_entries, layout.head_dim)
            bias, score = torch.zeros(2, 1, layout.block_entries)
            for i, entry in enumerate(part):
                keys[0, i], values[0, i], bias[0, i], score[0, i] = entry.key, entry.value, entry.bias, entry.score
            raw = block_bytes.encode(keys, values, bias, torch.tensor([len(part)]), layout)
            memory.blocks[params.new.ids[b]], memory.score[params.new.ids[b]] = raw[0], score[0].half()
    for (block, offset), entry in outcome.rewritten.items():
        where = (torch.tensor([block]), torch.tensor([offset]))
        block_bytes.write_values(memory.blocks, where, entry.value[None].float(), layout)
        block_bytes.write_bias(memory.blocks, where, torch.tensor([entry.bias]), layout)
    return memory


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("gate", [None, 0.35, 2.0])
@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_publish_equals_reference(publish: Publish, case: CommitCase, gate: float | None, share: float) -> None:
    state = make_state(case, seed=1)
    decision = draw_line(state.memory, line_params(state, int(share * num_stored(state))))
    params = plan_publish(state, decision, gate)
    outcome = reference.publish(state.memory, params, decision)
    expected = expected_bytes(state, params, outcome)
    assert publish(state.memory, params, decision) == (outcome.absorbed, outcome.dropped)
    memory, layout = state.memory, state.memory.layout
    touched = torch.zeros(memory.blocks.shape[0], dtype=torch.bool)
    touched[params.new.ids] = True
    assert torch.equal(memory.blocks[~touched], expected.blocks[~touched])
    raw, want = memory.blocks[params.new.ids], expected.blocks[params.new.ids]
    filled = torch.arange(layout.block_entries) < params.new.lens[:, None]
    assert torch.equal(block_bytes.read_keys(raw, layout)[filled], block_bytes.read_keys(want, layout)[filled])
    step = {4: 0.5, 8: 0.03}.get(layout.v_bits, {"bf16": 0.02, "fp16": 2e-3, "fp32": 1e-5}.get(case.format, 0.0))
    for read, tolerance in ((block_bytes.read_values, step), (block_bytes.read_bias, 2e-3)):
        torch.testing.assert_close(read(raw, layout)[filled], read(want, layout)[filled], atol=tolerance, rtol=1e-3)
    same = (block_bytes.read_values(raw, layout) == block_bytes.read_values(want, layout))[filled]
    assert same.numel() == 0 or same.float().mean() > 0.9 or case.format == "fp32"
    torch.testing.assert_close(memory.score[params.new.ids][filled], expected.score[params.new.ids][filled])


def attend_over(memory: KvMemory, table: RowTable, slots: torch.Tensor, q: torch.Tensor, layer: int) -> torch.Tensor:
    """Attention of q [rows, heads, D] over single-token pages `slots` and the layer's blocks, float64."""
    kv_heads = memory.pages[0].shape[1]
    kv = memory.pages[layer].permute(0, 3, 1, 2, 4)[slots // PAGE_TOKENS, slots % PAGE_TOKENS]
    pages, seen = kv[:, :, :, None].contiguous(), torch.zeros(slots.shape[0], kv_heads, 1, dtype=torch.float16)
    starts = torch.tensor(table.starts)[layer * kv_heads : (layer + 1) * kv_heads + 1]
    part = slice(int(starts[0]), int(starts[-1]))
    count, ones = slots.shape[0], torch.ones(slots.shape[0], dtype=torch.int32)
    outs = []
    for row in q.split(1):
        tables = AttendTables(
            torch.tensor([0, 1]), torch.tensor([0, count]), torch.arange(count), ones,
            starts - starts[0], table.ids[part], table.lens[part], torch.zeros(1), torch.zeros(1),
        )  # fmt: skip
        params = AttendParams(row, row.clone(), pages, seen, memory.blocks, memory.score, memory.layout, tables, 0.25)
        outs.append(attend_reference.attend(params)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("gate", [None, 0.35])
def test_full_budget_unquantized_changes_nothing(publish: Publish, gate: float | None) -> None:
    state = make_state(CommitCase("full_budget"))
    q = torch.randn(4, 4, 16)
    before = [attend_over(state.memory, state.table, state.staged, q, layer) for layer in range(2)]
    decision = draw_line(state.memory, line_params(state, num_stored(state)))
    params = plan_publish(state, decision, gate, dissolve_under=0.9)
    assert publish(state.memory, params, decision) == (0, 0)
    for layer in range(2):
        after = attend_over(state.memory, params.new, state.staged[:0], q, layer)
        torch.testing.assert_close(after, before[layer], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("entries", [0, 60])
def test_absorbing_exact_duplicates_conserves_attention(publish: Publish, entries: int) -> None:
    """Keys come from few centres with no scatter and all scores are equal: merging is exact, whatever is queried."""
    state = make_state(CommitCase("twins", staged=48, entries=entries, spread=0.0, equal=True, centres=3))
    for row in range(state.memory.num_rows):  # old masses equal, as the shares assume
        for b in range(state.table.starts[row], state.table.starts[row + 1]):
            block_bytes.fp16_field(state.memory.blocks[state.table.ids[b] : state.table.ids[b] + 1],
                                   state.memory.layout.bias, 16).zero_()  # fmt: skip
    q = torch.randn(4, 4, 16) * 3
    before = [attend_over(state.memory, state.table, state.staged, q, layer) for layer in range(2)]
    decision = draw_line(state.memory, line_params(state, num_stored(state) // 2, floor=16))
    params = plan_publish(state, decision, 0.35, dissolve_under=0.7)
    absorbed, dropped = publish(state.memory, params, decision)
    assert absorbed > 0 and dropped == 0
    for layer in range(2):
        after = attend_over(state.memory, params.new, state.staged[:0], q, layer)
        torch.testing.assert_close(after, before[layer], atol=3e-3, rtol=3e-3)


def test_merged_mass_is_a_lower_bound(publish: Publish) -> None:
    state = make_state(CommitCase("mass", entries=0, spread=0.0, centres=1, staged=20))
    decision = draw_line(state.memory, line_params(state, 0, floor=1))
    params = plan_publish(state, decision, 0.35)
    assert publish(state.memory, params, decision) == (19 * state.memory.num_rows, 0)
    bias = block_bytes.read_bias(state.memory.blocks[params.new.ids], state.memory.layout)[:, 0]
    assert bool((bias <= torch.tensor(20.0).log() + 1e-2).all()) and bool((bias > 0).all())


def test_moved_tokens_are_copied_whole_and_staying_pages_keep_their_bytes(publish: Publish) -> None:
    state = make_state(CommitCase("move"))
    moved, to = state.free_slots[:6], state.free_slots[10:16]
    before = copy.deepcopy(state.memory)
    decision = draw_line(state.memory, line_params(state, 60))
    params = replace(plan_publish(state, decision, 0.35), move_from=moved, move_to=to)
    publish(state.memory, params, decision)
    for layer in range(2):
        for old, new, axes in (
            (before.pages, state.memory.pages, (0, 3, 1, 2, 4)),
            (before.seen, state.memory.seen, (0, 2, 1)),
        ):
            was = old[layer].permute(axes).flatten(0, 1)
            now = new[layer].permute(axes).flatten(0, 1)
            assert torch.equal(now[to], was[moved])
            others = torch.ones(was.shape[0], dtype=torch.bool)
            others[to] = False
            torch.testing.assert_close(now[others], was[others], equal_nan=True, atol=0, rtol=0)


def test_a_table_that_disagrees_is_refused_before_anything_is_written(publish: Publish) -> None:
    state = make_state(CommitCase("wrong"))
    decision = draw_line(state.memory, line_params(state, 60))
    params = plan_publish(state, decision, 0.35)
    new = replace(params.new, lens=params.new.lens.clone())
    new.lens[int(params.is_new.nonzero()[0])] -= 1
    before = state.memory.blocks.clone()
    with pytest.raises(AssertionError, match="row"):
        publish(state.memory, replace(params, new=new), decision)
    assert torch.equal(state.memory.blocks, before)


@pytest.mark.parametrize("format", ["int4", "k8v4"])
def test_many_commits_in_a_row_stay_finite(publish: Publish, format: BlockFormat) -> None:
    case = CommitCase("long_life", format=format, spread=0.2)
    state = make_state(case)
    for seed in range(5):
        fresh = make_state(replace(case, entries=0), seed=seed)
        for layer in range(2):
            state.memory.pages[layer].copy_(fresh.memory.pages[layer])
            state.memory.seen[layer].copy_(fresh.memory.seen[layer])
        state = replace(state, staged=fresh.staged)
        decision: Decision = draw_line(state.memory, line_params(state, 150))
        params = plan_publish(state, decision, 0.35)
        publish(state.memory, params, decision)
        used = set(params.new.ids.tolist())
        free = [b for b in range(state.memory.blocks.shape[0]) if b not in used]
        state = replace(state, table=params.new, free_blocks=torch.tensor(free))
        layout = state.memory.layout
        filled = torch.arange(layout.block_entries) < params.new.lens[:, None]
        for read in (block_bytes.read_keys, block_bytes.read_values, block_bytes.read_bias):
            assert read(state.memory.blocks[params.new.ids], layout)[filled].isfinite().all()


def test_line_over_many_equals_torch() -> None:
    """Enough scores for the histogram, with many ties and with none."""
    for equal in (False, True):
        state = make_state(CommitCase("many", staged=900, entries=1200, layers=3, equal=equal, protected=0.01))
        for keep in (0, 500, 3000, 8000):
            params = line_params(state, keep, layer_scale=(1.0, 0.7, 1.3))
            want = torch_line(state.memory, params)
            for form in LINE.values():
                got = form(state.memory, params)
                assert got.line == want.line
                assert torch.equal(got.staged_keep, want.staged_keep) and torch.equal(got.alive, want.alive)


def test_bits_do_not_depend_on_threads() -> None:
    if LIBRARY is None:
        pytest.skip("needs a C++ compiler")
    results = []
    for threads in (1, 2, 5):
        state = make_state(CommitCase("threads", format="k8v4", spread=0.2, layers=4, kv_heads=3))
        decision = draw_line(state.memory, line_params(state, 150))
        params = plan_publish(state, decision, 0.35)
        counts = native.NativePublish(LIBRARY, None, threads)(state.memory, params, decision)
        results.append((counts, state.memory.blocks, state.memory.score.view(torch.int16)))
    for counts, blocks, score in results[1:]:
        assert counts == results[0][0] and torch.equal(blocks, results[0][1]) and torch.equal(score, results[0][2])


def test_under_sanitizers() -> None:
    run_sanitized(replace(native.library(SANITIZERS), name="commit_sanitized"), "native_sanitized.py", "commit")
