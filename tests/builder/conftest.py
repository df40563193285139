"""A plain contiguous cache behind the decoder, and tiny checkpoints to build from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from builder.rope import rotate


class ContiguousKv:
    """`KvStep` of one sequence that keeps everything; plain softmax attention in fp32."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Any) -> torch.Tensor:
        k = rotate(k, rotary)
        self.keys[layer] = torch.cat((self.keys[layer], k)) if layer in self.keys else k
        self.values[layer] = torch.cat((self.values[layer], v)) if layer in self.values else v
        return rotate(q, rotary)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        keys, values = self.keys[layer].float(), self.values[layer].float()
        rows, total = q.shape[0], keys.shape[0]
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        logits = torch.einsum("rhd,thd->hrt", q.float(), keys) * q.shape[2] ** -0.5
        hidden = torch.arange(total) > torch.arange(total - rows, total).unsqueeze(1)
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hrt,thd->rhd", weights, values).to(q.dtype)


@pytest.fixture
def new_kv() -> Callable[[], ContiguousKv]:
    return ContiguousKv


@pytest.fixture
def run_decoder(new_kv: Callable[[], ContiguousKv]) -> Callable[..., torch.Tensor]:
    """All logits of one sequence, fed in pieces of the given sizes."""

    def run(decoder: Any, tokens: list[int], pieces: tuple[int, ...] | None = None) -> torch.Tensor:
        kv, start, logits = new_kv(), 0, []
        for size in pieces or (len(tokens),):
            rows = slice(start, start + size)
            ids, positions = torch.tensor(tokens[rows]), torch.arange(start, start + size)
            logits.append(decoder.forward(ids, positions, kv, torch.arange(size)))
            start += size
        assert start == len(tokens)
        return torch.cat(logits)

    return run


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level, one token per byte, `<s>` and `</s>` as the last two ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) + 2 <= vocab_size
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Save a random model of a family with `save_pretrained`; returns its directory and the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def save(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Path, Any]:
        settings = {
            "vocab_size": 300, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257, "sliding_window": None,
        } | changes  # fmt: skip
        torch.manual_seed(7)
        config = AutoConfig.for_model(family, **settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # Larger than the usual 0.02, so that attention is far from uniform and errors would show.
                torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3 if "bias" in name else 0.12)
        model = model.to(dtype).eval()
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        tiny_tokenizer(settings["vocab_size"]).save(str(directory / "tokenizer.json"))
        return directory, model

    return save
