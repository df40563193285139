"""What the machine says about its GPU, through NVIDIA's management library: read before anything is allocated there.

Import is cheap and works without a GPU; `read_gpu` says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from runtime.errors import DeviceError

BITS_PER_BYTE = 8
TRANSFERS_PER_CLOCK = 2  # double data rate


@dataclass(frozen=True)
class GpuFacts:
    """sm: major * 10 + minor, as in sm_90.   uuid: what picks this card out of several.

    peak_bytes_per_s: memory clock x bus width, twice a clock; None where the driver does not say.
    power_limit_w, max_sm_clock_mhz: None where the driver does not say.
    """

    name: str
    uuid: str
    sm: int
    total_bytes: int
    free_bytes: int
    driver: str
    cuda_version: int
    peak_bytes_per_s: float | None
    max_sm_clock_mhz: int | None
    power_limit_w: float | None

    @property
    def cuda_text(self) -> str:
        """The newest CUDA the driver runs, such as 13.0."""
        return f"{self.cuda_version // 1000}.{self.cuda_version % 1000 // 10}"


def read_gpu(index: int = 0) -> GpuFacts:
    """Facts of the GPU the driver counts as `index`. Raises DeviceError when there is no driver or no such GPU."""
    with _management() as nvml:
        count = nvml.nvmlDeviceGetCount()
        if not 0 <= index < count:
            raise DeviceError(
                f"device: got GPU {index}, expected one of the {count} that the driver shows; check nvidia-smi -L"
            )
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        clock_mhz = _or_none(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
        bus_bits = _or_none(nvml, lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle))
        power_mw = _or_none(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        peak = None
        if clock_mhz is not None and bus_bits is not None:
            peak = clock_mhz * 1e6 * TRANSFERS_PER_CLOCK * bus_bits / BITS_PER_BYTE
        return GpuFacts(
            name=_text(nvml.nvmlDeviceGetName(handle)),
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            sm=10 * major + minor,
            total_bytes=memory.total,
            free_bytes=memory.free,
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda_version=nvml.nvmlSystemGetCudaDriverVersion_v2(),
            peak_bytes_per_s=peak,
            max_sm_clock_mhz=_or_none(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            power_limit_w=None if power_mw is None else power_mw / 1e3,
        )


def find_gpu() -> str | None:
    """None when a GPU and its driver are there, else one sentence saying what is missing."""
    try:
        read_gpu()
    except DeviceError as error:
        return str(error)
    return None


@contextmanager
def _management() -> Iterator[ModuleType]:
    """The library, started; every error of it as a DeviceError."""
    try:
        import pynvml as nvml  # the module of the package nvidia-ml-py
    except ImportError as error:
        raise DeviceError(
            "device: package nvidia-ml-py is not installed, expected it for a GPU; run pip install nvidia-ml-py"
        ) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DeviceError(
            f"device: no NVIDIA driver answers ({error}), expected one with a GPU; install the driver, start the "
            f"container with --gpus all, or use device cpu"
        ) from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise DeviceError(f"device: the NVIDIA driver refused a question ({error}); check nvidia-smi") from error
    finally:
        nvml.nvmlShutdown()


def _or_none(nvml: ModuleType, ask: Callable[[], int]) -> int | None:
    """What the driver answers, None where this card or driver does not know."""
    try:
        return int(ask())
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
