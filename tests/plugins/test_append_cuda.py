"""`append.cu` under emulation against the plain form in float64, and what its cubins hold."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from plugins.append import reference
from plugins.append.cuda import CudaAppend, CudaAppendParams, append_kernel, launch_append
from plugins.append.params import AppendParams
from plugins.compile import compile_cubin, resource_usage, sass
from plugins.emulation.runner import EmulatedRunner
from plugins.errors import LaunchError
from plugins.layout import BlockFormat, BlockLayout, Element, PageLayout
from plugins.memory import KvMemory
from plugins.native_build import find_compiler
from tests.plugins.emulated_sanitized import run_sanitized_emulation

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="the emulation needs a C++ compiler")
DTYPES: dict[Element, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
PAGES, G, Q_HEADS = 7, 2, 6


def make_params(rows: int, element: Element, head_dim: int, page_tokens: int, repeat: bool = False) -> AppendParams:
    """q, k and v are views of one tensor, as a fused projection gives them; memory that nobody wrote holds NaN."""
    gen = torch.Generator().manual_seed(rows)
    dtype = DTYPES[element]
    angle = torch.rand(rows, head_dim // 2, generator=gen) * 50
    cos, sin = angle.cos(), angle.sin()
    if repeat:
        cos, sin = torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)
    q, k, v = torch.randn(rows, Q_HEADS + 2 * G, head_dim, generator=gen).to(dtype).split((Q_HEADS, G, G), dim=1)
    slots = torch.randperm(PAGES * page_tokens, generator=gen)[:rows]
    pages = torch.full((PAGES, G, 2, page_tokens, head_dim), torch.nan, dtype=dtype)
    seen = torch.full((PAGES, G, page_tokens), 0.5, dtype=torch.float16)
    return AppendParams(q, k, v, cos, sin, slots, pages, seen)


def run(params: AppendParams, runner: EmulatedRunner, block_format: BlockFormat = "int8") -> torch.Tensor:
    nothing = torch.zeros(0)
    layout = BlockLayout(block_format, 16, params.pages.shape[4])
    memory = KvMemory((params.pages,), (params.seen,), nothing, nothing, layout)
    step = CudaAppend(runner).begin(params.slots, (params.cos, params.sin), memory)
    return step(0, params.q, params.k, params.v)


def expect(params: AppendParams) -> tuple[torch.Tensor, AppendParams]:
    """Rotated q and the arenas as the reference leaves them; padding rows touch no page."""
    rows = params.slots >= 0
    exact = AppendParams(
        *(t.double()[rows] for t in (params.q, params.k, params.v, params.cos, params.sin)),
        params.slots[rows], params.pages.double(), params.seen.clone(),
    )  # fmt: skip
    return reference.append(exact), exact


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize(("rows", "head_dim", "page_tokens"), [(1, 64, 8), (5, 128, 16), (23, 64, 16), (33, 128, 32)])
@pytest.mark.parametrize("repeat", [False, True], ids=["half_table", "full_table"])
def test_equals_reference(element: Element, rows: int, head_dim: int, page_tokens: int, repeat: bool) -> None:
    params = make_params(rows, element, head_dim, page_tokens, repeat)
    params.slots[1::4] = -1
    expected_q, exact = expect(params)
    q = run(params, EmulatedRunner(seed=rows))
    assert q.is_contiguous() and bool(q.isfinite().all())
    for got, want in ((q[params.slots >= 0], expected_q), (params.pages, exact.pages)):
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=STEP[got.dtype], equal_nan=True)
    assert torch.equal(params.seen, exact.seen)


def test_every_byte_moves_once() -> None:
    rows, head_dim = 19, 128
    params, runner = make_params(rows, "fp16", head_dim, 16), EmulatedRunner()
    run(params, runner)
    vectors = rows * (Q_HEADS + 2 * G) * head_dim * 2
    assert runner.counters.written == vectors + rows * G * 2  # and `seen`
    angles = rows * (Q_HEADS + G) * head_dim * 4  # out of L1 after the first head
    threads = rows * 2 * G * (head_dim // 16)
    assert runner.counters.read == vectors + angles + 4 * threads


def test_no_rows_launch_nothing() -> None:
    params, runner = make_params(0, "fp16", 64, 8), EmulatedRunner()
    assert run(params, runner).shape == (0, Q_HEADS, 64) and runner.counters.written == 0


def test_slot_outside_the_pages_is_caught() -> None:
    params = make_params(3, "fp16", 64, 8)
    params.slots[2] = PAGES * 8
    with pytest.raises(Exception, match="slot outside"):
        run(params, EmulatedRunner())


def test_misaligned_memory_is_refused_before_the_launch() -> None:
    kernel = append_kernel(PageLayout(1, G, 64, 8, 2), "fp16")
    aligned = dict.fromkeys(("q", "k", "v", "q_out", "pages", "cos", "sin"), 1 << 20)
    strides = dict.fromkeys(("q_stride", "k_stride", "v_stride", "rotary_stride"), 64)
    for name, value in (("q", (1 << 20) + 8), ("cos", (1 << 20) + 4), ("k_stride", 65)):
        fields = {**aligned, **strides, name: value}
        with pytest.raises(LaunchError, match=name):
            launch_append(EmulatedRunner(), kernel, CudaAppendParams(rows=1, q_heads=1, kv_heads=1, **fields))


def test_wrong_types_are_refused() -> None:
    params = make_params(3, "fp16", 64, 8)
    with pytest.raises(LaunchError, match="float32"):
        run(replace(params, q=params.q.float()), EmulatedRunner())
    with pytest.raises(LaunchError, match="float32"):
        run(replace(params, pages=params.pages.float()), EmulatedRunner())


def sanitized(runner: EmulatedRunner) -> None:
    """Run by `test_under_sanitizers` in a process with AddressSanitizer."""
    for rows, head_dim in ((1, 64), (9, 128)):
        params = make_params(rows, "bf16", head_dim, 8)
        params.slots[1::4] = -1
        run(params, runner)


def test_under_sanitizers() -> None:
    done = run_sanitized_emulation("test_append_cuda", "sanitized")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]


def test_cubins_use_wide_accesses_and_no_stack() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for sm in ("sm_90a", "sm_80"):
        cubin = compile_cubin(append_kernel(PageLayout(2, 2, 128, 16, 2), "bf16"), sm)
        (code,) = sass(cubin).values()
        assert "STG.E.128" in code and re.search(r"LDG\.E[.\w]*\.128", code)
        (usage,) = resource_usage(cubin)
        assert usage.stack_bytes == 0 and usage.registers <= 64  # four blocks of 256 threads on a multiprocessor
