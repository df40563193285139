"""The emulation finds each planted mistake, runs the correct twins right, and its words compute what the GPU's do."""

from __future__ import annotations

import pytest
import torch
from emulated_sanitized import run_sanitized_emulation
from emulation_cases import (
    DTYPES,
    PIPELINE_SHARED,
    PIPELINE_TILES,
    SOURCES,
    THREADS,
    ExchangeParams,
    PipelineParams,
    ValuesParams,
    bugs_of,
    pipeline_kernel,
    run_exchange,
    run_pipeline,
)

from plugins import native_build
from plugins.emulation.runner import EmulatedRunner
from plugins.errors import CompileError, EmulationError, LaunchError
from plugins.kernel import Kernel, Launch

pytestmark = pytest.mark.skipif(native_build.find_compiler() is None, reason="needs a C++ compiler")
SEEDS = range(6)


@pytest.fixture(scope="module")
def emulated() -> EmulatedRunner:
    """One for all tests, so that each kernel is compiled and loaded once."""
    return EmulatedRunner()


PIPELINE_BUGS = {
    "NO_SYNC_AFTER_INIT": "after barrier_init|no barrier was initialised|never written|after the write",
    "NO_INIT_FENCE": "barrier_init_fence was not called",
    "TOO_FEW_BYTES_ANNOUNCED": "announced 240 bytes to the barrier at byte 0, the copies have 256",
    "MISALIGNED_SOURCE": "copy at global address 0x[0-9a-f]+2: not a multiple of 16",
    "MISALIGNED_DESTINATION": "copy at byte 584 of shared memory: not a multiple of 16",
    "ODD_COPY_SIZE": "copy of 248 bytes: not a positive multiple of 16",
    "WRONG_PHASE_CONSUMER": "still arriving|after the write by the copy|after the read by thread|deadlock",
    "WRONG_PHASE_PRODUCER": "deadlock in block .*warp 2: waiting for parity 0 of the barrier at byte 16",
    "NO_WAIT_FOR_EMPTY": "copy by thread .* after the (read|write) by|part of another copy under way|already has its",
    "NO_WAIT_FOR_FULL": "still arriving|after the write by the copy|after the read by thread",
    "STAGE_OVERRUN": "copy of 256 bytes at byte 1088 of shared memory: the launch has 1088 bytes",
    "A_ROW_NEVER_WRITTEN": "byte 544 was never written",
    "TOO_FEW_ARRIVALS_COUNTED": "nothing orders it after|another copy|one too many|still arriving|went on|deadlock",
    "ARRIVAL_MISSING": "deadlock .*warp 2: waiting for parity 0 of the barrier at byte 16 .*1 of 2 arrivals",
    "ARRIVAL_TWICE": "nothing orders it after|another copy|one too many|still arriving|went on|deadlock",
    "NO_WARP_SYNC_BEFORE_ARRIVAL": "copy by thread .* after the read by thread",
    "DIVERGENT_MMA": "deadlock|other lanes of its warp are at",
    "NO_COPY_END": "copy_end of the barrier at byte 0 is missing",
    "COPY_OVER_COPY": "part of another copy under way|after the write by the copy",
    "NO_WAIT_AT_END": "ended while an asynchronous copy into|deadlock",
    "BARRIER_OVERWRITTEN": "write of 4 bytes at byte 4 of shared memory: byte 4 belongs to a barrier",
    "BARRIER_NOT_INITIALISED": "no barrier was initialised at byte",
    "NO_FENCE_BEFORE_COPY": "copy at byte 576 of shared memory: thread . stored byte 576 and did not call fence_async",
}
EXCHANGE_BUGS = {
    "NO_BLOCK_SYNC": "was never written|nothing orders it after the (write|read) by thread",
    "NAMED_SYNC_OTHER_COUNT": r"named_sync\(1, \d+\): warp \d waits at this barrier for \d+ threads",
    "WARP_SKIPS_SYNC": "deadlock .*at block barrier 1 .64 of 96 threads.*warp 2: ended",
    "NO_FENCE_ASYNC": "bulk_store at byte 384 of shared memory: thread 0 stored byte 384 and did not call fence_async",
    "NO_STORE_WAIT": "is being copied out",
    "WRITE_BEFORE_STORE_WAIT": "is being copied out",
    "VIEW_OVERRUN": "4 bytes at element 96 of a view of 96 elements",
    "MISALIGNED_SHARED_VECTOR": "write of 8 bytes at byte 4 of shared memory: not aligned",
    "MISALIGNED_GLOBAL_VECTOR": "load of 8 bytes at global address .*: not aligned",
    "NULL_POINTER": "load of 4 bytes at global address",
    "STORE_OF_UNWRITTEN": "bulk_store of 384 bytes from byte 384 of shared memory: byte 452 was never written",
    "NO_WARP_SYNC": "was never written|nothing orders it after the (write|read) by thread",
    "NEGATIVE_ATOMIC_MAX": "atomic_max of -",
    "CHECK_FAILS": r"block \d, thread 5 \(warp 0, lane 5\): thread 5 is not welcome",
    "SYNC_OF_PART_OF_A_WARP": r"named_sync\(1, 80\): expected a multiple of 32",
    "NO_SYNC_BEFORE_STORE": "was never written|bulk_store by thread 0 .* after the write by thread",
    "LANE_ENDS_EARLY": "deadlock .*warp 2: lanes 0-5 at block_sync .31 of 32 lanes., lanes 6-6 ended, lanes 7-31 at",
    "SHUFFLE_OUTSIDE": "shuffle of lane 0 with 32: outside the warp",
}


