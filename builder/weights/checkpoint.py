"""What every reader of model files returns, and the checks that they share."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from tokenizers import Tokenizer

from runtime.config import ModelSpec
from runtime.errors import CheckpointError

MAX_LAYERS = 10_000
MAX_SIZE = 1 << 30

Kind = Literal["gguf", "huggingface", "tensorrt_llm"]


class TensorSource(Protocol):
    """Unfused weights by Hugging Face name, read one at a time so that a model need not fit in memory twice."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor as `read` gives it, or None when the checkpoint has no such tensor."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in fp32, bf16 or fp16; raises CheckpointError when the file is damaged."""
        ...


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer_json: `tokenizers` form. bos_token, eos_token: '' where there is none.

    add_bos: a raw prompt starts with the bos token. eos_token_ids: what the tokenizer's own files say.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_token: str
    eos_token: str
    add_bos: bool
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model to build from.

    sliding_window: the model's attention reaches only so far back; engines up to that length are exact.
    files: every file that was read; they make the source's hash.
    """

    spec: ModelSpec
    kind: Kind
    tensors: TensorSource
    tokenizer: TokenizerFiles
    files: tuple[Path, ...]
    sliding_window: int | None = None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or CheckpointError."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; copy the complete model directory") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}), expected JSON; fetch the file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: got {type(data).__name__}, expected a JSON object; fetch the file again")
    return data


def parse_tokenizer(text: str, where: Path) -> Tokenizer:
    """A `tokenizers` tokenizer from its JSON, or CheckpointError."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{where}: damaged tokenizer ({error}), expected the `tokenizers` JSON form; fetch the file again"
        ) from error


def check_shape_rules(spec: ModelSpec, where: Path) -> None:
    """Relations between sizes that every family keeps."""
    sizes = {
        "layers": spec.num_layers,
        "hidden size": spec.hidden_size,
        "ffn size": spec.ffn_size,
        "query heads": spec.num_q_heads,
        "KV heads": spec.num_kv_heads,
        "head size": spec.head_dim,
        "vocabulary": spec.vocab_size,
        "positions": spec.max_positions,
    }
    for name, value in sizes.items():
        most = MAX_LAYERS if name == "layers" else MAX_SIZE
        if not 1 <= value <= most:
            raise CheckpointError(f"{where}: {name} is {value}, expected 1 to {most:,}; the configuration is damaged")
    rope = spec.rope
    factors = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.beta_fast, rope.beta_slow)
    numbers = {"rms epsilon": spec.rms_eps, "rope theta": rope.theta, "rope attention factor": rope.attention_factor}
    for name, number in (*numbers.items(), *(("rope factor", factor) for factor in factors)):
        if not 0 < number < math.inf:
            raise CheckpointError(
                f"{where}: {name} is {number}, expected a finite number above 0; the configuration is damaged"
            )
    if spec.num_q_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{where}: {spec.num_q_heads} query heads over {spec.num_kv_heads} KV heads, expected a multiple; "
            f"the configuration is damaged"
        )
    if spec.head_dim % 8:
        raise CheckpointError(
            f"{where}: head size {spec.head_dim}, expected a multiple of 8 so that rows of the cache stay 16-byte "
            f"aligned; this model is not supported"
        )
