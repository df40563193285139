"""The TensorRT that builds an engine: package `tensorrt` (plugins) or `tensorrt_rtx` (plain layers only).

All that differs between the two stands here: the package, the SMs, and how the target's SM is said. (How plugins come
into the network differs as well; only `tensorrt` ships them, see `builder.lower_trt.PluginInsert`.)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from runtime.errors import ConfigError, DeviceError
from runtime.gpu_facts import read_gpu

if TYPE_CHECKING:
    import tensorrt as trt

TrtTarget = Literal["trt", "trt-rtx"]


class TrtModule(Protocol):
    """What the builder uses of the module, so that calls are checked against its type stubs."""

    __version__: str
    ActivationType: type[trt.ActivationType]
    BuilderFlag: type[trt.BuilderFlag]
    CumulativeOperation: type[trt.CumulativeOperation]
    DataType: type[trt.DataType]
    ElementWiseOperation: type[trt.ElementWiseOperation]
    GatherMode: type[trt.GatherMode]
    MatrixOperation: type[trt.MatrixOperation]
    NetworkDefinitionCreationFlag: type[trt.NetworkDefinitionCreationFlag]
    PreviewFeature: type[trt.PreviewFeature]
    ProfilingVerbosity: type[trt.ProfilingVerbosity]
    ReduceOperation: type[trt.ReduceOperation]
    ScatterMode: type[trt.ScatterMode]
    UnaryOperation: type[trt.UnaryOperation]
    Builder: type[trt.Builder]
    Logger: type[trt.Logger]
    ILogger: type[trt.ILogger]
    Weights: type[trt.Weights]

    # What plugins take besides (`builder.trt_insert`).
    DimsExprs: type[trt.DimsExprs]
    IPluginV3: type[trt.IPluginV3]
    IPluginV3OneCore: type[trt.IPluginV3OneCore]
    IPluginV3OneBuildV2: type[trt.IPluginV3OneBuildV2]
    IPluginV3OneRuntime: type[trt.IPluginV3OneRuntime]
    IPluginCreatorV3One: type[trt.IPluginCreatorV3One]
    PluginField: type[trt.PluginField]
    PluginFieldCollection: type[trt.PluginFieldCollection]
    PluginFieldType: type[trt.PluginFieldType]
    TensorFormat: type[trt.TensorFormat]
    TensorRTPhase: type[trt.TensorRTPhase]

    def get_plugin_registry(self) -> trt.IPluginRegistry: ...


@dataclass(frozen=True)
class TrtPackage:
    """One of the two. module, distribution: to import and to install.   major: version of the API used here.

    sms: what it can build for, as 10 * major + minor.   refusal: why it builds for no other.
    install: what to run where the package is missing.
    """

    target: TrtTarget
    module: Literal["tensorrt", "tensorrt_rtx"]
    distribution: str
    major: int
    sms: tuple[int, ...]
    refusal: str
    install: str


PACKAGES: dict[TrtTarget, TrtPackage] = {
    "trt": TrtPackage(
        target="trt",
        module="tensorrt",
        distribution="tensorrt-cu13",
        major=11,
        sms=(80, 89, 90, 120),
        refusal="the kernels are compiled for no other; use --target trt-rtx for other RTX cards",
        install="pip install '.[h100]' on the machine with the GPU (the libraries come from NVIDIA's package index)",
    ),
    "trt-rtx": TrtPackage(
        target="trt-rtx",
        module="tensorrt_rtx",
        distribution="tensorrt-rtx-cu13",
        major=1,
        sms=(80, 86, 89, 120, 121),
        refusal="TensorRT-RTX builds for RTX cards, not for data-centre Hopper and Blackwell (on an H100 use "
        "--target trt), and for SM 75 without the fp32 products that attention of plain layers takes",
        install="pip install '.[rtx]'",
    ),
}


@dataclass(frozen=True, eq=False)
class Builder:
    """A TensorRT that was loaded, and what it builds for."""

    package: TrtPackage
    api: TrtModule
    sm: int

    @property
    def version(self) -> str:
        return self.api.__version__

    def set_target(self, config: trt.IBuilderConfig) -> None:
        """TensorRT-RTX is told the SM; TensorRT builds for the GPU of this machine, which `load_builder` compared."""
        if self.package.target == "trt-rtx":
            api, rtx_config = cast(Any, self.api), cast(Any, config)  # what only TensorRT-RTX has
            rtx_config.num_compute_capabilities = 1
            rtx_config.set_compute_capability(getattr(api.ComputeCapability, f"SM{self.sm}"), 0)
        else:
            config.set_preview_feature(self.api.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


def load_builder(target: TrtTarget, sm: int | None) -> Builder:
    """sm: as asked for; None takes that of this machine's GPU.

    Raises ConfigError for an SM that the target cannot build for, DeviceError for what is missing here.
    """
    package = PACKAGES[target]
    if sm is not None:
        check_sm(target, sm)
    api = _load_module(package)
    if target == "trt-rtx" and sm is not None:
        return Builder(package, api, sm)
    try:
        found = read_gpu().sm
    except DeviceError as error:
        hint = "pass --sm" if target == "trt-rtx" else f"{package.module} builds for the GPU of the machine it runs on"
        raise DeviceError(f"target {target}: no GPU found here ({error}); {hint}") from error
    if sm is not None and sm != found:
        raise ConfigError(
            f"sm: got {sm}, expected {found}, that of the GPU here: {package.module} builds for no other; "
            f"build on a machine with a GPU of SM {sm}"
        )
    return Builder(package, api, check_sm(target, found))


def check_sm(target: TrtTarget, sm: int) -> int:
    """sm, if the target builds for it; else ConfigError."""
    package = PACKAGES[target]
    if sm not in package.sms:
        known = ", ".join(map(str, package.sms))
        raise ConfigError(f"sm: got {sm}, expected one of {known} for --target {package.target}: {package.refusal}")
    return sm


def _load_module(package: TrtPackage) -> TrtModule:
    wanted = f"module {package.module} of package {package.distribution} {package.major}.x"
    try:
        module = importlib.import_module(package.module)
        version = str(module.__version__)
    except ModuleNotFoundError as error:
        if error.name != package.module:
            raise DeviceError(_missing(package, f"{wanted} cannot be loaded ({error})")) from error
        raise DeviceError(_missing(package, f"{wanted} is not installed")) from error
    except (ImportError, OSError, AttributeError) as error:
        raise DeviceError(_missing(package, f"{wanted} is installed but broken ({error})")) from error
    if version.split(".")[0] != str(package.major):
        raise DeviceError(_missing(package, f"{wanted} is needed, version {version} is installed"))
    return cast(TrtModule, module)


def _missing(package: TrtPackage, what: str) -> str:
    looked = f"looked in {sysconfig.get_path('purelib')} for {sys.executable}"
    beside = []
    for name in (package.distribution, f"{package.distribution}-bindings", f"{package.distribution}-libs"):
        try:
            beside.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    there = f"; there is {' and '.join(beside)} only, which is not enough" if beside else ""
    return f"target {package.target}: {what}; {looked}{there}; {package.install}"
