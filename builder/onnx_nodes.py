"""Writes the smallest ONNX file that TensorRT-RTX's parser takes: nodes of our plugins, fed by constants.

Only what `trt_insert` needs of the format (ONNX IR 8, onnx.proto3), encoded by hand: the `onnx` package would be one
more dependency for forty lines. Messages and field numbers: ModelProto 1 ir_version, 7 graph, 8 opset_import;
GraphProto 1 node, 2 name, 5 initializer; NodeProto 1 input, 2 output, 3 name, 4 op_type, 5 attribute; AttributeProto
1 name, 2 f, 3 i, 4 s, 5 t, 20 type; TensorProto 1 dims, 2 data_type, 8 name, 9 raw_data; OperatorSetId 1 domain,
2 version.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Attribute = int | float | str | bytes

IR_VERSION, OPSET = 8, 17
FLOAT, INT8, INT32, INT64, BOOL, FLOAT16, BFLOAT16 = 1, 3, 6, 7, 9, 10, 16  # TensorProto.DataType
ELEMENT_BYTES = {FLOAT: 4, INT8: 1, INT32: 4, INT64: 8, BOOL: 1, FLOAT16: 2, BFLOAT16: 2}
ATTRIBUTE_FLOAT, ATTRIBUTE_INT, ATTRIBUTE_STRING, ATTRIBUTE_TENSOR = 1, 2, 3, 4  # AttributeProto.AttributeType


@dataclass(frozen=True)
class Constant:
    """A tensor of zeros that stands for an input."""

    data_type: int
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One node; its inputs become constants of its own, its outputs are named after it."""

    op_type: str
    name: str
    inputs: tuple[Constant, ...]
    num_outputs: int
    attributes: Mapping[str, Attribute]


def encode_model(nodes: Sequence[Node]) -> bytes:
    """An ONNX model without graph inputs or outputs."""
    graph = _text(2, "plugins") + b"".join(_node(node) for node in nodes)
    return _number(1, IR_VERSION) + _message(7, graph) + _message(8, _text(1, "") + _number(2, OPSET))


def _node(node: Node) -> bytes:
    names = [f"{node.name}.in{i}" for i in range(len(node.inputs))]
    body = b"".join(_text(1, name) for name in names)
    body += b"".join(_text(2, f"{node.name}.out{i}") for i in range(node.num_outputs))
    body += _text(3, node.name) + _text(4, node.op_type)
    body += b"".join(_message(5, _attribute(name, value)) for name, value in node.attributes.items())
    constants = (_constant(name, constant) for name, constant in zip(names, node.inputs, strict=True))
    return _message(1, body) + b"".join(_message(5, constant) for constant in constants)


def _constant(name: str, constant: Constant) -> bytes:
    data = bytes(math.prod(constant.dims) * ELEMENT_BYTES[constant.data_type])
    return _tensor(constant.data_type, constant.dims, data) + _text(8, name)


def _tensor(data_type: int, dims: tuple[int, ...], data: bytes) -> bytes:
    return b"".join(_number(1, dim) for dim in dims) + _number(2, data_type) + _message(9, data)


def _attribute(name: str, value: Attribute) -> bytes:
    """bytes become an INT8 tensor: the parser adds a zero byte to texts and leaves tensors alone."""
    if isinstance(value, bytes):
        return _text(1, name) + _message(5, _tensor(INT8, (len(value),), value)) + _number(20, ATTRIBUTE_TENSOR)
    if isinstance(value, str):
        return _text(1, name) + _text(4, value) + _number(20, ATTRIBUTE_STRING)
    if isinstance(value, float):
        return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, ATTRIBUTE_FLOAT)
    return _text(1, name) + _number(3, value) + _number(20, ATTRIBUTE_INT)


def _varint(value: int) -> bytes:
    """Base-128, least significant group first; negative numbers as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