@pytest.mark.parametrize("no_bulk", (0, 1))
@pytest.mark.parametrize("name", PIPELINE_BUGS)
def test_a_bug_of_the_pipeline_is_found_on_every_seed(emulated: EmulatedRunner, name: str, no_bulk: int) -> None:
    if no_bulk and name == "NO_FENCE_BEFORE_COPY":
        pytest.skip("a mistake with bulk copies only")
    bug = bugs_of("pipeline")[name]
    for seed in SEEDS:
        emulated.reseed(seed)
        with pytest.raises(EmulationError, match=PIPELINE_BUGS[name]):
            run_pipeline(emulated, bug, no_bulk=no_bulk)


@pytest.mark.parametrize("name", EXCHANGE_BUGS)
def test_a_bug_of_the_exchange_is_found_on_every_seed(emulated: EmulatedRunner, name: str) -> None:
    bug = bugs_of("exchange")[name]
    for seed in SEEDS:
        emulated.reseed(seed)
        with pytest.raises(EmulationError, match=EXCHANGE_BUGS[name]):
            run_exchange(emulated, bug)


def test_every_planted_bug_has_a_test() -> None:
    assert ["NONE", *PIPELINE_BUGS] == list(bugs_of("pipeline"))
    assert ["NONE", *EXCHANGE_BUGS] == list(bugs_of("exchange"))


@pytest.mark.parametrize("no_bulk", (0, 1))
@pytest.mark.parametrize("element", (0, 1))
def test_the_correct_pipeline(emulated: EmulatedRunner, element: int, no_bulk: int) -> None:
    for seed in range(24):
        emulated.reseed(seed)
        run_pipeline(emulated, element=element, no_bulk=no_bulk)


@pytest.mark.parametrize("no_bulk", (0, 1))
def test_the_correct_exchange(emulated: EmulatedRunner, no_bulk: int) -> None:
    for seed in range(24):
        emulated.reseed(seed)
        run_exchange(emulated, no_bulk=no_bulk)


def test_what_a_launch_moves_is_counted() -> None:
    runner = EmulatedRunner()
    run_pipeline(runner)
    counters = runner.counters
    assert counters.bulk_read == 2 * PIPELINE_TILES * 256  # each tile once
    assert counters.plain_read == 2 * 512 and counters.plain_written == 2 * PIPELINE_TILES * 512
    assert counters.read == counters.bulk_read + counters.plain_read and counters.written == counters.plain_written
    run_exchange(runner)
    assert counters.bulk_written == 5 * THREADS * 4
    assert counters.atomic == 5 * (3 * 4 + THREADS * 2)  # a sum per warp, a maximum per thread
    counters.reset()
    assert counters.read == counters.written == counters.atomic == 0


