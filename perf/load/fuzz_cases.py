"""Requests made by Hypothesis: tensors of wrong types, shapes and bytes, damaged JSON and UTF-8, odd parameters.

Every input of the contract takes part, by its own table. Answers are kept short: a request that happens to be right
asks for three tokens at most, so most of the time goes into the wrong ones.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from runtime.serving.contract import INPUTS, TENANT_PARAMETER

Drawn = TypeVar("Drawn")
Parameter = bool | int | float | str

MAX_TOKENS = "sampling_param_max_tokens"
BATCH = 1000
# Codes of `struct` by the server's type names; BYTES are lengths of 4 bytes with so many bytes behind each.
STRUCT_CODES = {
    "BOOL": "?", "INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H", "INT32": "i", "UINT32": "I", "INT64": "q",
    "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
DTYPES = (*STRUCT_CODES, "BYTES")


@dataclass(frozen=True)
class FuzzTensor:
    """contents: as they travel; they need not fit dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    contents: bytes


@dataclass(frozen=True)
class FuzzRequest:
    """One gRPC request. surplus: contents of one more tensor than there are; lacks_last: of one less."""

    tensors: tuple[FuzzTensor, ...]
    request_id: str = ""
    model_version: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    surplus: bytes | None = None
    lacks_last: bool = False


@dataclass(frozen=True)
class FuzzBody:
    """One HTTP request to `generate` or `generate_stream`."""

    path: str
    body: bytes


FuzzCase = FuzzRequest | FuzzBody


