"""The engine's own weights in transformers, for comparisons in speed and in quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from builder.lower_torch import TORCH_DTYPE
from builder.model import weight_recipes
from builder.weights.safetensors_files import open_file
from runtime import manifest as manifests
from runtime.config import ModelSpec
from runtime.errors import CommitKVError


class PeerMissingError(CommitKVError):
    """A peer cannot run here; the text says why and what would help."""


@dataclass(frozen=True)
class PeerModel:
    """What the peers need to know of the engine they are set beside."""

    engine_dir: Path
    spec: ModelSpec
    dtype: str
    tokens: Sequence[int]
    num_threads: int


def transformers_model(model: PeerModel) -> Any:
    """transformers' Llama with the engine's own weights, in the engine's dtype. Raises PeerMissingError."""
    spec = model.spec
    if spec.family != "llama" or spec.rope.kind != "default" or spec.qkv_bias:
        raise PeerMissingError(f"transformers: no peer for a {spec.family} model with {spec.rope.kind} rope")
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise PeerMissingError(f"transformers: not installed ({error}); run make setup") from error
    settings: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_q_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
        "attn_implementation": "sdpa",
    }
    file = open_file(model.engine_dir / manifests.WEIGHTS_FILE)
    state: dict[str, torch.Tensor] = {}
    for recipe in weight_recipes(spec):
        parts = file.get_tensor(recipe.name).split([shape[0] for _, shape in recipe.sources])
        state.update((name, part) for (name, _), part in zip(recipe.sources, parts, strict=True))
    decoder: Any = LlamaForCausalLM(LlamaConfig(**settings))
    decoder = decoder.to(TORCH_DTYPE[model.dtype])
    missing, unexpected = decoder.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    decoder.tie_weights()
    return decoder.eval()