def test_the_same_seed_runs_the_same_way(emulated: EmulatedRunner) -> None:
    def complaint(seed: int) -> str:
        emulated.reseed(seed)
        with pytest.raises(EmulationError) as caught:
            run_exchange(emulated, bugs_of("exchange")["NO_BLOCK_SYNC"])
        return str(caught.value)

    assert complaint(3) == complaint(3)
    assert len({complaint(seed) for seed in range(8)}) > 1


def test_a_launch_after_a_failed_one_is_right(emulated: EmulatedRunner) -> None:
    for bug in ("WRONG_PHASE_PRODUCER", "DIVERGENT_MMA"):
        with pytest.raises(EmulationError):
            run_pipeline(emulated, bugs_of("pipeline")[bug])
        run_pipeline(emulated)


def test_shared_memory_beyond_the_launch(emulated: EmulatedRunner) -> None:
    with pytest.raises(
        EmulationError, match="write of 4 bytes at byte 1084 of shared memory: the launch has 1087 bytes"
    ):
        run_pipeline(emulated, shared_bytes=PIPELINE_SHARED - 1)


def test_what_does_not_fit_is_refused_before_it_runs(emulated: EmulatedRunner) -> None:
    kernel, params = pipeline_kernel(), PipelineParams()
    with pytest.raises(LaunchError, match="no entry 'pipe'"):
        emulated.run(kernel, "pipe", Launch(1, 96, 0), params)
    with pytest.raises(LaunchError, match="ExchangeParams has 40 bytes, the kernel's Params 32"):
        emulated.run(kernel, "pipeline", Launch(1, 96, 0), ExchangeParams())
    with pytest.raises(LaunchError, match="launched with 128 threads, compiled for 96"):
        emulated.run(kernel, "pipeline", Launch(1, 128, 0), params)
    with pytest.raises(LaunchError, match="stream: got 7"):
        emulated.run(kernel, "pipeline", Launch(1, 96, 0), params, stream=7)
    for grid, threads, shared in ((0, 32, 0), (1, 33, 0), (1, 2048, 0), (1, 32, -1)):
        with pytest.raises(LaunchError, match="expected"):
            Launch(grid, threads, shared)


def test_a_kernel_that_does_not_compile_says_why(emulated: EmulatedRunner) -> None:
    kernel = Kernel("pipeline", SOURCES / "pipeline.cu", (("ELEMENT", 0), ("Params", 1)))
    with pytest.raises(CompileError, match=r"pipeline\(ELEMENT=0 Params=1\): .*error"):
        emulated.run(kernel, "pipeline", Launch(1, 96, 0), PipelineParams())


def test_sanitizers_find_nothing_in_correct_kernels() -> None:
    done = run_sanitized_emulation("emulation_cases", "sanitized")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]


def test_sanitizers_see_an_overrun_of_global_memory() -> None:
    done = run_sanitized_emulation("emulation_cases", "sanitized_overrun")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