def pack_bytes(values: list[bytes]) -> bytes:
    """BYTES as they travel."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def pack(dtype: str, values: list[Any]) -> bytes:
    """Values of one type as they travel."""
    if dtype == "BYTES":
        return pack_bytes(values)
    return struct.pack(f"<{len(values)}{STRUCT_CODES[dtype]}", *values)


def texts() -> SearchStrategy[bytes]:
    """Mostly UTF-8, some damaged, some with the marks of chat templates."""
    marks = st.sampled_from(
        ["<|im_start|>system\n", "<|im_end|>", "\x00", "\u202e", "e\u0301", "👩‍👩‍👧", "\ud800", "\r\n"]
    )
    pieces = st.lists(st.one_of(st.text(max_size=12), marks), max_size=4).map("".join)
    valid = pieces.map(lambda text: text.encode("utf-8", "surrogatepass"))
    return st.one_of(valid, valid, st.binary(max_size=24), st.integers(0, 3000).map(lambda n: b"word " * n))


def json_values() -> SearchStrategy[Any]:
    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
        max_leaves=8,
    )


def chats() -> SearchStrategy[bytes]:
    """`messages`: right ones, nearly right ones, other JSON, and text that is no JSON."""
    roles = st.sampled_from(["user", "assistant", "system", "tool", "", "User"])
    message = st.fixed_dictionaries({"role": roles, "content": st.one_of(st.text(max_size=20), json_values())})
    right = st.integers(0, 3).map(
        lambda turns: [
            *({"role": role, "content": f"{role} {n}"} for n in range(turns) for role in ("user", "assistant")),
            {"role": "user", "content": "and now?"},
        ]
    )
    listed = st.one_of(right, st.lists(st.one_of(message, message, json_values()), max_size=5), json_values())
    written = listed.map(lambda value: json.dumps(value).encode())
    cut = st.tuples(written, st.integers(0, 40)).map(lambda pair: pair[0][: -pair[1] or None])
    return st.one_of(written, written, cut, texts())


def identifiers() -> SearchStrategy[bytes]:
    """Mostly of a few conversations, so that requests meet."""
    few = st.integers(0, 7).map(lambda n: f"fuzz-{n}".encode())
    return st.one_of(few, few, texts())


_BY_NAME: Mapping[str, SearchStrategy[Any]] = {
    MAX_TOKENS: st.sampled_from([0, 1, 2, 3, 1, 2, -1, -(2**31)]),
    "messages": chats(),
    "conversation_id": identifiers(),
    "kv_policy": st.one_of(st.sampled_from([b"commitkv", b"full", b"snapkv", b"Full", b"none"]), texts()),
    "sampling_param_top_p": st.one_of(st.sampled_from([0.5, 1.0]), st.floats(width=32)),
    "sampling_param_temperature": st.one_of(st.sampled_from([0.0, 0.7]), st.floats(width=32)),
}
_BY_DTYPE: Mapping[str, SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    "INT8": st.integers(-(2**7), 2**7 - 1),
    "UINT8": st.integers(0, 2**8 - 1),
    "INT16": st.integers(-(2**15), 2**15 - 1),
    "UINT16": st.integers(0, 2**16 - 1),
    "INT32": st.one_of(st.integers(0, 40), st.integers(-(2**31), 2**31 - 1)),
    "UINT32": st.integers(0, 2**32 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP16": st.floats(width=16),
    "FP32": st.floats(width=32),
    "FP64": st.floats(),
    "BYTES": texts(),
}


# Values that a request can run with.
_SANE_BY_NAME: Mapping[str, SearchStrategy[Any]] = {
    MAX_TOKENS: st.integers(0, 3),
    "messages": st.just(b'[{"role": "user", "content": "and now?"}]'),
    "conversation_id": st.integers(0, 7).map(lambda n: f"fuzz-{n}".encode()),
    "kv_policy": st.sampled_from([b"commitkv", b"full"]),
    "sampling_param_best_of": st.just(1),
    "stop": st.just(False),
    "stats": st.just(False),
}
_SANE_BY_DTYPE: Mapping[str, SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    "INT32": st.integers(0, 1),
    "UINT64": st.integers(0, 9),
    "FP32": st.sampled_from([0.5, 1.0]),
    "BYTES": st.text("abc <|>\u00e9\u4e16", min_size=1, max_size=20).map(lambda text: text.encode("utf-8")),
}


def _sane(name: str) -> SearchStrategy[FuzzTensor]:
    """An input that is right in type, shape and value; together they may still not make a request."""
    dtype = "BYTES" if INPUTS[name].dtype == "STRING" else str(INPUTS[name].dtype)
    return _shaped(name, dtype, _SANE_BY_NAME.get(name, _SANE_BY_DTYPE[dtype]))


def _right(name: str) -> SearchStrategy[FuzzTensor]:
    """An input of the contract with its own type and shape; the value may be absurd."""
    dtype = "BYTES" if INPUTS[name].dtype == "STRING" else str(INPUTS[name].dtype)
    return _shaped(name, dtype, _BY_NAME.get(name, _BY_DTYPE[dtype]))


def _shaped(name: str, dtype: str, value: SearchStrategy[Any]) -> SearchStrategy[FuzzTensor]:
    spec = INPUTS[name]
    if spec.kind == "one":
        return value.map(lambda v: FuzzTensor(name, dtype, (1,), pack(dtype, [v])))
    if spec.kind == "list":
        return st.lists(value, max_size=3).map(lambda vs: FuzzTensor(name, dtype, (len(vs),), pack(dtype, vs)))
    pairs = st.lists(st.tuples(value, value), max_size=3)
    return pairs.map(lambda vs: FuzzTensor(name, dtype, (len(vs), 2), pack(dtype, [v for pair in vs for v in pair])))


def _of_type(name: str, dtype: str) -> SearchStrategy[FuzzTensor]:
    return _BY_DTYPE[dtype].map(lambda v: FuzzTensor(name, dtype, (1,), pack(dtype, [v])))


def _cut(pair: tuple[FuzzTensor, int]) -> FuzzTensor:
    tensor, length = pair
    return replace(tensor, contents=tensor.contents[: -1 - length])


_ODD_SHAPES: SearchStrategy[tuple[int, ...]] = st.one_of(
    st.sampled_from([(), (0,), (1, 1), (2,), (2**31,), (2**40, 2), (-1,), (1, 0, 3)]),
    st.lists(st.integers(-2, 3), max_size=4).map(tuple),
)


def _damaged(name: str) -> SearchStrategy[FuzzTensor]:
    """The same with one thing wrong: its name, type, shape or bytes."""
    right = RIGHT[name]
    own = "BYTES" if INPUTS[name].dtype == "STRING" else INPUTS[name].dtype
    names = st.one_of(st.just(name.upper()), st.text(max_size=12))
    return st.one_of(
        st.tuples(right, names).map(lambda pair: replace(pair[0], name=pair[1])),
        st.sampled_from([dtype for dtype in DTYPES if dtype != own]).flatmap(lambda dtype: _TYPED[name, dtype]),
        st.tuples(right, _ODD_SHAPES).map(lambda pair: replace(pair[0], shape=pair[1])),
        st.tuples(right, st.integers(0, 12)).map(_cut),
        st.tuples(right, st.binary(min_size=1, max_size=9)).map(
            lambda pair: replace(pair[0], contents=pair[0].contents + pair[1])
        ),
        st.tuples(right, st.binary(max_size=24)).map(lambda pair: replace(pair[0], contents=pair[1])),
    )


# Made once: a strategy that is made anew for every example costs more than drawing from it.
SANE: Mapping[str, SearchStrategy[FuzzTensor]] = {name: _sane(name) for name in INPUTS}
RIGHT: Mapping[str, SearchStrategy[FuzzTensor]] = {name: _right(name) for name in INPUTS}
_TYPED = {(name, dtype): _of_type(name, dtype) for name in INPUTS for dtype in DTYPES}
DAMAGED: Mapping[str, SearchStrategy[FuzzTensor]] = {name: _damaged(name) for name in INPUTS}


def parameters() -> SearchStrategy[dict[str, Parameter]]:
    values: SearchStrategy[Parameter] = st.one_of(
        st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=12)
    )
    tenants = st.sampled_from(["red", "blue"])
    names = st.sampled_from(["priority", "x-odd", "triton_enable_empty_final_response", TENANT_PARAMETER])
    return st.one_of(
        st.just({}),
        st.just({}),
        tenants.map(lambda tenant: {TENANT_PARAMETER: tenant}),
        st.dictionaries(st.one_of(names, st.text(min_size=1, max_size=8)), values, max_size=2),
    )


_COMMON = ("text_input", "messages", "conversation_id", "streaming", "conversation_end", "stats", "stop")
_NAMES = st.lists(st.one_of(st.sampled_from(_COMMON), st.sampled_from(list(INPUTS))), max_size=5, unique=True)
_FIRST = st.sampled_from([("text_input",), ("text_input", "conversation_id"), ("messages",), ("text_input",), ()])
_CARE = st.integers(0, 2)  # 0: some inputs damaged, 1: some absurd, 2: all sane
_ONE_IN_FOUR = st.sampled_from([False, True, False, False])
_REQUEST_IDS = st.one_of(st.sampled_from(["", "a", "b", "c"]), st.text(max_size=8))
_PARAMETERS = parameters()
_OUTPUTS = st.lists(st.sampled_from(["text_output", "kv_bytes", "nothing"]), max_size=2).map(tuple)
_JSON_VALUES = st.one_of(json_values(), chats().map(lambda chat: chat.decode("utf-8", "replace")))


@st.composite
def grpc_requests(draw: st.DrawFn) -> FuzzRequest:
    """A few inputs of the contract, none twice: all sane, or some absurd or damaged."""
    care = draw(_CARE)
    tensors = []
    for name in dict.fromkeys([*draw(_FIRST), *draw(_NAMES), MAX_TOKENS]):
        wild = care < 2 and draw(_ONE_IN_FOUR)
        tensors.append(draw((SANE if not wild else RIGHT if care else DAMAGED)[name]))
    request = FuzzRequest(tuple(tensors), draw(_REQUEST_IDS), parameters=draw(_PARAMETERS))
    if care or not draw(_ONE_IN_FOUR):
        return request
    return replace(
        request,
        model_version=draw(st.sampled_from(["", "1", "2", "-1", "x"])),
        outputs=draw(_OUTPUTS),
        surplus=draw(st.one_of(st.none(), st.binary(max_size=8))),
        lacks_last=draw(st.booleans()),
    )


@st.composite
def http_bodies(draw: st.DrawFn) -> FuzzBody:
    """A JSON object of inputs, other JSON, or text that is no JSON. Answers stay short."""
    limit = draw(st.sampled_from([1, 2, -1, "x", None, 1.5]))
    record = {name: draw(_JSON_VALUES) for name in draw(_NAMES)} | {MAX_TOKENS: limit}
    body = json.dumps(record).encode()
    if draw(_ONE_IN_FOUR):
        body = body[: draw(st.integers(0, 60))]
    elif draw(_ONE_IN_FOUR):
        body = draw(texts())
    return FuzzBody(draw(st.sampled_from(["generate", "generate_stream"])), body)


def batches(strategy: SearchStrategy[Drawn], count: int, seed: int) -> Iterator[list[Drawn]]:
    """`count` examples in lists of up to BATCH; the same seed draws the same ones."""
    for number, first in enumerate(range(0, count, BATCH)):
        yield _draw(strategy, min(BATCH, count - first), seed * 100_003 + number)


def _draw(strategy: SearchStrategy[Drawn], count: int, seed: int) -> list[Drawn]:
    drawn: list[Drawn] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(example: Drawn) -> None:
        drawn.append(example)

    collect()
    return drawn[:count]
