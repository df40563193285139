"""The torch engine on a GPU: our kernels in place of the CPU's forms, everything else torch on that device.

    executor = gpu_executor(decoder, spec, limits, storage, GpuKernels(runner, sm))

The runner decides what launches the kernels: a CUDA device, or the CPU's emulation of one, which the tests use; the
code between is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.append.cuda import CudaAppend
from plugins.attend.cuda import CudaAttend
from plugins.commit.cuda import SHARED_BYTES, CudaPublish
from plugins.commit.line import draw_line
from plugins.errors import KernelError
from plugins.kernel import KernelRunner
from plugins.kv_tiles import KvShape
from plugins.layout import ELEMENT_BYTES, PageLayout
from plugins.staging import TableStaging
from runtime.config import EngineLimits, ModelSpec
from runtime.errors import ConfigError, DeviceError
from runtime.executor_torch import Decoder, Forms, TorchExecutor
from runtime.gpu_facts import find_gpu
from runtime.kv_manager import KvManager
from runtime.kv_storage import KvStorage
from runtime.memory_plan import block_layout
from runtime.policy.base import Policy

GIB = 1 << 30


@dataclass(frozen=True, eq=False)
class GpuKernels:
    """What launches kernels, and for which of `plugins.compile.SMS`."""

    runner: KernelRunner
    sm: str


def open_gpu() -> torch.device:
    """The first GPU that this process may use. Raises DeviceError saying what is missing."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} was built without CUDA"
        fix = "install a CUDA build of torch (pip install torch, from PyPI itself)"
    else:
        reason = find_gpu() or "torch sees no GPU (CUDA_VISIBLE_DEVICES may hide it)"
        fix = "start where nvidia-smi shows one"
    raise DeviceError(f"device: got cuda, but {reason}; {fix}, or use device cpu")


def open_kernels(device: torch.device) -> GpuKernels:
    """Kernels on that GPU. Raises DeviceError where there are none for it."""
    try:
        from plugins.cuda_runner import CudaRunner  # needs cuda-python

        runner = CudaRunner(device)
    except (KernelError, ImportError) as error:
        raise DeviceError(f"device: {error}") from error
    return GpuKernels(runner, runner.sm)


def check_kernels(spec: ModelSpec, limits: EngineLimits, policy: Policy) -> None:
    """Raises ConfigError for a model, limits or a policy's blocks that no kernel covers."""
    if limits.kv_dtype not in ("fp16", "bf16") or limits.dtype != limits.kv_dtype:
        raise ConfigError(
            f"device: kernels need activations and pages both in fp16 or both in bf16, got {limits.dtype} and "
            f"{limits.kv_dtype}; build the engine with --dtype fp16 or bf16, or use device cpu"
        )
    page = PageLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, limits.page_tokens, ELEMENT_BYTES)
    try:
        KvShape(page, block_layout(spec, limits, policy.block_format), limits.kv_dtype, spec.group_size)
    except KernelError as error:
        raise ConfigError(f"device: no kernel fits this engine: {error}; use device cpu") from error


def arena_bytes(manager: KvManager, limits: EngineLimits, policy: Policy) -> int:
    """Bytes of the page arenas and, where the policy compresses, of the arena of its block format."""
    num_bytes = manager.num_pages * manager.page_layout.page_bytes
    if policy.compresses:
        layout = block_layout(manager.spec, limits, policy.block_format)
        num_bytes += manager.num_blocks[layout.format] * layout.stored_bytes
    return num_bytes


def check_room(needed_bytes: int, device: torch.device) -> None:
    """Raises ConfigError when arenas of `needed_bytes` do not fit the device's free memory."""
    free, _ = torch.cuda.mem_get_info(device)
    if needed_bytes > free:
        raise ConfigError(
            f"kv_memory_bytes: arenas take {needed_bytes / GIB:.1f} GiB on {device} (the KV memory once for pages and "
            f"once for the policy's blocks), expected at most the {free / GIB:.1f} GiB that are free; lower it"
        )


def gpu_forms(kernels: GpuKernels, staging: TableStaging, spec: ModelSpec) -> Forms:
    """Kernels for what touches KV; the line is found by torch's own selection, on the device."""
    return Forms(
        append=CudaAppend(kernels.runner),
        attend=CudaAttend(kernels.runner, staging, spec.group_size, kernels.sm),
        draw_line=draw_line,
        publish=CudaPublish(kernels.runner, SHARED_BYTES[kernels.sm]),
    )


def gpu_executor(
    decoder: Decoder, spec: ModelSpec, limits: EngineLimits, storage: KvStorage, kernels: GpuKernels
) -> TorchExecutor:
    """An executor whose storage lies on the runner's device."""
    assert storage.device == kernels.runner.device, (storage.device, kernels.runner.device)
    staging = TableStaging(storage.device)
    return TorchExecutor(decoder, spec, limits, storage, gpu_forms(kernels, staging, spec), staging)
