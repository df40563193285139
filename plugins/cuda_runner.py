"""Launches kernels on an NVIDIA GPU through the driver's own interface (package cuda-python).

A kernel's cubin is loaded once and its entries are kept. After `warm`, a launch allocates nothing, waits for nothing
and loads nothing, so it can be captured in a CUDA graph. Memory and streams are torch's or TensorRT's: the runner works
in the device's primary context, which both use.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plugins.compile import INSTALL, SMS, compile_cubin
from plugins.errors import DriverError, LaunchError, MissingPackageError, UnsupportedSmError
from plugins.kernel import Kernel, Launch

# Compute capabilities whose shared memory and instructions a cubin of SMS was planned for.
SM_OF = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (12, 0): "sm_120", (12, 1): "sm_120"}


@dataclass
class _Entry:
    """A loaded function and what launches of it may ask for."""

    function: Any
    params_bytes: int
    max_threads: int
    dynamic_shared_bytes: int = 0  # that were asked for so far


class CudaRunner:
    """A KernelRunner on one GPU.

    sm: the architecture of SMS that its cubins are for. cubins: compiled before, of a TensorRT engine say; kernels that
    are not among them are compiled by NVRTC when first used.
    """

    def __init__(self, device: torch.device | None = None, cubins: Mapping[Kernel, bytes] | None = None) -> None:
        """device: a CUDA device, default the first. Raises MissingPackageError, DriverError, UnsupportedSmError."""
        self._driver = _load_driver()
        index = (device.index or 0) if device is not None else 0
        if device is not None and device.type != "cuda":
            raise DriverError(f"device: got {device}, expected a CUDA device; EmulatedRunner runs kernels on the CPU")
        self.device = torch.device("cuda", index)
        self._cubins = dict(cubins or {})
        self._handle = self._call("cuDeviceGet", index)
        self.sm = self._find_sm()
        attributes = self._driver.CUdevice_attribute
        self.num_multiprocessors = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.max_shared_bytes = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._handle)  # kept until the process ends
        self._current = threading.local()
        self._modules: dict[Kernel, Any] = {}
        self._entries: dict[tuple[Kernel, str], _Entry] = {}

    def run(
        self, kernel: Kernel, entry: str, launch: Launch, params: ctypes.Structure, stream: int | None = None
    ) -> None:
        """Launches on `stream` (a CUstream handle; None: torch's current stream) and does not wait.

        Raises LaunchError for what the GPU would refuse or misread, CompileError, and DriverError, which may also be
        that of an earlier launch.
        """
        self._use_context()
        found = self._entries.get((kernel, entry))
        handle = self._torch_stream() if stream is None else stream
        if found is None:
            self._check_not_capturing(kernel, entry, handle)
            found = self._load_entry(kernel, entry)
        if launch.shared_bytes > found.dynamic_shared_bytes:
            self._allow_shared(kernel, entry, found, launch.shared_bytes)
        self._check_launch(kernel, entry, found, launch, params)
        self._call(
            "cuLaunchKernel",
            found.function,
            *(launch.grid, 1, 1),
            *(launch.threads, 1, 1),
            launch.shared_bytes,
            handle,
            ((params,), (None,)),  # one parameter, by value: the driver copies it before it returns
            0,
        )

    def warm(self, kernels: Iterable[Kernel]) -> None:
        """Loads every entry of the kernels, so that their first launch may be captured in a graph.

        Raises CompileError, DriverError.
        """
        self._use_context()
        for kernel in kernels:
            module = self._load_module(kernel)
            count = self._call("cuModuleGetFunctionCount", module)
            for function in self._call("cuModuleEnumerateFunctions", count, module):
                name = self._call("cuFuncGetName", function)
                self._load_entry(kernel, name.decode() if isinstance(name, bytes) else name)

    def blocks_per_multiprocessor(self, kernel: Kernel, entry: str, launch: Launch) -> int:
        """How many blocks of such a launch fit one multiprocessor at once, as the driver counts them."""
        self._use_context()
        found = self._load_entry(kernel, entry)
        if launch.shared_bytes > found.dynamic_shared_bytes:
            self._allow_shared(kernel, entry, found, launch.shared_bytes)
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self._call(call, found.function, launch.threads, launch.shared_bytes))

    def _load_entry(self, kernel: Kernel, entry: str) -> _Entry:
        """Raises LaunchError for a name that the kernel does not have."""
        known = self._entries.get((kernel, entry))
        if known is not None:
            return known
        driver, module = self._driver, self._load_module(kernel)
        status, function = driver.cuModuleGetFunction(module, entry.encode())
        if status == driver.CUresult.CUDA_ERROR_NOT_FOUND:
            raise LaunchError(f"{kernel.label}: no entry {entry!r} in its cubin for {self.sm}")
        self._check(status, "cuModuleGetFunction")
        self._call("cuFuncLoad", function)
        _, params_bytes = self._call("cuFuncGetParamInfo", function, 0)
        max_threads = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        found = _Entry(function, params_bytes, self._call("cuFuncGetAttribute", max_threads, function))
        self._entries[kernel, entry] = found
        return found

    def _load_module(self, kernel: Kernel) -> Any:
        if kernel not in self._modules:
            cubin = self._cubins.get(kernel) or compile_cubin(kernel, self.sm)
            self._modules[kernel] = self._call("cuModuleLoadData", cubin)
        return self._modules[kernel]

    def _allow_shared(self, kernel: Kernel, entry: str, found: _Entry, shared_bytes: int) -> None:
        """More than 48 KiB of dynamic shared memory must be asked for once."""
        if shared_bytes > self.max_shared_bytes:
            raise LaunchError(
                f"{kernel.label} {entry}: {shared_bytes:,} bytes of shared memory a block, expected at most "
                f"{self.max_shared_bytes:,} on {self.device} ({self.sm}); use smaller pages, blocks or fewer stages"
            )
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", found.function, attribute, shared_bytes)
        found.dynamic_shared_bytes = shared_bytes

    def _check_launch(
        self, kernel: Kernel, entry: str, found: _Entry, launch: Launch, params: ctypes.Structure
    ) -> None:
        if ctypes.sizeof(params) != found.params_bytes:
            raise LaunchError(
                f"{kernel.label} {entry}: {type(params).__name__} has {ctypes.sizeof(params)} bytes, the kernel's "
                f"Params {found.params_bytes}; the fields must be the same in the same order"
            )
        if launch.threads > found.max_threads:
            raise LaunchError(
                f"{kernel.label} {entry}: launched with {launch.threads} threads, compiled for {found.max_threads}"
            )

    def _check_not_capturing(self, kernel: Kernel, entry: str, stream: int) -> None:
        status = self._call("cuStreamIsCapturing", stream)
        if status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            raise LaunchError(
                f"{kernel.label} {entry}: first launched while a graph is captured, which cannot load code; call "
                f"warm() with this kernel before"
            )

    def _torch_stream(self) -> int:
        if torch.version.cuda is None:
            raise DriverError(
                f"stream: got None, which is torch's current stream, but torch {torch.__version__} was built without "
                f"CUDA; install a CUDA build of torch or pass a stream"
            )
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _use_context(self) -> None:
        """A thread starts without a context; once is enough, as torch and TensorRT keep to the primary one."""
        if not getattr(self._current, "set", False):
            self._call("cuCtxSetCurrent", self._context)
            self._current.set = True

    def _find_sm(self) -> str:
        attributes = self._driver.CUdevice_attribute
        major = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        sm = SM_OF.get((major, minor))
        if sm is None:
            raise UnsupportedSmError(
                f"{self.device}: compute capability {major}.{minor}, expected one of "
                f"{', '.join(f'{a}.{b}' for a, b in SM_OF)} ({', '.join(SMS)}); there are no kernels for this GPU"
            )
        return sm

    def _attribute(self, attribute: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", attribute, self._handle))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Result of a driver call: None, one value, or a tuple of several. Raises DriverError."""
        status, *results = getattr(self._driver, name)(*arguments)
        self._check(status, name)
        return results[0] if len(results) == 1 else tuple(results) or None

    def _check(self, status: Any, name: str) -> None:
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{name}: {_describe(self._driver, status)}")


def _load_driver() -> Any:
    """`cuda.bindings.driver`, initialised."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingPackageError(f"launching kernels needs cuda-python ({error}); {INSTALL}") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the driver library is not there
        raise DriverError(f"no NVIDIA driver: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"cuInit: {_describe(driver, status)}; check that nvidia-smi lists the GPU")
    return driver


def _describe(driver: Any, status: Any) -> str:
    known, text = driver.cuGetErrorString(status)
    detail = text.decode(errors="replace") if known == driver.CUresult.CUDA_SUCCESS and text else "unknown error"
    return f"{getattr(status, 'name', status)} ({detail})"
