"""`builder.layers.Layers` as layers of a strongly typed TensorRT network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from builder.layers import Axes, Kind
from builder.trt_api import TrtModule

if TYPE_CHECKING:
    import tensorrt as trt

SMALL = 64


class TrtLayers:
    """Adds layers to `network`. Keeps the memory of constants, which TensorRT reads when it builds."""

    def __init__(self, api: TrtModule, network: trt.INetworkDefinition, model: str, kv: str) -> None:
        """model, kv: "fp16" or "bf16"."""
        self._trt, self._network = api, network
        dtypes: dict[str, trt.DataType] = {"fp16": api.DataType.HALF, "bf16": api.DataType.BF16}
        self._dtypes: dict[Kind, trt.DataType] = {
            "real": api.DataType.FLOAT, "model": dtypes[model], "kv": dtypes[kv],
            "fp16": api.DataType.HALF, "int32": api.DataType.INT32,
        }  # fmt: skip
        torch_dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
        self._torch_dtypes: dict[Kind, torch.dtype] = {
            "real": torch.float32, "model": torch_dtypes[model], "kv": torch_dtypes[kv],
            "fp16": torch.float16, "int32": torch.int32,
        }  # fmt: skip
        self._kept: list[torch.Tensor] = []
        self._small: dict[tuple[Kind, tuple[int, ...], tuple[float, ...]], trt.ITensor] = {}

    def release(self) -> None:
        """The engine is built: constants may go."""
        self._kept.clear()

    def constant(self, values: torch.Tensor, kind: Kind) -> trt.ITensor:
        if values.numel() > SMALL:
            return self._add_constant(values, kind)
        key = (kind, tuple(values.shape), tuple(values.flatten().tolist()))
        if key not in self._small:  # a few numbers come up in every layer: half of all constants, and of build time
            self._small[key] = self._add_constant(values, kind)
        return self._small[key]

    def _add_constant(self, values: torch.Tensor, kind: Kind) -> trt.ITensor:
        data = values.to(self._torch_dtypes[kind]).contiguous()
        self._kept.append(data)
        weights = self._trt.Weights(self._dtypes[kind], data.data_ptr(), data.numel())
        return self._network.add_constant(tuple(data.shape), weights).get_output(0)

    def rank(self, x: trt.ITensor) -> int:
        return len(x.shape)

    def size(self, x: trt.ITensor, axis: int) -> int:
        size = int(x.shape[axis])
        assert size > 0, f"{x.name}: size {axis} changes from step to step"
        return size

    def cast(self, x: trt.ITensor, kind: Kind) -> trt.ITensor:
        if x.dtype == self._dtypes[kind]:
            return x
        return self._network.add_cast(x, self._dtypes[kind]).get_output(0)

    def reshape(self, x: trt.ITensor, shape: Sequence[int], first: Axes = (), then: Axes = ()) -> trt.ITensor:
        layer = self._network.add_shuffle(x)
        if first:
            layer.first_transpose = tuple(first)
        layer.reshape_dims = tuple(shape)
        if then:
            layer.second_transpose = tuple(then)
        return layer.get_output(0)

    def part(self, x: trt.ITensor, axis: int, start: int, size: int) -> trt.ITensor:
        """By a list of indices: a slice would need the sizes of the other axes as tensors, four layers more."""
        return self.gather(x, self.constant(torch.arange(start, start + size), "int32"), axis)

    def take(self, x: trt.ITensor, axis: int, index: int) -> trt.ITensor:
        return self.gather(x, self.constant(torch.tensor(index), "int32"), axis)

    def concat(self, parts: Sequence[trt.ITensor], axis: int) -> trt.ITensor:
        layer = self._network.add_concatenation(list(parts))
        layer.axis = axis
        return layer.get_output(0)

    def gather(self, x: trt.ITensor, index: trt.ITensor, axis: int = 0) -> trt.ITensor:
        return self._network.add_gather(x, index, axis).get_output(0)

    def gather_at(self, x: trt.ITensor, index: trt.ITensor) -> trt.ITensor:
        return self._network.add_gather_v2(x, index, self._trt.GatherMode.ND).get_output(0)

    def scatter(self, x: trt.ITensor, index: trt.ITensor, updates: trt.ITensor) -> trt.ITensor:
        return self._network.add_scatter(x, index, updates, self._trt.ScatterMode.ND).get_output(0)

    def add(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._pair(a, b, self._trt.ElementWiseOperation.SUM)

    def sub(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._pair(a, b, self._trt.ElementWiseOperation.SUB)

    def mul(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._pair(a, b, self._trt.ElementWiseOperation.PROD)

    def div(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        operations = self._trt.ElementWiseOperation
        whole = a.dtype == self._trt.DataType.INT32
        return self._pair(a, b, operations.FLOOR_DIV if whole else operations.DIV)

    def maximum(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._pair(a, b, self._trt.ElementWiseOperation.MAX)

    def less(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._pair(a, b, self._trt.ElementWiseOperation.LESS)

    def equal(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._pair(a, b, self._trt.ElementWiseOperation.EQUAL)

    def both(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._pair(a, b, self._trt.ElementWiseOperation.AND)

    def select(self, condition: trt.ITensor, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        return self._network.add_select(condition, a, b).get_output(0)

    def exp(self, x: trt.ITensor) -> trt.ITensor:
        return self._network.add_unary(x, self._trt.UnaryOperation.EXP).get_output(0)

    def log(self, x: trt.ITensor) -> trt.ITensor:
        return self._network.add_unary(x, self._trt.UnaryOperation.LOG).get_output(0)

    def sqrt(self, x: trt.ITensor) -> trt.ITensor:
        return self._network.add_unary(x, self._trt.UnaryOperation.SQRT).get_output(0)

    def cos(self, x: trt.ITensor) -> trt.ITensor:
        return self._network.add_unary(x, self._trt.UnaryOperation.COS).get_output(0)

    def sin(self, x: trt.ITensor) -> trt.ITensor:
        return self._network.add_unary(x, self._trt.UnaryOperation.SIN).get_output(0)

    def sigmoid(self, x: trt.ITensor) -> trt.ITensor:
        return self._network.add_activation(x, self._trt.ActivationType.SIGMOID).get_output(0)

    def matmul(self, a: trt.ITensor, b: trt.ITensor, transpose_b: bool = False) -> trt.ITensor:
        plain, transposed = self._trt.MatrixOperation.NONE, self._trt.MatrixOperation.TRANSPOSE
        layer = self._network.add_matrix_multiply(a, plain, b, transposed if transpose_b else plain)
        return layer.get_output(0)

    def reduce_max(self, x: trt.ITensor, axes: Sequence[int]) -> trt.ITensor:
        return self._reduce(x, axes, self._trt.ReduceOperation.MAX)

    def reduce_sum(self, x: trt.ITensor, axes: Sequence[int]) -> trt.ITensor:
        return self._reduce(x, axes, self._trt.ReduceOperation.SUM)

    def reduce_mean(self, x: trt.ITensor, axes: Sequence[int]) -> trt.ITensor:
        return self._reduce(x, axes, self._trt.ReduceOperation.AVG)

    def sum_before(self, x: trt.ITensor) -> trt.ITensor:
        axis = self.constant(torch.tensor(0), "int32")
        layer = self._network.add_cumulative(x, axis, self._trt.CumulativeOperation.SUM, True, False)
        return layer.get_output(0)

    def _pair(self, a: trt.ITensor, b: trt.ITensor, operation: trt.ElementWiseOperation) -> trt.ITensor:
        return self._network.add_elementwise(a, b, operation).get_output(0)

    def _reduce(self, x: trt.ITensor, axes: Sequence[int], operation: trt.ReduceOperation) -> trt.ITensor:
        mask = sum(1 << axis for axis in axes)
        return self._network.add_reduce(x, operation, mask, True).get_output(0)
