"""`score`: the torch form and the kernel under emulation against the float64 reference, and against `attend`."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from plugins.attend import reference as attend_reference
from plugins.attend.params import RECORD_SQUARES, AttendParams
from plugins.attend.tiles import TilePlan, build_tiles, recorded_rows
from plugins.compile import SMS, compile_cubin, resource_usage, sass
from plugins.emulation.runner import EmulatedRunner
from plugins.kernel import KernelRunner
from plugins.kv_launch import kv_shape, single_layer
from plugins.native_build import find_compiler
from plugins.score import cpu, reference
from plugins.score.cuda import CudaScore, ScoreKernel
from plugins.score.params import ScoreParams
from plugins.staging import TableStaging
from tests.plugins.attend_cases import CASES, AttendCase, make_attend_case
from tests.plugins.attend_cuda_cases import (
    CHUNKS,
    DECODE,
    GEOMETRIES,
    SQUARES,
    PlainCopies,
    insert_holes,
    log_sum_exp,
    with_tables,
)

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")
TOLERANCE = 2e-3
SEVERAL = (*DECODE[:6], DECODE[7], DECODE[8], DECODE[10], DECODE[14], *CHUNKS, *SQUARES)
BOTH_MARKS = [*CASES, *(dataclasses.replace(c, name=f"{c.name}_squares", marks=(RECORD_SQUARES,)) for c in CASES)]


def make_score_case(case: AttendCase, seed: int = 0) -> ScoreParams:
    return of_attend(make_attend_case(case, seed))


def of_attend(params: AttendParams) -> ScoreParams:
    names = ("q", "pages", "seen", "blocks", "score", "block_layout", "tables", "scale")
    return ScoreParams(lse=log_sum_exp(params), **{name: getattr(params, name) for name in names})


def assert_result(params: ScoreParams, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for got, wanted in zip((params.seen, params.score), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


def run_kernel(params: ScoreParams, group: int, runner: KernelRunner) -> None:
    CudaScore(runner, TableStaging(runner.device), group)(params)


@pytest.fixture(scope="module")
def runner() -> EmulatedRunner:
    return EmulatedRunner()


@pytest.mark.parametrize("case", BOTH_MARKS, ids=lambda c: c.name)
def test_reference_records_what_attention_records(case: AttendCase) -> None:
    params = make_attend_case(case)
    _, seen, score = attend_reference.attend(params)
    got_seen, got_score = reference.score(of_attend(params))
    # The log-sum-exp is rounded to fp32, which matters where logits are large.
    tolerance = 1e-5 if case.logit_scale == 1 else 1e-2
    torch.testing.assert_close(got_seen, seen, atol=tolerance, rtol=0, equal_nan=True)
    torch.testing.assert_close(got_score, score, atol=tolerance, rtol=0, equal_nan=True)


@pytest.mark.parametrize("case", [c for c in BOTH_MARKS if c.logit_scale == 1], ids=lambda c: c.name)
def test_torch_form_equals_reference(case: AttendCase) -> None:
    params = make_score_case(case)
    expected = reference.score(params)
    cpu.score(params)
    assert_result(params, expected)


@pytest.mark.parametrize("mark", [1, RECORD_SQUARES])
def test_tiles_of_the_torch_form_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch, mark: int) -> None:
    case = AttendCase("tiles", rows=(50, 3), tokens=(90, 20), record="some", record_skip=7, marks=(mark,))
    whole, tiled = make_score_case(case), make_score_case(case)
    cpu.score(whole)
    monkeypatch.setattr(cpu, "TILE_LOGITS", 500)
    cpu.score(tiled)
    for name in ("seen", "score"):
        torch.testing.assert_close(getattr(tiled, name), getattr(whole, name), equal_nan=True)


def test_squares_of_the_torch_form_add_up_over_calls() -> None:
    """A key that every row reads with the same weight w: n rows in any number of calls give sqrt(n) w."""
    once = make_score_case(AttendCase("once", rows=(8,), tokens=(30,), max_entries=0, group_size=1, record_skip=8))
    once.q.fill_(0.0)
    once.lse.fill_(math.log(4.0))  # every weight is a quarter
    once.seen.zero_()
    for first, last in ((0, 3), (3, 4), (4, 8)):
        once.tables.record.zero_()
        once.tables.record[first:last] = RECORD_SQUARES
        cpu.score(once)
    page = int(once.tables.page_ids[0])
    torch.testing.assert_close(
        once.seen[page].float(), torch.full_like(once.seen[page].float(), 0.25 * 8**0.5), atol=1e-3, rtol=0
    )


@needs_compiler
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda c: c.name)
def test_kernel_equals_reference(runner: EmulatedRunner, geometry: AttendCase) -> None:
    for tables in SEVERAL:
        case = with_tables(geometry, tables)
        params = make_score_case(case)
        expected = reference.score(params)
        kept = {name: getattr(params, name).clone() for name in ("q", "lse", "pages", "blocks")}
        run_kernel(params, case.group_size, runner)
        assert_result(params, expected)
        for name, before in kept.items():
            assert torch.equal(getattr(params, name).view(torch.uint8), before.view(torch.uint8)), (case.name, name)


@needs_compiler
@pytest.mark.parametrize("tables", [CHUNKS[1], SQUARES[1]], ids=lambda c: c.name)
def test_kernel_skips_ids_of_minus_one_and_rows_that_see_nothing(runner: EmulatedRunner, tables: AttendCase) -> None:
    case = with_tables(GEOMETRIES[0], tables)
    params = make_score_case(case)
    params.lse[3:40] = -torch.inf
    expected = reference.score(params)
    run_kernel(dataclasses.replace(params, tables=insert_holes(params.tables)), case.group_size, runner)
    assert_result(params, expected)


@needs_compiler
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("tables", [CHUNKS[1], SQUARES[1]], ids=lambda c: c.name)
def test_any_order_of_warps_and_either_copy_gives_the_same(seed: int, tables: AttendCase) -> None:
    case = with_tables(GEOMETRIES[0], tables)
    first, second = make_score_case(case), make_score_case(case)
    run_kernel(first, case.group_size, EmulatedRunner())
    run_kernel(second, case.group_size, PlainCopies(EmulatedRunner(seed=seed)))
    for name in ("seen", "score"):
        assert torch.equal(getattr(first, name).view(torch.int16), getattr(second, name).view(torch.int16)), name


@needs_compiler
def test_kernel_reads_keys_alone_once_per_tile() -> None:
    case = with_tables(GEOMETRIES[0], AttendCase("bytes", rows=(8,), tokens=(200,), max_entries=160, group_size=4))
    params, runner = make_score_case(case), EmulatedRunner()
    run_kernel(params, case.group_size, runner)
    tables, layout = params.tables, params.block_layout
    least = int(tables.page_lens.sum()) * case.kv_heads * case.head_dim * 2
    scales_and_bias = layout.v_scale - layout.k_scale + layout.block_bytes - layout.bias
    least += int(tables.block_lens.sum()) * layout.k_row_bytes + tables.block_ids.shape[0] * scales_and_bias
    assert runner.counters.bulk_read == least


@needs_compiler
def test_bits_of_squares_do_not_depend_on_how_the_work_is_cut() -> None:
    """A GPU of 1 or of 7 multiprocessors: keys get what rows give them, in the order of rows."""
    case = with_tables(GEOMETRIES[0], SQUARES[1])
    results, pieces = [], []
    for multiprocessors in (1, 7):
        runner, params = EmulatedRunner(seed=multiprocessors), make_score_case(case)
        runner.num_multiprocessors = multiprocessors
        run_kernel(params, case.group_size, runner)
        results.append(params)
        memory, tables = single_layer(params)
        kernel = ScoreKernel(kv_shape(memory, case.group_size), "sm_90a")
        plan = TilePlan(kernel.shape, case.kv_heads, kernel.query_rows, kernel.num_ranges(multiprocessors))
        pieces.append(int(build_tiles(tables, recorded_rows(tables), plan).block_tiles[0, -1]))
    assert pieces[0] < pieces[1], "the cuts must differ"
    for name in ("seen", "score"):
        first, second = (getattr(params, name).view(torch.int16) for params in results)
        assert torch.equal(first, second), name


@needs_compiler
def test_squares_of_two_launches_add_up(runner: EmulatedRunner) -> None:
    """The second launch finds what the first left; protected entries keep their infinite score."""
    params = make_score_case(with_tables(GEOMETRIES[0], SQUARES[1]))
    for name in ("seen", "score"):
        held = getattr(params, name)
        held[held.isfinite()] = 0.0
    expected = tuple(math.sqrt(2.0) * x for x in reference.score(params))
    for _ in range(2):
        run_kernel(params, 3, runner)
    assert_result(params, expected)
    assert params.score.isposinf().sum() == 1 and float(params.score[params.score.isfinite()].max()) > 0.1


@needs_compiler
@pytest.mark.parametrize("sm", SMS)
def test_compiles_with_tensor_cores_and_without_spills(sm: str) -> None:
    memory, _ = single_layer(make_attend_case(with_tables(GEOMETRIES[1], DECODE[0])))
    cubin = compile_cubin(ScoreKernel(kv_shape(memory, 4), sm).kernel, sm)
    (used,) = resource_usage(cubin)
    assert (used.entry, used.stack_bytes) == ("score_tiles", 0)
    code = sass(cubin)["score_tiles"]
    assert re.search(r"\bHMMA\b", code) and not re.search(r"\b(LDL|STL)\b", code)
    assert bool(re.search(r"\bUBLKCP\b", code)) == (sm in ("sm_90a", "sm_120"))
