"""Run by tests of native forms in a process with AddressSanitizer loaded first: small cases on every level.

Arguments: the library built with the sanitizers, and which operation it holds. Tensors come from malloc, so accesses
beyond them are seen.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import torch
from commit_cases import CASES, CommitCase, make_state, plan_publish

from plugins import native_levels
from plugins.append.native import NativeAppend
from plugins.commit.native import NativeLine, NativePublish
from plugins.commit.params import LineParams
from plugins.layout import CODE_BITS, BlockLayout
from plugins.linear.cpu import TorchLinear
from plugins.linear.native import NativeLinear, WideLinear
from plugins.linear.params import Int8Weight, LinearForm
from plugins.memory import KvMemory
from plugins.pointwise.native import NativePointwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pointwise(lib: ctypes.CDLL) -> None:
    for level in native_levels.levels_of(lib, "commitkv_rms_norm"):
        form = NativePointwise(lib, level, 2)
        for dtype in DTYPES:
            for rows, dim in ((1, 576), (3, 9), (5, 40), (150, 512)):
                x, weight = torch.randn(rows, dim).to(dtype), torch.rand(dim)
                form.rms_norm(x, weight, 1e-5)
                form.add_norm(x, x, weight, 1e-5)
                form.rms_norm(torch.randn(rows, 7, dim).to(dtype)[:, 2:5], weight, 1e-5)
                form.gated_silu(torch.randn(rows, 2 * dim).to(dtype))


def append(lib: ctypes.CDLL) -> None:
    nothing = torch.zeros(0)
    for level in native_levels.levels_of(lib, "commitkv_append"):
        form = NativeAppend(lib, level, 2)
        for dtype, kv_dtype in ((d, k) for d in DTYPES for k in DTYPES):
            for rows, head_dim in ((1, 64), (3, 40), (60, 80)):
                q, k, v = torch.randn(rows, 15, head_dim).to(dtype).split((9, 3, 3), dim=1)
                pages, seen = torch.zeros(8, 3, 2, 8, head_dim, dtype=kv_dtype), torch.ones(8, 3, 8).half()
                memory = KvMemory((pages,), (seen,), nothing, nothing, BlockLayout("int8", 16, head_dim))
                angles = torch.rand(rows, head_dim // 2)
                form.begin(torch.randperm(64)[:rows], (angles.cos(), angles.sin()), memory)(0, q, k, v)


def commit(lib: ctypes.CDLL) -> None:
    shapes = (CommitCase("odd", head_dim=40, block_entries=24), CommitCase("wide", head_dim=64))
    for level in native_levels.levels_of(lib, "commitkv_publish"):
        draw_line, publish = NativeLine(lib), NativePublish(lib, level, 2)
        for case in (*CASES, *(replace(s, format=f) for s in shapes for f in CODE_BITS)):
            for gate in (None, 0.6):
                state = make_state(case)
                stored = int(state.table.lens.sum()) + state.staged.shape[0] * state.memory.num_rows
                decision = draw_line(state.memory, LineParams(state.staged, state.table, stored // 3, 2))
                moves = {"move_from": state.free_slots[:3], "move_to": state.free_slots[10:13]}
                publish(state.memory, replace(plan_publish(state, decision, gate), **moves), decision)


def linear(lib: ctypes.CDLL) -> None:
    run_linear(NativeLinear(lib, 2, TorchLinear()))


def linear_wide(lib: ctypes.CDLL) -> None:
    for level in native_levels.levels_of(lib, "commitkv_wide_linear"):
        run_linear(WideLinear(lib, level, 2))


def run_linear(form: LinearForm) -> None:
    for outputs, inputs in ((16, 32), (48, 64), (576, 96), (80, 416)):
        dense = torch.randn(outputs, inputs).bfloat16()
        for weight in (dense, Int8Weight.of(dense)):
            bias = torch.randn(outputs).bfloat16()
            products = form.linear(weight, bias), form.linear(weight, None), form.logits(weight)
            for rows in (0, 1, 2, 3, 15, 16, 17, 33, 70):
                for product in products:
                    product(torch.randn(rows, inputs).bfloat16())


RUNS = {"pointwise": pointwise, "append": append, "commit": commit, "linear": linear, "linear_wide": linear_wide}

if __name__ == "__main__":
    RUNS[sys.argv[2]](ctypes.CDLL(sys.argv[1]))
    print("done")
