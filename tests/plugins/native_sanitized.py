"""Run by tests of native forms in a process with AddressSanitizer loaded first: small cases on every level.

Arguments: the library built with the sanitizers, and which operation it holds. Tensors come from malloc, so accesses
beyond them are seen.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from plugins import native_levels
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


RUNS = {"pointwise": pointwise}

if __name__ == "__main__":
    RUNS[sys.argv[2]](ctypes.CDLL(sys.argv[1]))
    print("done")
