"""`append` on a GPU, or emulated on a CPU: launches append.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from plugins.append.params import AppendStep, Rotary
from plugins.errors import LaunchError
from plugins.kernel import Kernel, KernelRunner, Launch
from plugins.layout import ELEMENT_BYTES, BlockLayout, Element, PageLayout, geometry_defines
from plugins.memory import KvMemory

ENTRY = "append_rows"
THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 4
ELEMENT_DTYPES: dict[torch.dtype, Element] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_POINTERS = ("q", "k", "v", "q_out", "pages", "seen", "cos", "sin", "slots")
_STRIDES = ("q_stride", "k_stride", "v_stride", "rotary_stride")
_COUNTS = ("rows", "q_heads", "kv_heads", "num_slots")
_GEOMETRY = ("HEAD_DIM", "PAGE_TOKENS", "ELEMENT")
_BYTES_OF_A_THREAD = 16  # of each half of a head


class CudaAppendParams(ctypes.Structure):
    """AppendParams of append.cu field by field.

    Pointers: addresses on the runner's device, 16-byte aligned but for seen and slots. Strides: elements between rows
    of q, k, v (Half) and of cos, sin (fp32); every row begins 16-byte aligned. num_slots: pages * page_tokens.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
    )


def append_kernel(page: PageLayout, element: Element) -> Kernel:
    """The kernel of one page geometry. Raises ValueError for one that kernels do not have."""
    block = BlockLayout(element, 16, page.head_dim)  # append sees no block
    defines = tuple(d for d in geometry_defines(page, block, element) if d[0] in _GEOMETRY)
    return Kernel("append", Path(__file__).resolve().parent / "append.cu", defines)


def launch_append(runner: KernelRunner, kernel: Kernel, params: CudaAppendParams, stream: int | None = None) -> None:
    """One layer of a step. Nothing is allocated or waited for; the grid depends on the number of rows only.

    Raises LaunchError for addresses that the kernel's 16-byte accesses cannot take.
    """
    if params.rows == 0:
        return
    head_dim = dict(kernel.defines)["HEAD_DIM"]
    _check_alignment(params)
    heads = params.q_heads + 2 * params.kv_heads
    items = params.rows * heads * (head_dim * ELEMENT_BYTES // (2 * _BYTES_OF_A_THREAD))
    grid = min(-(-items // THREADS), runner.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR)
    runner.run(kernel, ENTRY, Launch(grid, THREADS, 0), params, stream)


def _check_alignment(params: CudaAppendParams) -> None:
    for name in ("q", "k", "v", "q_out", "pages", "cos", "sin"):
        address = getattr(params, name) or 0
        if address % 16:
            raise LaunchError(f"append: {name} lies at {address:#x}, expected a multiple of 16; align it")
    for name, width in zip(_STRIDES, (ELEMENT_BYTES, ELEMENT_BYTES, ELEMENT_BYTES, 4), strict=True):
        stride = getattr(params, name)
        if stride * width % 16:
            raise LaunchError(f"append: {name} is {stride} elements, expected rows a multiple of 16 bytes apart")


@dataclass(frozen=True)
class CudaAppend:
    """`plugins.append.params.AppendForm` on the runner's device, for fp16 and bf16."""

    runner: KernelRunner

    def begin(self, slots: torch.Tensor, rotary: Rotary, memory: KvMemory) -> AppendStep:
        """Raises LaunchError for tensors of another type or on another device, ValueError for unsupported geometry."""
        return _Step(self.runner, slots, rotary, memory)


class _Step:
    """One parameter record for the layers of a step; a call sets what differs."""

    def __init__(self, runner: KernelRunner, slots: torch.Tensor, rotary: Rotary, memory: KvMemory) -> None:
        num_pages, kv_heads, _, page_tokens, head_dim = memory.pages[0].shape
        self._dtype = memory.pages[0].dtype
        element = ELEMENT_DTYPES.get(self._dtype)
        if element is None:
            raise LaunchError(f"append: pages are {self._dtype}, expected float16 or bfloat16 on a GPU")
        cos, sin = rotary
        assert cos.dtype == sin.dtype == torch.float32 and cos.stride() == sin.stride() and cos.stride(1) == 1
        self._alive = (slots.to(runner.device, torch.int32), cos, sin)
        for x in (*self._alive, *memory.pages, *memory.seen):
            if x.device != runner.device:
                raise LaunchError(f"append: a tensor lies on {x.device}, expected {runner.device}")
        self._runner, self._addresses = runner, memory.addresses
        self._kernel = append_kernel(
            PageLayout(len(memory.pages), kv_heads, head_dim, page_tokens, ELEMENT_BYTES), element
        )
        self._params = CudaAppendParams(
            cos=cos.data_ptr(), sin=sin.data_ptr(), slots=self._alive[0].data_ptr(), rotary_stride=cos.stride(0),
            rows=slots.shape[0], kv_heads=kv_heads, num_slots=num_pages * page_tokens,
        )  # fmt: skip

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        params, head_dim = self._params, q.shape[2]
        for x, heads in ((q, q.shape[1]), (k, params.kv_heads), (v, params.kv_heads)):
            if x.dtype != self._dtype or x.device != self._runner.device:
                raise LaunchError(
                    f"append: got {x.dtype} on {x.device}, expected {self._dtype} on {self._runner.device}"
                )
            assert x.shape == (params.rows, heads, head_dim) and x.stride(2) == 1 and x.stride(1) == head_dim
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        params.q, params.k, params.v, params.q_out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        params.q_stride, params.k_stride, params.v_stride = q.stride(0), k.stride(0), v.stride(0)
        params.pages, params.seen = self._addresses[layer]
        params.q_heads = q.shape[1]
        launch_append(self._runner, self._kernel, params)
        return out
