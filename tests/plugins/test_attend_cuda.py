"""`attend.cu` under emulation against the float64 reference, the bytes it reads, and what its cubins hold."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from plugins.attend import reference
from plugins.attend.cuda import CHUNK_ROWS, DECODE_ROWS, AttendArgs, AttendKernel, CudaAttend, launch_attend
from plugins.attend.tiles import TilePlan, split_rows
from plugins.compile import SMS, compile_cubin, resource_usage, sass
from plugins.emulation.runner import EmulatedRunner
from plugins.errors import LaunchError, UnsupportedShapeError
from plugins.kv_launch import StagedTiles, kv_args, kv_shape, put_tables, set_layer, single_layer
from plugins.native_build import find_compiler
from plugins.staging import TableStaging
from tests.plugins.attend_cases import AttendCase, make_attend_case
from tests.plugins.attend_cuda_cases import (
    CHUNKS,
    DECODE,
    GEOMETRIES,
    MORE_GEOMETRIES,
    SQUARES,
    FewStages,
    PlainCopies,
    assert_result,
    check_attend,
    insert_holes,
    live_bytes,
    log_sum_exp,
    run_attend,
    with_tables,
)
from tests.plugins.emulated_sanitized import run_sanitized_emulation

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")
SMALL, LARGE = GEOMETRIES[0], GEOMETRIES[1]


@pytest.fixture(scope="module")
def runner() -> EmulatedRunner:
    return EmulatedRunner()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda c: c.name)
@pytest.mark.parametrize("tables", DECODE + CHUNKS + SQUARES, ids=lambda c: c.name)
def test_equals_reference(runner: EmulatedRunner, geometry: AttendCase, tables: AttendCase) -> None:
    check_attend(with_tables(geometry, tables), runner)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", MORE_GEOMETRIES, ids=lambda c: c.name)
def test_equals_reference_in_more_geometries(runner: EmulatedRunner, geometry: AttendCase) -> None:
    for tables in (DECODE + CHUNKS + SQUARES)[::2]:  # the geometries above have all of them
        check_attend(with_tables(geometry, tables), runner)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("tables", [CHUNKS[1], SQUARES[3]], ids=lambda c: c.name)
def test_any_order_of_warps_and_copies_gives_the_same(seed: int, tables: AttendCase) -> None:
    case = with_tables(SMALL, dataclasses.replace(tables, max_entries=150))
    results = [make_attend_case(case) for _ in range(2)]
    for params, order in zip(results, (0, seed), strict=True):
        run_attend(params, case.group_size, EmulatedRunner(seed=order))
    for name in ("out", "seen", "score"):
        a, b = (getattr(params, name).view(torch.int16) for params in results)
        assert torch.equal(a, b), name


@pytest.mark.parametrize("geometry", (SMALL, GEOMETRIES[2]), ids=lambda c: c.name)
@pytest.mark.parametrize("rows", [(1, 1), (7, 1)], ids=["decode", "chunk"])
def test_extreme_logits(runner: EmulatedRunner, geometry: AttendCase, rows: tuple[int, int]) -> None:
    """Logits of +-1e4; of 4-bit entries, whose own rounding moves them by whole units, only that nothing overflows."""
    tables = AttendCase("extreme", rows=rows, tokens=(37, 8), logit_scale=1e4)
    case = with_tables(geometry, tables)
    params = make_attend_case(case)
    expected = reference.attend(params)
    run_attend(params, case.group_size, runner)
    if geometry is SMALL:
        assert params.out.isfinite().all() and params.out.abs().max() < 8
        assert (params.seen.nan_to_num(0) <= 1).all()
    else:
        assert_result(params, expected, 2e-2)


def test_ids_of_minus_one_are_skipped(runner: EmulatedRunner) -> None:
    for tables in (DECODE[8], CHUNKS[1]):
        case = with_tables(SMALL, tables)
        plain, holed = make_attend_case(case), make_attend_case(case)
        expected = reference.attend(plain)
        run_attend(dataclasses.replace(holed, tables=insert_holes(holed.tables)), case.group_size, runner)
        assert_result(holed, expected, 2e-3)


def test_copies_of_older_gpus_give_the_same(runner: EmulatedRunner) -> None:
    for tables in (DECODE[1], CHUNKS[1]):
        check_attend(with_tables(SMALL, tables), PlainCopies(runner))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_any_number_of_stages(num_stages: int) -> None:
    """Warps take units in turn, so they meet a stage in turn too unless its number is a multiple of theirs."""
    decode = AttendCase("decode", rows=(1,), tokens=(700,), max_entries=150, kv_heads=1)
    for tables, seeds in ((decode, (0, 1, 2, 3)), (CHUNKS[1], (0,))):
        for seed in seeds:
            check_attend(with_tables(SMALL, tables), FewStages(EmulatedRunner(seed), num_stages))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda c: c.name)
def test_decode_reads_each_live_byte_once(geometry: AttendCase) -> None:
    case = with_tables(geometry, AttendCase("bytes", rows=(1, 1), tokens=(333, 18), max_entries=300, group_size=4))
    params, runner = make_attend_case(case), EmulatedRunner()
    run_attend(params, case.group_size, runner)
    assert runner.counters.bulk_read == live_bytes(params)


def test_chunk_reads_each_live_byte_once_per_tile(runner: EmulatedRunner) -> None:
    case = with_tables(SMALL, AttendCase("bytes", rows=(40,), tokens=(400,), group_size=3, record="none"))
    params, runner = make_attend_case(case), EmulatedRunner()
    run_attend(params, case.group_size, runner)
    # 21 rows of 3 heads are a tile: the second one reads all, the first leaves out what comes after its rows.
    least = 2 * live_bytes(params) - 2 * 19 * case.kv_heads * case.head_dim * 2
    assert least <= runner.counters.bulk_read <= 1.03 * least


def test_launches_take_addresses_and_give_the_log_sum_exp(runner: EmulatedRunner) -> None:
    case = with_tables(SMALL, AttendCase("raw", rows=(1, 1, 1), tokens=(50, 3, 0), max_entries=40))
    params = make_attend_case(case)
    expected = reference.attend(params)
    memory, tables = single_layer(params)
    kernel = AttendKernel(kv_shape(memory, case.group_size), DECODE_ROWS, "sm_90a")
    ranges, staging = kernel.num_ranges(runner.num_multiprocessors), TableStaging(runner.device)
    staging.begin()
    plan = TilePlan(kernel.shape, case.kv_heads, DECODE_ROWS, ranges, min_range_bytes=1)
    tiles = StagedTiles.put(tables, split_rows(tables, case.group_size)[0], plan, staging)
    on_device = put_tables(tables, staging)
    staging.flush()
    parts, sums = (torch.full((n // 4,), torch.nan) for n in kernel.part_bytes(tiles.max_tiles))
    logits, lse = torch.full((tiles.num_logits * 16,), torch.nan), torch.full(params.q.shape[:2], torch.nan)
    args = AttendArgs(kv_args(memory, on_device, case.group_size), scale=params.scale)
    set_layer(args.kv, memory, on_device, 0)
    named = {"q": params.q, "out": params.out, "lse": lse, "seen": params.seen, "score": params.score}
    named |= {"record": on_device.record, "record_skip": on_device.record_skip}
    named |= {"parts": parts, "part_sums": sums, "logits": logits}
    for name, tensor in named.items():
        setattr(args, name, tensor.data_ptr())
    args.tiles, args.block_tiles = tiles.addresses(0)
    launch_attend(runner, kernel, args)
    assert tiles.max_tiles > len(case.rows) * case.kv_heads, "some rows must be split"
    assert_result(params, expected, 2e-3)
    torch.testing.assert_close(lse, log_sum_exp(params), atol=2e-3, rtol=0)
    args.q += 2
    with pytest.raises(LaunchError, match=r"q: got address .*nothing was launched"):
        launch_attend(runner, kernel, args)


def test_what_kernels_cannot_take_is_refused_before_a_launch(runner: EmulatedRunner) -> None:
    def attend(case: AttendCase, group: int | None = None) -> None:
        run_attend(make_attend_case(case), case.group_size if group is None else group, runner)

    decode = DECODE[0]
    with pytest.raises(UnsupportedShapeError, match=r"pages: got torch\.float32"):
        attend(dataclasses.replace(decode, head_dim=64, block_entries=16))
    with pytest.raises(UnsupportedShapeError, match="head_dim: got 80"):
        attend(dataclasses.replace(with_tables(SMALL, decode), head_dim=80))
    with pytest.raises(UnsupportedShapeError, match="query heads per KV head: got 17"):
        attend(dataclasses.replace(with_tables(SMALL, decode), group_size=17))
    with pytest.raises(LaunchError, match=r"q: got torch\.float16 \(1, 6, 64\)"):
        attend(with_tables(SMALL, decode), group=4)
    with pytest.raises(UnsupportedShapeError, match="shared memory on sm_89"):
        big = with_tables(dataclasses.replace(LARGE, format="bf16", block_entries=256), decode)
        params = make_attend_case(big)
        CudaAttend(runner, TableStaging(runner.device), big.group_size, "sm_89")(params)


def test_no_undefined_behaviour() -> None:
    done = run_sanitized_emulation("tests.plugins.attend_cuda_cases", "sanitized")
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stdout + done.stderr


@pytest.mark.parametrize("rows", [DECODE_ROWS, CHUNK_ROWS])
@pytest.mark.parametrize("sm", SMS)
def test_compiles_with_tensor_cores_and_without_spills(sm: str, rows: int) -> None:
    memory, _ = single_layer(make_attend_case(with_tables(LARGE, DECODE[0])))
    kernel = AttendKernel(kv_shape(memory, 4), rows, sm).kernel
    cubin = compile_cubin(kernel, sm)
    assert {(r.entry, r.stack_bytes) for r in resource_usage(cubin)} == {("attend_tiles", 0), ("attend_combine", 0)}
    code = sass(cubin)
    assert re.search(r"\bHMMA\b", code["attend_tiles"]) and re.search(r"\bMOVM\b", code["attend_tiles"])
    assert bool(re.search(r"\bUBLKCP\b", code["attend_tiles"])) == (sm in ("sm_90a", "sm_120"))
    assert not any(re.search(r"\b(LDL|STL)\b", text) for text in code.values())
