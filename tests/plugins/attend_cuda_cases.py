"""Attention cases for the CUDA kernels under emulation, and what they must give."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import torch

from plugins.attend import reference
from plugins.attend.cuda import AttendArgs, CudaAttend
from plugins.attend.params import RECORD_SQUARES, AttendParams, AttendTables
from plugins.emulation.runner import EmulatedRunner
from plugins.kernel import Kernel, KernelRunner, Launch
from plugins.score.cuda import ScoreArgs
from plugins.staging import TableStaging
from tests.plugins.attend_cases import AttendCase, make_attend_case

# Of the result of a float64 form on the same inputs. bf16: its rounding of the output alone is 2^-9 of the value.
OUT_TOLERANCE = {"fp16": 2e-3, "bf16": 6e-3}
WEIGHT_TOLERANCE = 2e-3

# Each is compiled once; what varies below is tables, query heads per KV head and values.
GEOMETRIES = (
    AttendCase("int4", head_dim=64, page_tokens=16, block_entries=16, dtype="fp16", kv_dtype="fp16", format="int4"),
    AttendCase("k8v4", head_dim=128, page_tokens=8, block_entries=64, dtype="bf16", kv_dtype="bf16", format="k8v4"),
    AttendCase("bf16", head_dim=64, page_tokens=32, block_entries=24, dtype="bf16", kv_dtype="bf16", format="bf16"),
)  # fmt: skip
MORE_GEOMETRIES = (
    AttendCase("int8", head_dim=128, page_tokens=16, block_entries=16, dtype="fp16", kv_dtype="fp16", format="int8"),
    AttendCase("int4_bf16", head_dim=128, page_tokens=24, block_entries=64, dtype="bf16", kv_dtype="bf16"),
    AttendCase("k8v4_fp16", head_dim=64, page_tokens=8, block_entries=64, dtype="fp16", kv_dtype="fp16", format="k8v4"),
    AttendCase("int8_bf16", head_dim=64, page_tokens=16, block_entries=8, dtype="bf16", kv_dtype="bf16", format="int8"),
    AttendCase("fp16", head_dim=128, page_tokens=16, block_entries=64, dtype="fp16", kv_dtype="fp16", format="fp16"),
)  # fmt: skip

DECODE = (
    AttendCase("decode"),
    AttendCase("decode_batch", rows=(1, 1, 1), tokens=(5, 133, 1), max_entries=150),
    AttendCase("one_token", tokens=(1,), max_entries=0),
    AttendCase("no_committed", tokens=(40,), max_entries=0),
    AttendCase("no_active", tokens=(0,), max_entries=90),
    AttendCase("nothing_at_all", tokens=(0,), max_entries=0),
    AttendCase("pages_exactly_full", tokens=(96,)),
    AttendCase("partial_inner_pages", rows=(1, 1), tokens=(50, 31), holes=True, record_skip=9),
    AttendCase("few_rows", rows=(3, 1, 2), tokens=(40, 12, 2), record="some", record_skip=3),
    AttendCase("record_none", rows=(2, 1), tokens=(9, 9), record="none"),
    AttendCase("skip_all", rows=(3, 1), tokens=(13, 40), record_skip=1000),
    AttendCase("one_head", rows=(5,), tokens=(40,), group_size=1),
    AttendCase("eight_heads", rows=(1, 2), tokens=(70, 9), group_size=8),
    AttendCase("sixteen_heads", rows=(1, 1), tokens=(70, 9), group_size=16, kv_heads=1),
    AttendCase("ragged_heads", rows=(1, 1), tokens=(3, 200), kv_heads=5, group_size=4, max_entries=300),
)
CHUNKS = (
    AttendCase("chunk", rows=(13,), tokens=(13,)),
    AttendCase("chunk_over_history", rows=(70, 1, 16), tokens=(140, 12, 16), record="some", record_skip=3),
    AttendCase("chunk_with_holes", rows=(30,), tokens=(90,), holes=True, record_skip=20),
    AttendCase("chunk_of_one_head", rows=(70,), tokens=(75,), group_size=1, record="none"),
    AttendCase("chunk_of_sixteen", rows=(9,), tokens=(40,), group_size=16, kv_heads=1),
)
SQUARES = (
    AttendCase("squares_of_few_rows", rows=(3, 1, 2), tokens=(40, 140, 2), record="some", record_skip=3,
               marks=(RECORD_SQUARES,)),
    AttendCase("squares_in_passes", rows=(70, 1, 16), tokens=(140, 12, 16), record_skip=3, marks=(RECORD_SQUARES,)),
    AttendCase("squares_of_sixteen", rows=(9,), tokens=(40,), holes=True, group_size=16, kv_heads=1,
               marks=(RECORD_SQUARES,)),
    AttendCase("squares_beside_maxima", rows=(50, 40, 2, 1), tokens=(60, 90, 20, 30), record="some",
               marks=(RECORD_SQUARES, 1)),
)  # fmt: skip


def with_tables(geometry: AttendCase, tables: AttendCase) -> AttendCase:
    """The rows, tokens and heads of one case in the geometry of another."""
    names = ("head_dim", "page_tokens", "block_entries", "dtype", "kv_dtype", "format")
    return dataclasses.replace(tables, **{name: getattr(geometry, name) for name in names})


class PlainCopies:
    """A runner whose kernels copy as they do before sm_90: every lane 16 bytes at a time."""

    def __init__(self, runner: EmulatedRunner) -> None:
        self._runner = runner
        self.device, self.num_multiprocessors = runner.device, runner.num_multiprocessors

    def run(self, kernel: Kernel, entry: str, launch: Launch, params: object, stream: int | None = None) -> None:
        plain = dataclasses.replace(kernel, defines=(*kernel.defines, ("HW_NO_BULK", 1)))
        self._runner.run(plain, entry, launch, params, stream)  # type: ignore[arg-type]


class FewStages:
    """A runner whose kernels of `attend` and `score` have so many stages only."""

    def __init__(self, runner: KernelRunner, num_stages: int) -> None:
        self._runner, self._num_stages = runner, num_stages
        self.device, self.num_multiprocessors = runner.device, runner.num_multiprocessors

    def run(
        self, kernel: Kernel, entry: str, launch: Launch, params: ctypes.Structure, stream: int | None = None
    ) -> None:
        assert isinstance(params, AttendArgs | ScoreArgs) and params.num_stages >= self._num_stages
        params.num_stages = self._num_stages
        self._runner.run(kernel, entry, launch, params, stream)


def run_attend(params: AttendParams, group: int, runner: KernelRunner) -> None:
    """`attend` by the kernels, on tensors of the runner's device."""
    CudaAttend(runner, TableStaging(runner.device), group)(params)


