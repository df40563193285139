"""Lets test modules import the helpers beside them, and keeps waiting threads from burning a shared machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from builder.weights.checkpoint import Checkpoint

# Read by OpenMP when torch is first imported, so it has to be here: a waiting thread sleeps soon instead of spinning
# on a core that another process needs.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

for folder in ("runtime", "plugins", "builder", "perf", "triton"):
    sys.path.append(str(Path(__file__).parent / folder))


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """SmolLM2-135M-Instruct as the default build reads it."""
    from builder import build
    from builder.default_model import default_gguf
    from builder.weights.gguf_file import read_gguf

    return read_gguf(default_gguf(build.ROOT / "models"))


@pytest.fixture(scope="session")
def reference(checkpoint: Checkpoint) -> Any:
    """transformers' Llama with the same dequantized weights, unfused and by their own names."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from builder.model import weight_recipes

    spec = checkpoint.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_q_heads,
        num_key_value_heads=spec.num_kv_heads, max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.rms_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta}, attn_implementation="eager",
    )  # fmt: skip
    names = [name for recipe in weight_recipes(spec) for name, _ in recipe.sources]
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict({name: checkpoint.tensors.read(name) for name in names}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="session")
def tiny_engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `tiny_engine`."""
    from tiny_engine import build_tiny_engine

    return build_tiny_engine(tmp_path_factory)
