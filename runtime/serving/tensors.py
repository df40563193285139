"""Named tensors as plain values, without Triton and without numpy: checks by name, and reading.

A tensor here is its flat list of values with its shape; the models' model.py convert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from runtime.errors import RequestError

DType = Literal["STRING", "BOOL", "INT32", "INT64", "UINT64", "FP32"]
Value = bytes | bool | int | float


@dataclass(frozen=True)
class InputSpec:
    """kind: "one" value, a "list" of any length, or "pairs" with shape [n, 2]."""

    dtype: DType
    kind: Literal["one", "list", "pairs"] = "one"


@dataclass(frozen=True)
class InputTensor:
    """values: all elements in row-major order, as Python values (STRING elements as bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Sequence[Value]


class Fields:
    """Checked tensors, read by name; an absent tensor gives the default.

    Raises RequestError naming the tensor that is unknown, twice there, of the wrong type or of the wrong shape.
    """

    def __init__(self, tensors: Sequence[InputTensor], specs: Mapping[str, InputSpec]) -> None:
        self._tensors: dict[str, InputTensor] = {}
        for tensor in tensors:
            _check(tensor, specs)
            if tensor.name in self._tensors:
                raise RequestError(f"{tensor.name}: got the tensor twice, expected it once; leave one out")
            self._tensors[tensor.name] = tensor

    def has(self, name: str) -> bool:
        """Whether the tensor came, whatever it holds."""
        return name in self._tensors

    def flag(self, name: str, default: bool = False) -> bool:
        tensor = self._tensors.get(name)
        return default if tensor is None else bool(tensor.values[0])

    def number(self, name: str, default: float) -> float:
        tensor = self._tensors.get(name)
        return default if tensor is None else float(tensor.values[0])

    def whole(self, name: str) -> int | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else int(tensor.values[0])

    def wholes(self, name: str) -> list[int]:
        tensor = self._tensors.get(name)
        return [] if tensor is None else [int(value) for value in tensor.values]

    def text(self, name: str) -> str | None:
        texts = self.texts(name)
        return texts[0] if texts else None

    def texts(self, name: str) -> tuple[str, ...]:
        """Raises RequestError for bytes that are not UTF-8."""
        tensor = self._tensors.get(name)
        return () if tensor is None else tuple(utf8(name, value) for value in tensor.values)


def utf8(name: str, value: Value) -> str:
    """A STRING element as text. Raises RequestError."""
    if isinstance(value, str):
        return value
    assert isinstance(value, bytes)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}: got bytes that are not UTF-8 (0x{value[error.start]:02x} at byte {error.start}), "
            "expected UTF-8 text; encode it so"
        ) from error


def _check(tensor: InputTensor, specs: Mapping[str, InputSpec]) -> None:
    spec = specs.get(tensor.name)
    if spec is None:
        raise RequestError(f"{tensor.name}: unknown input tensor, expected one of {', '.join(specs)}; leave it out")
    if tensor.dtype != spec.dtype:
        raise RequestError(f"{tensor.name}: got data type {tensor.dtype}, expected {spec.dtype}; convert the tensor")
    shape = list(tensor.shape)
    if spec.kind == "pairs" and (len(shape) != 2 or shape[1] != 2):
        raise RequestError(f"{tensor.name}: got shape {shape}, expected [n, 2] (start, end); reshape the tensor")
    if spec.kind == "one" and prod(shape) != 1:
        raise RequestError(f"{tensor.name}: got shape {shape}, expected exactly one value; send one per request")
    assert len(tensor.values) == prod(shape), "the server delivers as many values as the shape says"
