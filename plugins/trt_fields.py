"""Attributes of the TensorRT plugins: checked at build, carried in the engine, read back when it is loaded.

Every attribute is one plugin field, so serialization, clone and creator have nothing to forget:
    int -> INT32 [1]    float -> FLOAT32 [1]    str -> CHAR [n]    bytes -> INT8 [n] (the cubins)
The ONNX parser ends texts with a zero byte, which is dropped; bytes come through exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np

from plugins.compile import SMS
from plugins.errors import PluginError, UnsupportedShapeError, UnsupportedSmError
from plugins.kernel import Kernel
from plugins.layout import (
    CODE_BITS,
    ELEMENT_BYTES,
    ELEMENTS,
    KERNEL_HEAD_DIMS,
    QUANTIZED,
    BlockFormat,
    BlockLayout,
    Element,
    PageLayout,
)

FieldKind = Literal["INT32", "FLOAT32", "CHAR", "INT8"]
Array = np.ndarray[Any, np.dtype[Any]]
F = TypeVar("F", bound="PluginFields")
CompileCubin = Callable[[Kernel, str], bytes]
"""(kernel, sm) -> its cubin: `plugins.compile.compile_cubin`."""

FIELD_KINDS: dict[type, FieldKind] = {int: "INT32", float: "FLOAT32", str: "CHAR", bytes: "INT8"}
DTYPES: dict[FieldKind, type[np.generic]] = {"INT32": np.int32, "FLOAT32": np.float32, "CHAR": np.int8, "INT8": np.int8}

MAX_GROUP_SIZE = 16
PAGE_TOKENS = range(8, 257, 8)
BLOCK_ENTRIES = range(16, 257, 8)


@dataclasses.dataclass(frozen=True)
class PluginFields:
    """What every operation must know. Raises UnsupportedSmError, UnsupportedShapeError.

    sm: the device the cubins are for, as in `plugins.compile.SMS`.   element: of q, k, v and the pages.
    """

    sm: str
    element: str
    block_format: str
    q_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    block_entries: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float):  # as the engine will hold it
                object.__setattr__(self, field.name, float(np.float32(value)))
        check_support(self)

    @property
    def page(self) -> PageLayout:
        """Pages of one layer."""
        return PageLayout(1, self.kv_heads, self.head_dim, self.page_tokens, ELEMENT_BYTES)

    @property
    def block(self) -> BlockLayout:
        block_format: BlockFormat = next(name for name in CODE_BITS if name == self.block_format)
        return BlockLayout(block_format, self.block_entries, self.head_dim)

    @property
    def element_type(self) -> Element:
        return next(name for name in ELEMENTS if name == self.element)

    @classmethod
    def extend(cls: type[F], base: PluginFields, **more: Any) -> F:
        """`base` with the attributes of one operation."""
        shared: dict[str, Any] = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        return cls(**shared, **more)

    def sizes(self) -> dict[str, int]:
        """Sizes of tensors that are fixed when the engine is built, by the names that `trt_plugin` tables use."""
        return {
            "1": 1,
            "2": 2,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "head_dim/2": self.head_dim // 2,
            "page_tokens": self.page_tokens,
            "block_entries": self.block_entries,
            "block_bytes/4": self.block.block_bytes // 4,
        }


def check_support(fields: PluginFields) -> None:
    """Raises UnsupportedSmError or UnsupportedShapeError unless kernels exist for `fields`."""
    if fields.sm not in SMS:
        raise UnsupportedSmError(
            f"sm: got {fields.sm!r}, expected {_choices(SMS)}; choose one with --sm, or build with --target trt-rtx, "
            f"whose engines need no kernels"
        )
    for name, got, expected, hint in (
        ("dtype", fields.element, ELEMENTS, "pass --dtype and --kv-dtype fp16 or bf16"),
        ("block format", fields.block_format, (*QUANTIZED, fields.element), "choose a policy that stores such blocks"),
        ("head_dim", fields.head_dim, KERNEL_HEAD_DIMS, "build this model with --target trt-rtx or cpu"),
        ("page_tokens", fields.page_tokens, PAGE_TOKENS, "pass --page-tokens"),
        ("block_entries", fields.block_entries, BLOCK_ENTRIES, "pass --block-entries"),
    ):
        if got not in expected:
            raise UnsupportedShapeError(f"{name}: got {got!r}, expected {_choices(expected)}; {hint}")
    group, rest = divmod(fields.q_heads, max(fields.kv_heads, 1))
    if fields.kv_heads < 1 or rest or not 1 <= group <= MAX_GROUP_SIZE:
        raise UnsupportedShapeError(
            f"query heads per KV head: got {fields.q_heads} / {fields.kv_heads}, expected a whole number from 1 to "
            f"{MAX_GROUP_SIZE}; build this model with --target trt-rtx or cpu"
        )


def _choices(expected: tuple[object, ...] | range) -> str:
    if isinstance(expected, range):
        return f"a multiple of {expected.step} from {expected[0]} to {expected[-1]}"
    return "one of " + ", ".join(str(choice) for choice in expected)


def field_kinds(fields_type: type[PluginFields]) -> dict[str, FieldKind]:
    """Name and type of every plugin field, in the order of the attributes."""
    hints = get_type_hints(fields_type)
    return {field.name: FIELD_KINDS[hints[field.name]] for field in dataclasses.fields(fields_type)}


def pack(fields: PluginFields) -> dict[str, Array]:
    """The plugin fields' contents; `unpack` is the inverse."""
    return {name: _pack(getattr(fields, name), DTYPES[kind]) for name, kind in field_kinds(type(fields)).items()}


def _pack(value: int | float | str | bytes, dtype: type[np.generic]) -> Array:
    raw = value.encode() if isinstance(value, str) else value
    return np.frombuffer(raw, dtype) if isinstance(raw, bytes) else np.array([raw], dtype)


def unpack(fields_type: type[F], packed: Mapping[str, Array]) -> F:
    """Attributes from plugin fields of any origin. Raises PluginError for a field that is missing or of no use."""
    values: dict[str, int | float | str | bytes] = {}
    for name, kind in field_kinds(fields_type).items():
        if name not in packed:
            raise PluginError(f"plugin field {name}: missing, expected {kind}; the engine was built by another version")
        array = np.ascontiguousarray(packed[name])
        single = kind in ("INT32", "FLOAT32")
        if array.dtype.itemsize != np.dtype(DTYPES[kind]).itemsize or (single and array.size != 1):
            raise PluginError(f"plugin field {name}: got {array.dtype} {list(array.shape)}, expected {kind}; "
                              f"the engine was built by another version")  # fmt: skip
        if single:
            values[name] = array.reshape(-1)[0].item()
        else:
            raw = array.tobytes()
            values[name] = raw.rstrip(b"\0").decode() if kind == "CHAR" else raw
    return fields_type(**values)  # type: ignore[arg-type]  # the table above gave each its type
