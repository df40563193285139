"""What decode attention is measured beside: torch's attention over a contiguous cache, FlashInfer over pages."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from perf.kernel_shapes import KernelShape

WORKSPACE_BYTES = 256 << 20
MakePeer = Callable[[KernelShape, torch.dtype, torch.device], Callable[[], object]]


def sdpa(shape: KernelShape, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """torch's attention over equally long contiguous caches, heads of a group sharing K and V."""
    heads = shape.heads
    q = torch.randn(shape.batch, heads.kv_heads * heads.group_size, 1, heads.head_dim, dtype=dtype, device=device)
    k, v = (
        torch.randn(shape.batch, heads.kv_heads, shape.tokens, heads.head_dim, dtype=dtype, device=device)
        for _ in range(2)
    )
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def flashinfer(shape: KernelShape, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """FlashInfer's paged decode over as many tokens, all at full precision in pages; its plan is made before."""
    module = importlib.import_module("flashinfer")
    heads, pages = shape.heads, -(-shape.tokens // shape.page_tokens)
    q = torch.randn(shape.batch, heads.kv_heads * heads.group_size, heads.head_dim, dtype=dtype, device=device)
    cache_shape = (shape.batch * pages, 2, heads.kv_heads, shape.page_tokens, heads.head_dim)
    cache = torch.randn(cache_shape, dtype=dtype, device=device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "HND", use_tensor_cores=True
    )
    last = shape.tokens - (pages - 1) * shape.page_tokens
    wrapper.plan(
        torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * pages,
        torch.randperm(shape.batch * pages, device=device).int(),
        torch.full((shape.batch,), last, dtype=torch.int32, device=device),
        heads.kv_heads * heads.group_size, heads.kv_heads, heads.head_dim, shape.page_tokens,
        q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, cache)