def words_of(emulated: EmulatedRunner, x: torch.Tensor, bits: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Results of values.cu, one column per word: [32, words] int32."""
    out = torch.zeros(32, 33, dtype=torch.int32)
    kernel = Kernel("values", SOURCES / "values.cu", (("ELEMENT", int(matrices.dtype == torch.bfloat16)),))
    params = ValuesParams(x.data_ptr(), bits.data_ptr(), matrices.data_ptr(), out.data_ptr())
    emulated.run(kernel, "values", Launch(1, 32, 512), params)
    return out


def packed(pairs: torch.Tensor) -> torch.Tensor:
    """[n, 2] halves -> [n] int32."""
    return pairs.contiguous().view(torch.int32).flatten()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_words_compute_what_torch_does(emulated: EmulatedRunner, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    edges = torch.tensor(
        [0.0, -0.0, 65504, 65519, 65520, 1e9, -1e9, 2.0**-24, 2.0**-25, 3e-8, 6.1e-5, 1 + 2**-11, 3e38]
    )
    x = torch.cat((edges, torch.randn(96 - len(edges)) * 10 ** (torch.rand(96 - len(edges)) * 8 - 5)))[
        torch.randperm(96)
    ]
    x = x.view(32, 3)
    bits = torch.randint(0, 2**31, (32, 3), dtype=torch.int32)
    matrices = torch.randn(4, 8, 8).to(dtype)
    words = words_of(emulated, x, bits, matrices)
    columns = iter(words.T.contiguous())
    a, b = x[:, :2].to(dtype), x[:, 1:].to(dtype)
    exact = a.double() * b.double() + x[:, (2, 0)].to(dtype).double()
    for expected in (x[:, 0].half().float(), x[:, 0].bfloat16().float()):
        assert torch.equal(next(columns).view(torch.float32), expected)
    assert torch.equal(next(columns), packed(a))
    assert torch.equal(next(columns).view(torch.float32), a[:, 0].float())
    assert torch.equal(next(columns).view(torch.float32), a[:, 1].float())
    torch.testing.assert_close(
        next(columns).view(dtype).view(32, 2), exact.to(dtype), equal_nan=True, rtol=1e-2, atol=0
    )
    assert torch.equal(next(columns), byte_perm(bits))
    for expected in (x[:, 0].exp2(), x[:, 0].square().log2(), x[:, 0].square().sqrt(), x[:, 0].square().rsqrt()):
        torch.testing.assert_close(next(columns).view(torch.float32), expected)
    lanes = torch.arange(32)
    for source in (torch.full((32,), 5), lanes ^ 3, torch.where(lanes < 25, lanes + 7, lanes)):
        assert torch.equal(next(columns).view(torch.float32), x[source, 0])
    ballot = sum(int(x[lane, 0] > 0) << lane for lane in range(32))
    assert next(columns).tolist() == [ballot - (ballot >> 31 << 32)] * 32
    assert next(columns).tolist() == [int((x[:, 0] > 1e30).any())] * 32
    assert next(columns).tolist() == [1] * 32
    straight = [packed(m.view(32, 2)) for m in matrices]
    turned = [packed(m.T.reshape(32, 2)) for m in matrices]
    for expected in (*straight, *turned, *straight[:2], *turned[:2], turned[0]):
        assert torch.equal(next(columns), expected)
    assert torch.equal(next(columns).view(torch.float32), torch.maximum(x[:, 0], x[:, 1]))
    assert torch.equal(next(columns).view(torch.float32), torch.minimum(x[:, 0], x[:, 1]))
    assert next(columns).view(torch.float32).tolist() == [-float("inf")] * 32


def byte_perm(bits: torch.Tensor) -> torch.Tensor:
    """PTX prmt.b32 of each row (a, b, selector)."""
    results = []
    for a, b, selector in bits.tolist():
        source = (a & 0xFFFFFFFF).to_bytes(4, "little") + (b & 0xFFFFFFFF).to_bytes(4, "little")
        chosen = bytearray()
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = source[nibble & 7]
            chosen.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        results.append(int.from_bytes(chosen, "little", signed=True))
    return torch.tensor(results, dtype=torch.int32)


def test_every_half_keeps_its_value(emulated: EmulatedRunner) -> None:
    bits = torch.zeros(32, 3, dtype=torch.int32)
    for dtype in DTYPES.values():
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        finite = every[every.isfinite()].float()
        for start in range(0, len(finite) - 63, 64 * 37):  # 32 pairs at a time, spread over all of them
            x = torch.zeros(32, 3)
            x[:, :2] = finite[start : start + 64].view(32, 2)
            words = words_of(emulated, x, bits, torch.zeros(4, 8, 8, dtype=dtype))
            assert torch.equal(words[:, 3:5].contiguous().view(torch.float32), x[:, :2])
