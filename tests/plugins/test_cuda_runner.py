"""The CUDA runner without a GPU: its errors, and the calls it would make, against a driver that only takes notes."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulation_cases import ExchangeParams, PipelineParams, exchange_kernel, pipeline_kernel

from plugins import cuda_runner
from plugins.cuda_runner import CudaRunner
from plugins.errors import DriverError, LaunchError, MissingPackageError, UnsupportedSmError
from plugins.kernel import Launch

bindings = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python")
OK = bindings.CUresult.CUDA_SUCCESS
STREAM = 0x77


class NotingDriver(SimpleNamespace):
    """Stands where cuda.bindings.driver would; a call must have as many arguments as the real one takes."""

    ENTRIES = ("exchange", "other")

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        for name in ("CUresult", "CUdevice_attribute", "CUfunction_attribute", "CUstreamCaptureStatus"):
            setattr(self, name, getattr(bindings, name))
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.capturing = bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        attributes = bindings.CUdevice_attribute
        self.attributes = {
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: capability[0],
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: capability[1],
            attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
            attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
        }
        self.launch_status = OK

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            signature = getattr(bindings, name).__doc__.splitlines()[0]
            assert len(arguments) == len(re.findall(r"[,(]", signature)), f"{signature}: {arguments}"
            self.calls.append((name, *arguments))
            return self.answer(name, arguments)

        return call

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuLaunchKernel":
            ((params,), types) = arguments[9]
            assert types == (None,)
            self.calls[-1] = (name, *arguments[:9], bytes(params))
            return (self.launch_status,)
        if name == "cuModuleGetFunction":
            entry = arguments[1].decode()
            missing = bindings.CUresult.CUDA_ERROR_NOT_FOUND
            return (OK, f"function {entry}") if entry in self.ENTRIES else (missing, None)
        results = {
            "cuDeviceGet": (0,),
            "cuDeviceGetAttribute": (self.attributes.get(arguments[0] if arguments else None),),
            "cuDevicePrimaryCtxRetain": ("context",),
            "cuModuleLoadData": ("module",),
            "cuModuleGetFunctionCount": (len(self.ENTRIES),),
            "cuModuleEnumerateFunctions": ([f"function {e}" for e in self.ENTRIES],),
            "cuFuncGetName": (str(arguments[0]).removeprefix("function ").encode() if arguments else b"",),
            "cuFuncGetParamInfo": (0, ctypes.sizeof(ExchangeParams)),
            "cuFuncGetAttribute": (96,),
            "cuStreamIsCapturing": (self.capturing,),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (7,),
            "cuGetErrorString": (b"out of memory",),
        }
        return (OK, *results.get(name, ()))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, *arguments in self.calls if called == name]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingDriver]:
    noting = NotingDriver()
    monkeypatch.setattr(cuda_runner, "_load_driver", lambda: noting)
    yield noting


def runner_of(driver: NotingDriver) -> CudaRunner:
    """Cubins are given, so that nothing is compiled."""
    return CudaRunner(cubins={exchange_kernel(): b"cubin"})


def test_a_launch_passes_the_params_by_value(driver: NotingDriver) -> None:
    runner, params = runner_of(driver), ExchangeParams(16, 32, 48, 64, 3)
    assert (runner.device, runner.sm, runner.num_multiprocessors) == (torch.device("cuda", 0), "sm_90a", 132)
    runner.run(exchange_kernel(), "exchange", Launch(5, 96, 768), params, STREAM)
    (launched,) = driver.named("cuLaunchKernel")
    assert launched == ["function exchange", 5, 1, 1, 96, 1, 1, 768, STREAM, bytes(params)]
    assert driver.named("cuModuleLoadData") == [[b"cubin"]]
    assert driver.named("cuCtxSetCurrent") == [["context"]]


def test_a_second_launch_only_launches(driver: NotingDriver) -> None:
    runner = runner_of(driver)
    launch = Launch(5, 96, 100_000)
    runner.run(exchange_kernel(), "exchange", launch, ExchangeParams(), STREAM)
    attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.named("cuFuncSetAttribute") == [["function exchange", attribute, 100_000]]
    driver.calls.clear()
    runner.run(exchange_kernel(), "exchange", launch, ExchangeParams(), STREAM)
    assert [name for name, *_ in driver.calls] == ["cuLaunchKernel"]


def test_the_first_launch_is_refused_in_a_captured_graph(driver: NotingDriver) -> None:
    runner = runner_of(driver)
    driver.capturing = bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    launch, params = Launch(1, 96, 0), ExchangeParams()
    with pytest.raises(LaunchError, match=r"first launched while a graph is captured.*call warm\(\)"):
        runner.run(exchange_kernel(), "exchange", launch, params, STREAM)
    runner.warm([exchange_kernel()])
    assert [f for (f,) in driver.named("cuFuncLoad")] == ["function exchange", "function other"]
    driver.calls.clear()
    runner.run(exchange_kernel(), "exchange", launch, params, STREAM)
    assert [name for name, *_ in driver.calls] == ["cuLaunchKernel"]


def test_what_the_gpu_would_misread_is_refused(driver: NotingDriver) -> None:
    runner, kernel = runner_of(driver), exchange_kernel()
    with pytest.raises(LaunchError, match=r"PipelineParams has 32 bytes, the kernel's Params 40"):
        runner.run(kernel, "exchange", Launch(1, 96, 0), PipelineParams(), STREAM)
    with pytest.raises(LaunchError, match="launched with 128 threads, compiled for 96"):
        runner.run(kernel, "exchange", Launch(1, 128, 0), ExchangeParams(), STREAM)
    with pytest.raises(LaunchError, match="232,464 bytes of shared memory a block, expected at most 232,448"):
        runner.run(kernel, "exchange", Launch(1, 96, 232_464), ExchangeParams(), STREAM)
    with pytest.raises(LaunchError, match="no entry 'exchanges' in its cubin for sm_90a"):
        runner.run(kernel, "exchanges", Launch(1, 96, 0), ExchangeParams(), STREAM)
    assert driver.named("cuLaunchKernel") == []


def test_an_error_of_the_driver_names_the_call(driver: NotingDriver) -> None:
    runner = runner_of(driver)
    driver.launch_status = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DriverError, match=r"cuLaunchKernel: CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)"):
        runner.run(exchange_kernel(), "exchange", Launch(1, 96, 0), ExchangeParams(), STREAM)


def test_occupancy_is_the_drivers(driver: NotingDriver) -> None:
    assert runner_of(driver).blocks_per_multiprocessor(exchange_kernel(), "exchange", Launch(1, 96, 50_000)) == 7
    assert driver.named("cuOccupancyMaxActiveBlocksPerMultiprocessor") == [["function exchange", 96, 50_000]]


def test_torchs_stream_needs_torch_with_cuda(driver: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DriverError, match="built without CUDA; install a CUDA build of torch or pass a stream"):
        runner_of(driver).run(exchange_kernel(), "exchange", Launch(1, 96, 0), ExchangeParams())


@pytest.mark.parametrize("capability", ((7, 5), (8, 6), (10, 0)))
def test_a_gpu_without_kernels_is_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "_load_driver", lambda: NotingDriver(capability))
    with pytest.raises(
        UnsupportedSmError, match=rf"compute capability {capability[0]}.{capability[1]}, expected one of 8.0"
    ):
        CudaRunner()


def test_no_other_device(driver: NotingDriver) -> None:
    with pytest.raises(DriverError, match="got cpu, expected a CUDA device; EmulatedRunner"):
        CudaRunner(torch.device("cpu"))
    assert CudaRunner(torch.device("cuda", 2)).device == torch.device("cuda", 2)
    assert ["cuDeviceGet", 2] in [list(call) for call in driver.calls]


def test_kernels_without_a_given_cubin_are_compiled(driver: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "compile_cubin", lambda kernel, sm: f"{kernel.op} for {sm}".encode())
    runner_of(driver).warm([exchange_kernel(), pipeline_kernel()])
    assert driver.named("cuModuleLoadData") == [[b"cubin"], [b"pipeline for sm_90a"]]


def test_a_machine_without_a_driver_says_so() -> None:
    try:
        status = bindings.cuInit(0)[0]
    except RuntimeError:
        status = None
    if status == OK:
        pytest.skip("this machine has a GPU")
    with pytest.raises(DriverError, match=r"no NVIDIA driver|cuInit: .*nvidia-smi"):
        CudaRunner()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingPackageError, match=r"launching kernels needs cuda-python .*pip install cuda-python"):
        CudaRunner()
