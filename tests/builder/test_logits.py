"""Logits against transformers on the same weights: every family and rope form, fp32 and bf16, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from builder import build
from builder.lower_torch import load_decoder
from plugins.linear.params import Int8Weight
from runtime import manifest
from runtime.manifest import WEIGHTS_FILE

TOKENS = [(7 * i * i + 3 * i + 11) % 256 for i in range(90)]

_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500000.0,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_YARN_TUNED = _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-yarn-tuned": ("llama", {"rope_parameters": _YARN_TUNED}),
    "mistral": ("mistral", {}),
    "mistral-wide-window": ("mistral", {"sliding_window": 4096}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}  # fmt: skip


def build_engine(model: Path, output: Path, *options: str) -> Any:
    """Run the command line and load what it built."""
    assert build.main(["--model", str(model), "--output", str(output), *options]) == 0
    record = manifest.load(output, target="cpu")
    return load_decoder(output / WEIGHTS_FILE, record.model, record.limits.dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES)
def test_tiny_family_fp32(case: str, save_tiny: Any, run_decoder: Any, tmp_path: Path) -> None:
    family, changes = CASES[case]
    directory, model = save_tiny(family, **changes)
    decoder = build_engine(directory, tmp_path / "engine", "--dtype", "fp32")
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.1
    whole = run_decoder(decoder, TOKENS)
    assert relative_error(whole, expected) < 1e-4
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()
    pieces = run_decoder(decoder, TOKENS, (1, 40, 1, 1, 47))
    assert relative_error(pieces, expected) < 1e-4


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "llama-yarn", "llama-tied"])
def test_tiny_family_bf16(case: str, save_tiny: Any, run_decoder: Any, tmp_path: Path) -> None:
    family, changes = CASES[case]
    directory, model = save_tiny(family, torch.bfloat16, **changes)
    decoder = build_engine(directory, tmp_path / "engine", "--dtype", "bf16")
    with torch.inference_mode():
        # The same bf16 weights computed in fp32: transformers' own bf16 rounding would hide ours.
        expected = model.float()(torch.tensor([TOKENS])).logits[0]
    assert relative_error(run_decoder(decoder, TOKENS), expected) < 2e-2
    assert relative_error(run_decoder(decoder, TOKENS, (30, 1, 1, 58)), expected) < 2e-2


def test_a_wrong_rope_would_show(save_tiny: Any, run_decoder: Any, tmp_path: Path) -> None:
    """The bound is sharp enough to tell rope forms apart."""
    directory, _ = save_tiny("llama", rope_parameters=_LLAMA3)
    decoder = build_engine(directory, tmp_path / "engine", "--dtype", "fp32")
    good = run_decoder(decoder, TOKENS)
    decoder.frequencies = decoder.frequencies * 1.01
    assert relative_error(run_decoder(decoder, TOKENS), good) > 1e-3


def test_interruption_and_wanted_rows(save_tiny: Any, new_kv: Callable[[], Any], tmp_path: Path) -> None:
    directory, _ = save_tiny("llama")
    decoder = build_engine(directory, tmp_path / "engine", "--dtype", "fp32")
    ids, positions = torch.tensor(TOKENS[:9]), torch.arange(9)
    every = decoder.forward(ids, positions, new_kv(), torch.arange(9))
    some = decoder.forward(ids, positions, new_kv(), torch.tensor([8, 2]))
    torch.testing.assert_close(some, every[[8, 2]])
    assert decoder.forward(ids, positions, new_kv(), torch.empty(0, dtype=torch.int64)).shape == (0, 300)
    asked: list[int] = []

    def after_two_layers() -> bool:
        asked.append(1)
        return len(asked) == 11  # four products and one attention in each

    kv = new_kv()
    assert decoder.forward(ids, positions, kv, torch.arange(9), after_two_layers) is None
    assert sorted(kv.keys) == [0, 1]


@pytest.mark.parametrize("case", ["llama-tied", "qwen2", "qwen3"])
def test_int8_weights_are_the_nearest_codes(case: str, save_tiny: Any, run_decoder: Any, tmp_path: Path) -> None:
    family, changes = CASES[case]
    directory, model = save_tiny(family, **changes)
    decoder = build_engine(directory, tmp_path / "engine", "--dtype", "fp32", "--weight-dtype", "int8")
    with torch.inference_mode():
        exact = model(torch.tensor([TOKENS])).logits[0]
        for parameter in (p for p in model.parameters() if p.dim() == 2):
            parameter.copy_(Int8Weight.of(parameter).dequantized(torch.float32))
        expected = model(torch.tensor([TOKENS])).logits[0]
    got = run_decoder(decoder, TOKENS)
    assert relative_error(got, expected) < 1e-4
    assert 1e-4 < relative_error(got, exact) < 6e-2
