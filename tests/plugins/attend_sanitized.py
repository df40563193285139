"""Run by test_attend_native in a process with AddressSanitizer loaded first: many small cases on every level.

Arguments: the library built with the sanitizers. Tensors come from malloc, so reads beyond an arena are seen.
"""

from __future__ import annotations

import ctypes
import sys

from test_attend_native import BATCH, Case, copied, make_params

from plugins.attend import native
from plugins.attend.params import RECORD_SQUARES


def main(library: str) -> None:
    lib = ctypes.CDLL(library)
    lib.commitkv_attend.argtypes = (ctypes.c_void_p,)
    shapes = ((1, 64, "all", 16), (3, 64, "some", 8), (5, 40, "none", 16), (16, 32, "some", 8))
    cases = [
        Case(BATCH, group=group, head_dim=head_dim, q=types, kv=types, format=format_, record=record, page_tokens=page)
        for group, head_dim, record, page in shapes
        for types in ("fp32", "bf16", "fp16")
        for format_ in ("int4", "k8v4", "int8", "bf16", "fp16", "fp32")
    ]
    long = ((1, 1300, 700), (40, 300, 20), (1, 0, 0))
    cases += [Case(long, q="bf16", kv="bf16", mark=mark) for mark in (1, RECORD_SQUARES)]
    for case in cases:
        params = make_params(case)
        for code in range(len(native.LEVELS)):
            if lib.commitkv_attend_has(code):
                used = copied(params)
                args = native.pack(used)
                args.num_threads, args.level = 2, code
                assert lib.commitkv_attend(ctypes.addressof(args)) == 0
    print("done", len(cases))


main(sys.argv[1])
