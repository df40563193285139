"""Which reader a model path needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from builder.weights.checkpoint import Checkpoint, TokenizerFiles, read_json
from builder.weights.gguf_file import read_gguf
from builder.weights.huggingface import read_huggingface, read_tokenizer
from builder.weights.trtllm import read_trtllm
from runtime.errors import CheckpointError

_GGUF_MAGIC = b"GGUF"
_FORMS = "a .gguf file, a Hugging Face directory or a TensorRT-LLM checkpoint directory"


def read_checkpoint(model: Path, tokenizer_dir: Path | None = None) -> Checkpoint:
    """Open whatever `model` is; `tokenizer_dir` replaces its tokenizer. Raises CheckpointError."""
    if not model.exists():
        raise CheckpointError(f"model: {model} does not exist, expected {_FORMS}; check --model")
    if tokenizer_dir is not None and not tokenizer_dir.is_dir():
        raise CheckpointError(f"tokenizer: {tokenizer_dir} is no directory; pass the folder that holds tokenizer.json")
    tokenizer = None if tokenizer_dir is None else read_tokenizer(tokenizer_dir)
    checkpoint = _read(model, tokenizer)
    spec = checkpoint.spec
    ends = tuple(dict.fromkeys((*spec.eos_token_ids, *checkpoint.tokenizer.eos_token_ids)))
    for token in (*ends, *(() if spec.bos_token_id is None else (spec.bos_token_id,))):
        if not 0 <= token < spec.vocab_size:
            raise CheckpointError(
                f"model: {model} names token {token} as beginning or end, expected an id under {spec.vocab_size}; "
                f"tokenizer and weights do not belong together"
            )
    return replace(checkpoint, spec=replace(spec, eos_token_ids=ends))


def _read(model: Path, tokenizer: TokenizerFiles | None) -> Checkpoint:
    """The reader's answer; a value of a kind that no reader expects is damage, too."""
    try:
        return _read_form(model, tokenizer)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"model: {model} has a value of an unexpected kind in its configuration ({error}), expected {_FORMS}; "
            f"fetch the model again"
        ) from error


def _read_form(model: Path, tokenizer: TokenizerFiles | None) -> Checkpoint:
    if model.is_file():
        with model.open("rb") as stream:
            magic = stream.read(len(_GGUF_MAGIC))
        if magic != _GGUF_MAGIC:
            raise CheckpointError(f"model: {model} starts with {magic!r}, expected {_GGUF_MAGIC!r}; pass {_FORMS}")
        return read_gguf(model, tokenizer)
    if "architecture" in read_json(model / "config.json"):
        return read_trtllm(model, tokenizer)
    return read_huggingface(model, tokenizer)
