"""The TensorRT that builds an engine: package `tensorrt` (plugins) or `tensorrt_rtx` (plain layers only).

All that differs between the two stands here: the package, the SMs, and how the target's SM is said. (How plugins come
into the network differs as well; only `tensorrt` ships them, see `builder.lower_trt.PluginInsert`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

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


@dataclass(frozen=True)
class TrtPackage:
    """One of the two. major: version of the API this code is written for.

    sms: what it can build for, as 10 * major + minor.   without: why others are refused.
    """

    target: TrtTarget
    module: str
    distribution: str
    major: int
    sms: tuple[int, ...]
    without: str


PACKAGES: dict[str, TrtPackage] = {
    "trt": TrtPackage(
        "trt", "tensorrt", "tensorrt-cu13", 11, (80, 86, 89, 90, 120),
        "the kernels are compiled for these only",
    ),
    "trt-rtx": TrtPackage(
        "trt-rtx", "tensorrt_rtx", "tensorrt-rtx-cu13", 1, (75, 80, 86, 89, 120, 121),
        "TensorRT-RTX builds for GeForce and RTX cards, not for data-centre Hopper or Blackwell; "
        "for an H100 pass --target trt on a machine that has one",
    ),
}  # fmt: skip