def check_attend(case: AttendCase, runner: KernelRunner, seed: int = 0) -> None:
    """Runs a case and compares everything that may and that may not change with the float64 reference."""
    params = make_attend_case(case, seed)
    expected = reference.attend(params)
    kept = {name: getattr(params, name).clone() for name in ("q", "pages", "blocks")}
    run_attend(params, case.group_size, runner)
    assert_result(params, expected, OUT_TOLERANCE[case.dtype])
    for name, before in kept.items():
        assert torch.equal(getattr(params, name).view(torch.uint8), before.view(torch.uint8)), name


def assert_result(
    params: AttendParams, expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tolerance: float
) -> None:
    out, seen, score = expected
    assert not params.out.isnan().any()
    torch.testing.assert_close(params.out.double(), out, atol=tolerance, rtol=tolerance)
    # Norms exceed 1, and fp16 rounds them after every pass.
    rtol = WEIGHT_TOLERANCE if RECORD_SQUARES in params.tables.record else 0.0
    torch.testing.assert_close(params.seen.double(), seen, atol=WEIGHT_TOLERANCE, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(params.score.double(), score, atol=WEIGHT_TOLERANCE, rtol=rtol, equal_nan=True)


def live_bytes(params: AttendParams) -> int:
    """K and V of the page tokens and the blocks that the tables list, all KV heads."""
    tables, (_, kv_heads, _, _, head_dim) = params.tables, params.pages.shape
    tokens = int(tables.page_lens[tables.page_ids >= 0].sum())
    blocks = int(((tables.block_ids >= 0) & (tables.block_lens > 0)).sum())
    return tokens * kv_heads * 2 * head_dim * 2 + blocks * params.block_layout.block_bytes


def log_sum_exp(params: AttendParams) -> torch.Tensor:
    """[rows, q_heads] fp32, of the reference's keys in float64."""
    tables, q = params.tables, params.q.double()
    lse = torch.full(params.q.shape[:2], -math.inf, dtype=torch.float64)
    group = params.q.shape[1] // params.pages.shape[1]
    starts = tables.row_starts.tolist()
    for sequence in range(len(starts) - 1):
        for g in range(params.pages.shape[1]):
            tokens = reference._page_tokens(params, sequence, g)
            entries = reference._block_entries(params, sequence, g)
            for row in range(starts[sequence], starts[sequence + 1]):
                visible = tokens[: max(0, len(tokens) - (starts[sequence + 1] - 1 - row))] + entries
                if not visible:
                    continue
                keys = torch.stack([token[0] for token in visible])
                bias = torch.tensor([token[2] for token in visible], dtype=torch.float64)
                for head in range(g * group, (g + 1) * group):
                    lse[row, head] = (keys @ q[row, head] * params.scale + bias).logsumexp(0)
    return lse.float()


def insert_holes(tables: AttendTables) -> AttendTables:
    """The same tables with an item of id -1 before every page and block, whose length says nothing."""

    def spread(ids: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        holes = torch.full_like(ids, -1)
        return torch.stack([holes, ids], 1).reshape(-1), torch.stack([torch.full_like(lens, 7), lens], 1).reshape(-1)

    pages = spread(tables.page_ids, tables.page_lens)
    blocks = spread(tables.block_ids, tables.block_lens)
    return dataclasses.replace(
        tables, page_starts=tables.page_starts * 2, page_ids=pages[0], page_lens=pages[1],
        block_starts=tables.block_starts * 2, block_ids=blocks[0], block_lens=blocks[1],
    )  # fmt: skip


def sanitized(runner: EmulatedRunner) -> None:
    """What runs under AddressSanitizer: the parts of both tile heights and of `score`."""
    geometry = GEOMETRIES[0]
    for tables in (DECODE[1], DECODE[7], CHUNKS[1], SQUARES[0], SQUARES[3]):
        check_attend(with_tables(geometry, tables), runner)
