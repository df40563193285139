"""Facts of a GPU: what is said where there is none, and how the driver's answers become figures."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from runtime.errors import DeviceError
from runtime.gpu_facts import find_gpu, read_gpu

pynvml = pytest.importorskip("pynvml")


def has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(has_driver(), reason="there is a driver")
def test_without_a_driver() -> None:
    with pytest.raises(DeviceError, match=r"device: no NVIDIA driver answers .* use device cpu"):
        read_gpu()
    assert "no NVIDIA driver answers" in (find_gpu() or "")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="pip install nvidia-ml-py"):
        read_gpu()


@pytest.mark.gpu
@pytest.mark.skipif(not has_driver(), reason="needs an NVIDIA GPU")
def test_on_a_card() -> None:
    facts = read_gpu()
    assert facts.sm >= 80 and 0 < facts.free_bytes <= facts.total_bytes and facts.cuda_version >= 12000
    assert facts.peak_bytes_per_s is None or facts.peak_bytes_per_s > 1e11
    assert find_gpu() is None


class Answers(ModuleType):
    """What an H100 with an old driver answers, which does not know its bus; the library itself needs a driver."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_MEM, NVML_CLOCK_SM = pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_SM

    def __init__(self, bus_bits: int | None) -> None:
        super().__init__("pynvml")
        self.bus_bits, self.open = bus_bits, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetMemoryBusWidth(self, handle: object) -> int:
        if self.bus_bits is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.bus_bits

    nvmlDeviceGetCount = staticmethod(lambda: 1)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetCudaComputeCapability = staticmethod(lambda handle: (9, 0))
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=80 << 30, free=79 << 30))
    nvmlDeviceGetMaxClockInfo = staticmethod(lambda handle, kind: 2619 if kind == pynvml.NVML_CLOCK_MEM else 1980)
    nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda handle: 700_000)
    nvmlDeviceGetName = staticmethod(lambda handle: b"NVIDIA H100 80GB HBM3")
    nvmlDeviceGetUUID = staticmethod(lambda handle: "GPU-1")
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 13010)


def test_answers_become_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(5120)
    monkeypatch.setitem(sys.modules, "pynvml", answers)
    facts = read_gpu()
    assert (facts.name, facts.sm, facts.cuda_text, facts.power_limit_w) == ("NVIDIA H100 80GB HBM3", 90, "13.1", 700.0)
    assert facts.peak_bytes_per_s == pytest.approx(3.35e12, rel=1e-3), "2619 MHz, twice a clock, 5120 bits"
    with pytest.raises(DeviceError, match="got GPU 1, expected one of the 1 that the driver shows"):
        read_gpu(1)
    assert answers.open == 0, "every session was closed"


def test_what_a_driver_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Answers(None))
    assert read_gpu().peak_bytes_per_s is None
