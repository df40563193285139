"""A tiny engine with random weights, for tests that need a real one and no sense in its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from builder.build import main as build

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_SEQ_LEN = 4096
END_TOKEN_ID = 257


def _save_tokenizer(directory: Path) -> None:
    """Byte-level, one token per byte; the two ChatML marks are the last two ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "add_bos_token": False,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def save_tiny_model(directory: Path, family: str = "llama", head_dim: int = 16) -> Any:
    """Saves and returns a model of 2 layers and 258 tokens; its end token has no logit above the rest."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        family, vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=MAX_SEQ_LEN, tie_word_embeddings=False,
        bos_token_id=256, eos_token_id=END_TOKEN_ID, sliding_window=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
        model.lm_head.weight[256:] = 0.0
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    return model.eval()


def build_tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama of 2 layers and 258 tokens. Its end token has no logit above the rest: answers run to max_tokens."""
    model_dir = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(model_dir)
    output = tmp_path_factory.mktemp("tiny") / "engine"
    assert build(["--model", str(model_dir), "--output", str(output), "--dtype", "fp32"]) == 0
    return output
