"""`commit.cu` under emulation against the float64 brute force, and the bytes it moves."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from plugins import blocks as block_bytes
from plugins.commit import cuda
from plugins.commit.choices import LineChoices
from plugins.commit.cuda import CommitSizes, check_disjoint, commit_kernel, plan_commit
from plugins.commit.line import draw_line
from plugins.commit.params import LineParams, RowTable
from plugins.compile import compile_cubin, resource_usage, sass
from plugins.errors import LaunchError, UnsupportedShapeError
from plugins.kernel import Kernel
from plugins.layout import BlockLayout, Element, PageLayout
from plugins.memory import KvMemory
from plugins.native_build import find_compiler
from tests.plugins.commit_cases import CommitCase, make_state, plan_publish
from tests.plugins.commit_cuda_cases import BF16, FP16, GEOMETRIES, Commit, check, draw, emulated, plan, run, traffic
from tests.plugins.emulated_sanitized import run_sanitized_emulation

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")
INT4, K8V4, INT8, STORED_BF16, STORED_FP16 = GEOMETRIES[:5]


@pytest.mark.parametrize("case", GEOMETRIES, ids=lambda c: c.name)
@pytest.mark.parametrize(("gate", "share"), [(None, 0.4), (0.35, 0.1), (0.35, 0.4), (2.0, 0.4), (0.35, 1.0)])
def test_equals_reference(case: CommitCase, gate: float | None, share: float) -> None:
    seed = int(10 * share)
    commit = draw(replace(case, entries=3 * case.block_entries), share, gate, seed=seed)
    check(commit, *run(commit, emulated(seed)[0]))


SHAPES = {
    "first_commit": {"entries": 0},
    "nothing_staged": {"staged": 0},
    "nothing_at_all": {"staged": 0, "entries": 0},
    "one_token": {"staged": 1, "entries": 0},
    "far_apart": {"spread": 3.0},
    "near": {"spread": 0.05},
    "protected": {"protected": 0.3},
    "runs": {"staged": 45, "runs": True},
    "many": {"staged": 150, "entries": 100, "runs": True},
    "one_row": {"layers": 1, "kv_heads": 1},
    "more_rows_than_blocks": {"layers": 3, "kv_heads": 3, "entries": 20},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", [INT4, STORED_BF16], ids=lambda c: c.name)
def test_shapes(case: CommitCase, shape: str) -> None:
    commit = draw(replace(case, **SHAPES[shape]), 0.4, 0.6, seed=3)
    check(commit, *run(commit, emulated(seed=5)[0]))


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("dissolve_under", [0.0, 2.0], ids=["all_stay", "all_dissolve"])
def test_nothing_or_everything_kept(share: float, dissolve_under: float) -> None:
    commit = draw(replace(K8V4, entries=150), share, 0.5, floor=0, dissolve_under=dissolve_under)
    counts, memory = run(commit, emulated()[0])
    check(commit, counts, memory)
    assert (counts == (0, 0)) == (share == 1.0)


def test_duplicates_go_into_one_target() -> None:
    """Keys of few centres with no scatter: whole crowds are absorbed by single entries, old ones among them."""
    case = replace(INT8, spread=0.0, centres=2, staged=60, entries=40)
    commit = draw(case, 0.1, 0.35, floor=2, dissolve_under=0.0)
    below = replace(commit.decision, staged_keep=torch.zeros_like(commit.decision.staged_keep))
    old_only = plan(commit.state, below, 0.35, 0.0)
    assert len(old_only.outcome.rewritten) > 0
    for one in (commit, old_only):
        counts, memory = run(one, emulated()[0])
        check(one, counts, memory)
        assert counts[0] > 10 * (int(one.params.is_new.sum()) + len(one.outcome.rewritten))
    bias = block_bytes.read_bias(memory.blocks[old_only.params.new.ids], memory.layout)
    filled = torch.arange(memory.layout.block_entries) < old_only.params.new.lens[:, None]
    assert float(bias[filled].max()) > 2.0  # of a crowd of eight and more


@pytest.mark.parametrize("case", GEOMETRIES[:5], ids=lambda c: c.name)
def test_every_byte_moves_once(case: CommitCase) -> None:
    """Measured against what any form must read and write; only block scales of absorbed values come on top."""
    for gate, dissolve_under in ((None, 0.8), (0.6, 0.8), (0.6, 0.0)):
        commit = draw(replace(case, staged=70, entries=150, runs=True), 0.4, gate, dissolve_under=dissolve_under)
        publish, runner = emulated(shared_bytes=cuda.SHARED_BYTES["sm_90a"])
        check(commit, *run(commit, publish))
        handled, layout = traffic(commit), commit.state.memory.layout
        least = handled.read_bytes(layout)
        assert least <= runner.counters.bulk_read <= 1.03 * least
        assert runner.counters.bulk_written == handled.written_bytes(layout)


def test_keys_that_do_not_fit_stream_the_candidates_again() -> None:
    case = replace(STORED_FP16, staged=300, entries=100, layers=1, kv_heads=1, runs=True)
    commit = draw(case, 0.3, 0.6, dissolve_under=0.0)
    small = 97 << 10
    below, old_blocks = int((~commit.decision.staged_keep).sum()), commit.params.old.ids.shape[0]
    sizes = CommitSizes(1, case.staged, below, old_blocks, 0, small)
    handled, layout = traffic(commit), commit.state.memory.layout
    slabs = -(-below // plan_commit(layout, sizes, 4).query_rows)
    for shared_bytes, passes in ((small, slabs), (cuda.SHARED_BYTES["sm_90a"], 1)):
        publish, runner = emulated(shared_bytes=shared_bytes)
        check(commit, *run(commit, publish))
        again = (passes - 1) * handled.candidate_key_bytes(layout)
        assert runner.counters.bulk_read == handled.read_bytes(layout) + again
    assert slabs > 1 and handled.searched_blocks > 0


def test_slabs_of_entries_that_take_two_rows() -> None:
    """Many entries of dissolved blocks below the line, more than the room for their split keys."""
    case = replace(K8V4, staged=60, entries=260, layers=1, kv_heads=2)
    commit = draw(case, 0.2, 0.7, seed=2, dissolve_under=2.0)
    check(commit, *run(commit, emulated(shared_bytes=99 << 10)[0]))


def test_more_dissolved_blocks_than_room_for_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_CACHED_BLOCKS", 1)
    commit = draw(replace(INT4, entries=90), 0.4, 0.6, seed=4, dissolve_under=2.0)
    check(commit, *run(commit, emulated()[0]))


def test_bits_depend_neither_on_the_grid_nor_on_the_order_of_threads() -> None:
    commit = draw(replace(INT4, staged=80, entries=100, layers=3), 0.3, 0.7)
    results = []
    for seed, multiprocessors in ((0, 1), (1, 4), (2, 64)):
        publish, runner = emulated(seed)
        runner.num_multiprocessors = multiprocessors
        counts, memory = run(commit, publish)
        results.append((counts, memory.blocks, memory.score.view(torch.int16)))
    for counts, blocks, score in results[1:]:
        assert counts == results[0][0] and torch.equal(blocks, results[0][1]) and torch.equal(score, results[0][2])


def test_moved_tokens_are_copied_whole_and_other_slots_keep_their_bytes() -> None:
    commit = draw(replace(INT4, page_tokens=8), 0.4, 0.35)
    free = commit.state.free_slots
    moved, to = free[:6], free[10:16]
    commit = replace(commit, params=replace(commit.params, move_from=moved, move_to=to))
    counts, memory = run(commit, emulated()[0])
    check(commit, counts, memory)
    for old, new, axes in (
        (commit.state.memory.pages, memory.pages, (0, 3, 1, 2, 4)),
        (commit.state.memory.seen, memory.seen, (0, 2, 1)),
    ):
        for layer in range(2):
            was, now = old[layer].permute(axes).flatten(0, 1), new[layer].permute(axes).flatten(0, 1)
            assert torch.equal(now[to], was[moved])
            others = torch.ones(was.shape[0], dtype=torch.bool)
            others[to] = False
            torch.testing.assert_close(now[others], was[others], equal_nan=True, atol=0, rtol=0)


def with_padding(commit: Commit) -> Commit:
    """The same commit with -1 among slots and moves, and a block -1 before the blocks of every row."""
    old, decision, params = commit.params.old, commit.decision, commit.params
    rows = commit.state.memory.num_rows
    place = torch.tensor(old.starts[:-1]) + torch.arange(rows)  # where each row's padding goes
    is_pad = torch.zeros(old.ids.shape[0] + rows, dtype=torch.bool)
    is_pad[place] = True

    def widen(x: torch.Tensor, value: float) -> torch.Tensor:
        out = torch.full((is_pad.shape[0], *x.shape[1:]), value, dtype=x.dtype)
        out[~is_pad] = x
        return out

    starts = tuple(start + i for i, start in enumerate(old.starts))
    padded = RowTable(starts, widen(old.ids, -1), widen(old.lens, 0))
    nothing = torch.full((3,), -1)
    staged = torch.cat((nothing[:2], params.staged, nothing[:1]))
    score = torch.nn.functional.pad(decision.staged_score, (2, 1), value=torch.nan)
    keep = torch.nn.functional.pad(decision.staged_keep, (2, 1))
    return replace(
        commit,
        params=replace(params, staged=staged, old=padded, dissolve=widen(params.dissolve, 1), move_from=nothing,
                       move_to=nothing),
        decision=replace(decision, staged_keep=keep, staged_score=score, alive=widen(decision.alive, 0)),
    )  # fmt: skip


def test_padding_is_skipped() -> None:
    commit = draw(replace(INT4, entries=60), 0.4, 0.6, seed=1)
    counts, memory = run(commit, emulated()[0])
    padded_counts, padded = run(with_padding(commit), emulated()[0])
    assert padded_counts == counts
    assert torch.equal(padded.blocks, memory.blocks)
    assert torch.equal(padded.score.view(torch.int16), memory.score.view(torch.int16))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_many_commits_in_a_row_stay_finite(dtype: torch.dtype) -> None:
    case = CommitCase("long_life", format="int4", spread=0.2, head_dim=64, block_entries=16, kv_dtype=dtype)
    state, publish = make_state(case), emulated()[0]
    for seed in range(4):
        fresh = make_state(replace(case, entries=0), seed=seed)
        for layer in range(2):
            state.memory.pages[layer].copy_(fresh.memory.pages[layer])
            state.memory.seen[layer].copy_(fresh.memory.seen[layer])
        state = replace(state, staged=fresh.staged)
        decision = draw_line(state.memory, LineParams(state.staged, state.table, 150, 3))
        params = plan_publish(state, decision, 0.35)
        publish(state.memory, params, decision)
        used = set(params.new.ids.tolist())
        free = [b for b in range(state.memory.blocks.shape[0]) if b not in used]
        state = replace(state, table=params.new, free_blocks=torch.tensor(free))
        filled = torch.arange(case.block_entries) < params.new.lens[:, None]
        for read in (block_bytes.read_keys, block_bytes.read_values, block_bytes.read_bias):
            assert read(state.memory.blocks[params.new.ids], state.memory.layout)[filled].isfinite().all()


def test_a_plan_that_reads_what_it_writes_is_refused_before_anything_is_written() -> None:
    commit = draw(INT4, 0.4, 0.35)
    before = commit.state.memory.blocks.clone()
    ids = commit.params.new.ids.clone()
    new, old = commit.params.is_new.nonzero()[:, 0], commit.params.old.ids
    ids[new[0]] = old[0]
    clash = replace(commit.params, new=replace(commit.params.new, ids=ids))
    with pytest.raises(LaunchError, match="block"):
        emulated()[0](commit.state.memory, clash, commit.decision)
    ids = commit.params.new.ids.clone()
    ids[new[0]] = ids[new[1]]
    with pytest.raises(LaunchError, match="block"):
        check_disjoint(replace(commit.params, new=replace(commit.params.new, ids=ids)))
    staged, free = commit.params.staged, commit.state.free_slots
    for source, target in ((free[:1], staged[:1]), (free[:2], free[1:3]), (free[:2], free[[5, 5]])):
        with pytest.raises(LaunchError, match="slot"):
            check_disjoint(replace(commit.params, move_from=source, move_to=target))
    assert torch.equal(commit.state.memory.blocks, before)


def test_tables_that_point_outside_are_caught_by_debug_checks() -> None:
    commit = draw(INT4, 0.4, 0.35)
    staged = commit.params.staged.clone()
    staged[0] = 10_000
    with pytest.raises(Exception, match="slot outside"):
        run(replace(commit, params=replace(commit.params, staged=staged)), emulated()[0])
    ids = commit.params.new.ids.clone()
    ids[commit.params.is_new.nonzero()[0]] = 10_000
    new = replace(commit.params.new, ids=ids)
    with pytest.raises(Exception, match="outside the arena"):
        run(replace(commit, params=replace(commit.params, new=new)), emulated()[0])


def test_unsupported_geometry_is_refused() -> None:
    page = PageLayout(2, 2, 128, 16, 2)
    with pytest.raises(UnsupportedShapeError, match="block_entries"):
        commit_kernel(page, BlockLayout("int4", 256, 128), "fp16")
    with pytest.raises(ValueError, match="fp32"):
        commit_kernel(page, BlockLayout("fp32", 64, 128), "fp16")
    with pytest.raises(UnsupportedShapeError, match="shared memory"):
        plan_commit(BlockLayout("int8", 128, 128), CommitSizes(2, 100, 100, 4, 1, 99 << 10), 4)
    state = make_state(CommitCase("fp32", head_dim=64))
    decision = draw_line(state.memory, LineParams(state.staged, state.table, 20, 3))
    with pytest.raises(LaunchError, match="float32"):
        emulated()[0](copy.deepcopy(state.memory), plan_publish(state, decision, None), decision)


@pytest.mark.parametrize("sm", cuda.SHARED_BYTES)
@pytest.mark.parametrize("block", [BlockLayout(f, 64, d) for f in ("int4", "k8v4", "int8", "fp16") for d in (64, 128)],
                         ids=lambda b: f"{b.format}-{b.head_dim}")  # fmt: skip
def test_usual_blocks_fit_every_gpu(sm: str, block: BlockLayout) -> None:
    sizes = CommitSizes(256, 8192, 6000, 100, 10, cuda.SHARED_BYTES[sm])
    plan = plan_commit(block, sizes, 132)
    assert plan.launch.shared_bytes <= cuda.SHARED_BYTES[sm] and plan.query_rows >= 32


def test_under_sanitizers() -> None:
    done = run_sanitized_emulation("commit_cuda_cases", "sanitized")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]


@pytest.mark.parametrize("gate", [None, 0.6])
def test_copies_without_the_bulk_unit(gate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sm_80 and sm_89 do it: every lane copies 16 bytes."""
    real = cuda.commit_kernel

    def without_bulk(page: PageLayout, block: BlockLayout, element: Element) -> Kernel:
        kernel = real(page, block, element)
        return replace(kernel, defines=(*kernel.defines, ("HW_NO_BULK", 1)))

    monkeypatch.setattr(cuda, "commit_kernel", without_bulk)
    commit = draw(replace(INT4, entries=60, runs=True), 0.4, gate, seed=6)
    check(commit, *run(commit, emulated()[0]))


