"""TensorRT-LLM checkpoints give the engine of the Hugging Face model they were made from, ranks merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from builder import build
from builder.weights.detect import read_checkpoint
from runtime.manifest import WEIGHTS_FILE

ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "QWenForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LAYER = {
    "input_layernorm": ("input_layernorm", None),
    "post_attention_layernorm": ("post_layernorm", None),
    "self_attn.o_proj": ("attention.dense", 1),
    "self_attn.q_norm": ("attention.q_layernorm", None),
    "self_attn.k_norm": ("attention.k_layernorm", None),
    "mlp.gate_proj": ("mlp.fc", 0),
    "mlp.up_proj": ("mlp.gate", 0),
    "mlp.down_proj": ("mlp.proj", 1),
}


def part(weight: torch.Tensor, dim: int | None, rank: int, ranks: int) -> torch.Tensor:
    return weight.clone() if dim is None else weight.chunk(ranks, dim)[rank].clone()


def kv_part(weight: torch.Tensor, heads: int, rank: int, ranks: int) -> torch.Tensor:
    """KV heads are split over ranks, or repeated when there are fewer than ranks."""
    size = weight.shape[0] // heads
    first = rank * heads // ranks
    return weight[first * size : (first + max(1, heads // ranks)) * size]


def convert(hf: Path, family: str, out: Path, ranks: int, parallel_embedding: bool = False) -> Path:
    """What TensorRT-LLM's convert_checkpoint.py writes, in its names and layout."""
    config = json.loads((hf / "config.json").read_text())
    weights = load_file(hf / "model.safetensors")
    for rank in range(ranks):
        made: dict[str, torch.Tensor] = {}
        made["transformer.vocab_embedding.weight"] = part(
            weights["model.embed_tokens.weight"], 0 if parallel_embedding else None, rank, ranks
        )
        made["transformer.ln_f.weight"] = weights["model.norm.weight"].clone()
        if "lm_head.weight" in weights:
            made["lm_head.weight"] = part(weights["lm_head.weight"], 0, rank, ranks)
        for layer in range(config["num_hidden_layers"]):
            old, new = f"model.layers.{layer}", f"transformer.layers.{layer}"
            for kind in ("weight", "bias"):
                if f"{old}.self_attn.q_proj.{kind}" in weights:
                    q, k, v = (weights[f"{old}.self_attn.{p}_proj.{kind}"] for p in "qkv")
                    heads = config["num_key_value_heads"]
                    pieces = [part(q, 0, rank, ranks), *(kv_part(w, heads, rank, ranks) for w in (k, v))]
                    made[f"{new}.attention.qkv.{kind}"] = torch.cat(pieces)
            for name, (target, dim) in _LAYER.items():
                if f"{old}.{name}.weight" in weights:
                    made[f"{new}.{target}.weight"] = part(weights[f"{old}.{name}.weight"], dim, rank, ranks)
        out.mkdir(exist_ok=True)
        save_file(made, out / f"rank{rank}.safetensors")
    rope = config["rope_parameters"]
    record = {
        "architecture": ARCHITECTURE[family], "dtype": "float32", "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"], "hidden_size": config["hidden_size"],
        "num_key_value_heads": config["num_key_value_heads"], "intermediate_size": config["intermediate_size"],
        "head_size": config["head_dim"], "vocab_size": config["vocab_size"], "norm_epsilon": config["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox", "max_position_embeddings": config["max_position_embeddings"],
        "hidden_act": "silu", "rotary_base": rope["rope_theta"],
        "rotary_scaling": rope if rope["rope_type"] != "default" else None, "qwen_type": family,
        "use_parallel_embedding": parallel_embedding, "embedding_sharding_dim": 0,
        "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(record))
    return out


def weights_of(model: Path, output: Path, *options: str) -> dict[str, torch.Tensor]:
    assert build.main(["--model", str(model), "--output", str(output), "--dtype", "fp32", *options]) == 0
    return load_file(output / WEIGHTS_FILE)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "parallel"),
    [
        ("llama", {}, 1, False),
        ("llama", {"tie_word_embeddings": True}, 1, False),
        ("llama", {"rope_parameters": _YARN}, 2, True),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128}, 4, False),
        ("mistral", {}, 1, False),
        ("qwen2", {}, 2, False),
        ("qwen3", {}, 1, False),
    ],
)
def test_same_engine(
    family: str, changes: dict[str, Any], ranks: int, parallel: bool, save_tiny: Any, tmp_path: Path
) -> None:
    hf, _ = save_tiny(family, **changes)
    directory = convert(hf, family, tmp_path / "trtllm", ranks, parallel)
    expected = weights_of(hf, tmp_path / "a")
    got = weights_of(directory, tmp_path / "b", "--tokenizer", str(hf))
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name
    specs = [read_checkpoint(hf).spec, read_checkpoint(directory, hf).spec]
    assert specs[0].rope == specs[1].rope and specs[0].max_positions == specs[1].max_positions


def test_logits_of_a_tiny_llama(save_tiny: Any, run_decoder: Any, tmp_path: Path) -> None:
    from builder.lower_torch import load_decoder
    from runtime import manifest

    hf, model = save_tiny("llama")
    directory = convert(hf, "llama", tmp_path / "trtllm", 1)
    weights_of(directory, tmp_path / "engine", "--tokenizer", str(hf))
    record = manifest.load(tmp_path / "engine")
    decoder = load_decoder(tmp_path / "engine" / WEIGHTS_FILE, record.model, "fp32")
    tokens = list(range(40, 90))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert float((run_decoder(decoder, tokens) - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, "quant_algo is 'FP8', expected an unquantized"),
        ({"mapping": {"tp_size": 1, "pp_size": 2}}, "pp_size is 2, expected 1"),
        ({"mapping": {"tp_size": 2, "pp_size": 1}}, r"rank1.safetensors is missing"),
        ({"architecture": "GPTForCausalLM"}, "architecture 'GPTForCausalLM', expected one of"),
        ({"rotary_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"intermediate_size": 64}, "has shape"),
        ({"moe": {"num_experts": 8}}, "expected a dense model"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str, save_tiny: Any, tmp_path: Path, capsys: Any) -> None:
    import re

    hf, _ = save_tiny("llama")
    directory = convert(hf, "llama", tmp_path / "trtllm", 1)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    output = tmp_path / "engine"
    assert build.main(["--model", str(directory), "--tokenizer", str(hf), "--output", str(output)]) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not output.exists()


def test_tokenizer_is_needed(save_tiny: Any, tmp_path: Path, capsys: Any) -> None:
    hf, _ = save_tiny("llama")
    directory = convert(hf, "llama", tmp_path / "trtllm", 1)
    assert build.main(["--model", str(directory), "--output", str(tmp_path / "engine")]) == 2
    assert "--tokenizer DIR" in capsys.readouterr().err
    shutil.copy(hf / "tokenizer.json", directory)
    assert build.main(["--model", str(directory), "--output", str(tmp_path / "engine")]) == 0
