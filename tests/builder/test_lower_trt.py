"""The TensorRT lowering: run by torch against the torch lowering, and built by TensorRT-RTX for every family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from builder import build, trt_api
from builder.layers import TorchLayers
from builder.lower_torch import TorchDecoder
from builder.lower_trt import (
    APPEND_OUTPUTS,
    ATTEND_INPUTS,
    ATTEND_OUTPUTS,
    EngineShape,
    PluginForm,
    build_network,
    run_decoder,
)
from builder.model import weight_recipes
from builder.native_ops import Arenas, NativeOps
from builder.native_tables import Tables
from builder.network_ops import NativeForm, rotate
from builder.trt_engine import check_limits, native_shape
from runtime import manifest
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.engine_interface import EngineInterface, StepLimits, make_interface
from runtime.errors import ConfigError, DeviceError


@pytest.fixture
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx")


PAGE, ENTRIES, NUM_PAGES = 8, 16, 24
ROPES = {
    "default": RopeSpec(10000.0),
    "linear": RopeSpec(10000.0, "linear", 4.0),
    "llama3": RopeSpec(500000.0, "llama3", 8.0, 64),
    "yarn": RopeSpec(10000.0, "yarn", 4.0, 64, attention_factor=1.1386),
}
SPECS = {
    "llama": ModelSpec("llama", 2, 96, 128, 6, 2, 16, 300, 1e-5, ROPES["llama3"], 256, True),
    "mistral": ModelSpec("mistral", 2, 96, 128, 6, 2, 16, 300, 1e-5, ROPES["linear"], 256, False),
    "qwen2": ModelSpec("qwen2", 2, 96, 128, 6, 2, 16, 300, 1e-6, ROPES["default"], 256, True, qkv_bias=True),
    "qwen3": ModelSpec("qwen3", 2, 96, 128, 6, 2, 24, 300, 1e-6, ROPES["yarn"], 256, False, qk_norm=True),
}


def random_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(11)
    return {
        r.name: torch.randn(r.shape, generator=gen) * 0.12 + (1.0 if r.is_norm else 0.0) for r in weight_recipes(spec)
    }


def shape_of(spec: ModelSpec, dtype: str = "bf16") -> EngineShape:
    limits = EngineLimits(
        dtype=dtype, kv_dtype=dtype, max_batch_size=4, max_seq_len=128, page_tokens=PAGE, block_entries=ENTRIES
    )  # type: ignore[arg-type]
    return EngineShape(spec, limits, StepLimits(64, "int4", 1))


@dataclasses.dataclass
class Conversation:
    """Its tokens so far and its pages, taken from a shuffled list."""

    pages: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)

    def add(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Positions and slots of new tokens."""
        positions = list(range(len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        return positions, [self.pages[p // PAGE] * PAGE + p % PAGE for p in positions]

    def table(self) -> tuple[list[int], list[int]]:
        count = -(-len(self.tokens) // PAGE)
        return self.pages[:count], [min(PAGE, len(self.tokens) - PAGE * i) for i in range(count)]


def step_inputs(
    spec: ModelSpec, rows: list[tuple[Conversation, list[int]]], pads: int, arenas: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Inputs of `runtime.engine_interface` for one step without committed blocks; `pads` rows, pages that pad."""
    values: dict[str, list[int]] = {name: [] for name in ("token_ids", "positions", "slots", "page_ids", "page_lens")}
    row_starts, page_starts = [0], [0]
    for conversation, tokens in rows:
        positions, slots = conversation.add(tokens)
        ids, lens = conversation.table()
        for name, new in zip(values, (tokens, positions, slots, ids, lens), strict=True):
            values[name] += new
        row_starts.append(len(values["token_ids"]))
        page_starts.append(len(values["page_ids"]))
    num_rows, lists = row_starts[-1], len(rows) * spec.num_kv_heads
    for name, value in (("token_ids", 5), ("positions", 0), ("slots", -1), ("page_ids", -1), ("page_lens", 3)):
        values[name] += [value] * pads
    values |= {"row_starts": row_starts, "page_starts": page_starts, "record_skip": [0] * len(rows)}
    values["logit_rows"] = list(range(num_rows))
    tables = {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}
    return {
        **tables,
        "record": torch.arange(num_rows + pads) < num_rows,
        "block_starts": torch.zeros(spec.num_layers, lists + 1, dtype=torch.int32),
        "block_ids": torch.full((spec.num_layers, 1), -1, dtype=torch.int32),
        "block_lens": torch.zeros(spec.num_layers, 1, dtype=torch.int32),
        "tiles": torch.zeros(spec.num_layers, 1, dtype=torch.int32),
        **arenas,
    }


def new_arenas(shape: EngineShape, kv: torch.dtype) -> dict[str, torch.Tensor]:
    """NaN wherever nothing was written."""
    interface, sizes = shape.interface, {"pages": NUM_PAGES, "blocks": 2}
    dtypes = {"fp16": torch.float16, "int32": torch.int32, shape.limits.kv_dtype: kv}
    found = {}
    for binding in interface.inputs:
        if binding.shape[0] in sizes:
            size = [sizes.get(s, s) if isinstance(s, str) else s for s in binding.shape]
            found[binding.name] = torch.full(size, -1 if binding.dtype == "int32" else torch.nan).to(
                kv if binding.name.startswith("pages") else dtypes[binding.dtype]
            )
    return found


class TorchPlugins:
    """A `PluginInsert` whose plugins are torch: sees that inputs come in the order that the hook promises."""

    def __init__(self, layers: TorchLayers, shape: EngineShape) -> None:
        self._layers, self._shape = layers, shape
        self.calls: list[tuple[str, int]] = []
        self._slots: torch.Tensor | None = None

    def __call__(self, _: object, operation: str, layer: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls.append((operation, layer))
        if operation == "append":
            q, k, v, cos, sin, slots, pages, seen = inputs
            self._slots = slots
            ops = NativeOps(self._layers, self._shape.geometry, Tables(slots, *[slots] * 9))
            turned = [rotate(self._layers, x, (cos, sin)) for x in (q, k)]
            outputs = [turned[0], *ops.append(turned[1], v, pages, seen)]
            assert len(outputs) == len(APPEND_OUTPUTS)
            return outputs
        named = dict(zip(ATTEND_INPUTS, inputs, strict=True))
        assert self._slots is not None
        tables = Tables(slots=self._slots, **{n: named[n] for n in Tables.__annotations__ if n != "slots"})
        ops = NativeOps(self._layers, self._shape.geometry, tables)
        got = ops.attend(layer, named["q"], Arenas(*(named[n] for n in ("pages", "seen", "blocks"))))
        nothing = torch.zeros_like(got.raised.entry_weights)
        weights = [got.raised.entry_weights if i == layer else nothing for i in range(self._shape.spec.num_layers)]
        assert len(ATTEND_OUTPUTS) == 3
        return [got.out, got.raised.seen, ops.raise_score(named["score"], weights)]


def run_conversation(
    spec: ModelSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype, plugins: bool = False
) -> list[torch.Tensor]:
    """Logits of two conversations: a chunk each in one step, one row each in the next, then a row and a chunk."""
    shape, layers = shape_of(spec), TorchLayers(dtype, dtype)
    order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(2)).tolist()
    first, second = Conversation(order[:10]), Conversation(order[10:20])
    arenas, logits = new_arenas(shape, dtype), []
    steps = [
        [(first, TOKENS[:21]), (second, TOKENS[21:26])],
        [(first, TOKENS[26:27]), (second, TOKENS[27:28])],
        [(first, TOKENS[28:29]), (second, TOKENS[29:48])],
    ]
    for pads, step in enumerate(steps):
        inputs = step_inputs(spec, step, pads, arenas)
        form: Any = NativeForm(layers, shape.geometry, inputs)
        if plugins:
            insert = TorchPlugins(layers, shape)
            form = PluginForm(None, insert, inputs)  # type: ignore[arg-type]
        outputs = run_decoder(layers, spec, weights, inputs, form)
        if plugins:
            assert insert.calls == [(name, i) for i in range(spec.num_layers) for name in ("append", "attend")]
        logits.append(outputs["logits"])
        arenas = {name: outputs[f"{name}_out"] for name in arenas}
    return logits


TOKENS = [(7 * i * i + 3 * i + 11) % 256 for i in range(48)]


def expected_logits(
    spec: ModelSpec, weights: dict[str, torch.Tensor], dtype: str, run_decoder: Any
) -> list[torch.Tensor]:
    decoder = TorchDecoder(spec, weights, dtype)
    first = run_decoder(decoder, [*TOKENS[:21], TOKENS[26], TOKENS[28]])
    second = run_decoder(decoder, [*TOKENS[21:26], TOKENS[27], *TOKENS[29:48]])
    return [
        torch.cat((first[:21], second[:5])), torch.cat((first[21:22], second[5:6])),
        torch.cat((first[22:], second[6:])),
    ]  # fmt: skip


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", SPECS)
def test_native_form_equals_the_torch_lowering(family: str, run_decoder: Any) -> None:
    spec = SPECS[family]
    weights = random_weights(spec)
    expected = expected_logits(spec, weights, "fp32", run_decoder)
    for got, want in zip(run_conversation(spec, weights, torch.float32), expected, strict=True):
        assert relative_error(got, want) < 1e-4


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_kinds(rope: str, run_decoder: Any) -> None:
    spec = dataclasses.replace(SPECS["llama"], rope=ROPES[rope])
    weights = random_weights(spec)
    expected = expected_logits(spec, weights, "fp32", run_decoder)
    got = run_conversation(spec, weights, torch.float32)
    assert max(relative_error(g, w) for g, w in zip(got, expected, strict=True)) < 1e-4
    other = dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, theta=9000.0))
    assert relative_error(run_conversation(other, weights, torch.float32)[0], expected[0]) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16(family: str, run_decoder: Any) -> None:
    """The same roundings in the same places, apart from those of the CPU's own products."""
    spec = SPECS[family]
    weights = {name: w.bfloat16().float() for name, w in random_weights(spec).items()}
    expected = expected_logits(spec, weights, "fp32", run_decoder)
    for got, want in zip(run_conversation(spec, weights, torch.bfloat16), expected, strict=True):
        assert relative_error(got, want) < 3e-2


def test_plugin_form_hands_over_what_the_hook_promises() -> None:
    spec = SPECS["qwen2"]
    weights = random_weights(spec)
    native = run_conversation(spec, weights, torch.float32)
    plugins = run_conversation(spec, weights, torch.float32, plugins=True)
    assert all(torch.equal(a, b) for a, b in zip(native, plugins, strict=True))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_network_has_the_interface(dtype: str, rtx: Any) -> None:
    shape = shape_of(SPECS["qwen3"], dtype)
    builder = rtx.Builder(rtx.Logger(rtx.Logger.ERROR))
    network = builder.create_network(1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    layers = build_network(rtx, network, shape, random_weights(shape.spec))
    interface = shape.interface
    types = {
        "int32": rtx.int32, "bool": rtx.bool, "fp16": rtx.float16, "bf16": rtx.bfloat16, "fp32": rtx.float32,
    }  # fmt: skip
    for bindings, count, get in (
        (interface.inputs, network.num_inputs, network.get_input),
        (interface.outputs, network.num_outputs, network.get_output),
    ):
        assert count == len(bindings)
        for i, binding in enumerate(bindings):
            tensor = get(i)
            assert (tensor.name, tensor.dtype) == (binding.name, types[binding.dtype])
            assert tuple(tensor.shape) == interface.network_shape(binding)
    layers.release()


def family_options(family: str) -> tuple[str, ...]:
    """An SM and a dtype for each, so that several of both are built."""
    return {
        "llama": ("--sm", "120"),
        "mistral": ("--sm", "86"),
        "qwen2": ("--sm", "89", "--dtype", "fp16", "--policy", "quantize-int8"),
        "qwen3": ("--sm", "80", "--policy", "full"),
    }[family]


@pytest.mark.parametrize("family", SPECS)
def test_builds_every_family(family: str, save_tiny: Any, tmp_path: Path, rtx: Any) -> None:
    directory, _ = save_tiny(family, num_hidden_layers=2, tie_word_embeddings=family != "qwen3")
    output = tmp_path / "engine"
    options = ("--max-seq-len", "128", "--max-batch-size", "2", "--max-step-tokens", "32", *family_options(family))
    assert build.main(["--model", str(directory), "--output", str(output), "--target", "trt-rtx", *options]) == 0
    sm = int(options[options.index("--sm") + 1])
    record = manifest.load(output, target="trt-rtx", sm=sm)
    assert record.trt is not None and record.trt.form == "native" and record.trt.version == rtx.__version__
    assert record.limits.dtype == ("fp16" if family == "qwen2" else "bf16")
    assert sorted(p.name for p in output.iterdir()) == [manifest.PLAN_FILE, manifest.MANIFEST_FILE, "tokenizer.json"]
    weights = sum(r.is_norm * 2 * torch.Size(r.shape).numel() for r in weight_recipes(record.model))
    weights += sum(2 * torch.Size(r.shape).numel() for r in weight_recipes(record.model))
    assert (output / manifest.PLAN_FILE).stat().st_size > weights
    interface = make_interface(record.model, record.limits, record.trt.step)
    assert record.trt.interface_sha256 == interface.sha256()


@pytest.mark.slow
def test_builds_smollm2(tmp_path: Path, rtx: Any) -> None:
    output = tmp_path / "engine"
    assert build.main(["--target", "trt-rtx", "--sm", "120", "--output", str(output)]) == 0
    record = manifest.load(output, target="trt-rtx", sm=120)
    assert record.model.num_layers == 30
    assert 250e6 < (output / manifest.PLAN_FILE).stat().st_size < 400e6
    assert (output / manifest.CHAT_TEMPLATE_FILE).is_file()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "dtype: got fp32, expected fp16 or bf16"),
        ({"kv_dtype": "fp32"}, "kv_dtype: got fp32 with dtype bf16, expected the same"),
        ({"kv_dtype": "fp16"}, "kv_dtype: got fp16"),
        ({"weight_dtype": "int8"}, "weight_dtype: got int8"),
    ],
)
def test_refused_limits(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_limits(EngineLimits(**changes))


@pytest.mark.parametrize(
    ("limits", "rows", "reason"),
    [
        (EngineLimits(max_batch_size=64), 1024, "numbers for rows by page tokens"),
        (EngineLimits(max_batch_size=16), 8, "max_step_tokens: got 8, expected at least max_batch_size"),
    ],
)
def test_limits_too_large_for_31_bits(limits: EngineLimits, rows: int, reason: str) -> None:
    spec = dataclasses.replace(SPECS["llama"], num_layers=30)
    with pytest.raises(ConfigError, match=reason):
        native_shape(spec, limits, rows)


def test_tables_too_large_for_31_bits() -> None:
    spec = dataclasses.replace(SPECS["llama"], num_layers=400)
    limits = EngineLimits(max_batch_size=256, max_seq_len=1 << 20)
    with pytest.raises(ConfigError, match=r"input block_ids may take .* \(31 bits\); lower --max-batch-size"):
        make_interface(spec, limits, StepLimits(256, "int4", 1))


def interface_of(**changes: Any) -> EngineInterface:
    shape = shape_of(SPECS["llama"])
    return dataclasses.replace(shape, limits=dataclasses.replace(shape.limits, **changes)).interface


def test_interface_counts_what_a_full_batch_needs() -> None:
    interface = interface_of()
    for binding in interface.inputs:
        least, typical, most = interface.profile(binding)
        assert all(1 <= a <= b <= c for a, b, c in zip(least, typical, most, strict=True))
    # Four conversations of 128 tokens in pages of 8, and two heads' blocks of 16 entries.
    assert interface.dim("P").most >= 4 * 16 and interface.dim("B").most >= 4 * 2 * 8
    slots = interface.dim("pages").most * PAGE
    assert slots < 2**31
    aliased = {b.aliases for b in interface.outputs if b.aliases}
    assert aliased == {"pages_0", "pages_1", "seen_0", "seen_1", "score"}


def test_interface_hash_tells_engines_apart() -> None:
    hashes = {
        interface_of(**c).sha256()
        for c in ({}, {"max_batch_size": 5}, {"page_tokens": 16}, {"dtype": "fp16", "kv_dtype": "fp16"})
    }
    assert len(hashes) == 4 and interface_of().sha256() in hashes


@pytest.mark.parametrize("sm", [75, 90, 100, 12])
def test_rtx_refuses_other_sms(sm: int) -> None:
    with pytest.raises(ConfigError, match=rf"sm: got {sm}, expected one of 80, .* TensorRT-RTX builds for RTX cards"):
        trt_api.load_builder("trt-rtx", sm)


def fake_module(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "tensorrt", raising=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('libnvinfer.so.11: cannot open')", r"installed but broken \(libnvinfer.so.11"),
        ("import no_such_library", r"cannot be loaded \(No module named 'no_such_library'\)"),
        ("__version__ = '10.13.2'", "11.x is needed, version 10.13.2 is installed"),
        ("raise ModuleNotFoundError('gone', name='tensorrt')", "is not installed; looked in "),
    ],
)
def test_missing_tensorrt_is_named(text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(tmp_path, text, monkeypatch)
    with pytest.raises(DeviceError, match=reason) as caught:
        trt_api.load_builder("trt", 90)
    message = str(caught.value)
    assert "tensorrt-cu13" in message and "pip install" in message and "site-packages" in message