def test_cubins_have_bulk_copies_tensor_cores_and_no_spills() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    page = PageLayout(2, 2, 128, 16, 2)
    for sm in ("sm_90a", "sm_80"):
        cubin = compile_cubin(commit_kernel(page, BlockLayout("int4", 64, 128), "fp16"), sm)
        (code,) = sass(cubin).values()
        assert code.count("HMMA") >= 16 and ("UBLKCP" in code) == (sm == "sm_90a")
        assert ("LDGSTS" in code) == (sm == "sm_80")
        assert "LDL" not in code and "STL" not in code
        (usage,) = resource_usage(cubin)
        assert usage.stack_bytes == 0 and usage.registers * cuda.THREADS <= 65536


RULES: list[dict[str, object]] = [
    {}, {"layer_scale": (1.0, 0.5)}, {"outlier_z": 2.0}, {"quotas": (20, 20)}, {"choices": LineChoices(smooth=3)},
    {"choices": LineChoices(threshold=0.4)}, {"choices": LineChoices(redraw=False)},
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_line_makes_no_tensor_on_the_host_and_waits_for_no_value(rules: dict[str, object]) -> None:
    """draw_line on tensors of another device, which torch refuses to mix with tensors of the host.

    Memory of type meta has no values, so nothing can look at one.
    """
    with pytest.raises(RuntimeError):
        torch.empty(3, device="meta") + torch.ones(3)
    with pytest.raises((RuntimeError, NotImplementedError)):
        float(torch.empty(3, device="meta")[0])
    state = make_state(INT4)
    memory = KvMemory(
        *(tuple(x.to("meta") for x in arena) for arena in (state.memory.pages, state.memory.seen)),
        state.memory.blocks.to("meta"), state.memory.score.to("meta"), state.memory.layout,
    )  # fmt: skip
    old = state.table
    table = RowTable(old.starts, old.ids.to("meta"), old.lens.to("meta"))
    decision = draw_line(memory, LineParams(state.staged.to("meta"), table, 40, 3, **rules))  # type: ignore[arg-type]
    for got in (decision.staged_keep, decision.staged_score, decision.alive):
        assert got.device.type == "meta"
    assert decision.alive.shape == (old.ids.shape[0], INT4.block_entries)
