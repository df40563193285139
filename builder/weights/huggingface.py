"""Read a Hugging Face model directory: config.json, safetensors, tokenizer.json and what belongs to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.weights.checkpoint import Checkpoint, TokenizerFiles, parse_tokenizer, read_json
from builder.weights.hf_config import parse_config, sliding_window, token_ids
from builder.weights.safetensors_files import open_directory
from runtime.errors import CheckpointError

_TOKENIZER_PARTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def read_huggingface(directory: Path, tokenizer: TokenizerFiles | None = None) -> Checkpoint:
    """A checkpoint from `directory`; `tokenizer` replaces its own. Raises CheckpointError."""
    config_path = directory / "config.json"
    config = read_json(config_path)
    spec = parse_config(config, config_path, token_ids(config.get("eos_token_id")))
    tensors, weight_files = open_directory(directory)
    parts = [directory / name for name in _TOKENIZER_PARTS if (directory / name).is_file()]
    return Checkpoint(
        spec=spec,
        kind="huggingface",
        tensors=tensors,
        tokenizer=tokenizer or read_tokenizer(directory),
        files=(config_path, *weight_files, *parts),
        sliding_window=sliding_window(config),
    )


def read_tokenizer(directory: Path) -> TokenizerFiles:
    """Tokenizer and chat template of a Hugging Face directory."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, expected the `tokenizers` form; save it with "
            f"transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...) or pass --tokenizer DIR"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: damaged tokenizer ({error}), expected UTF-8; fetch the file again") from error
    tokenizer = parse_tokenizer(text, path)
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    bos = _token_text(config.get("bos_token"))
    eos = _token_text(config.get("eos_token"))
    eos_id = tokenizer.token_to_id(eos) if eos else None
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    ends = (*token_ids(generation.get("eos_token_id")), *(() if eos_id is None else (eos_id,)))
    start = tokenizer.encode("").ids
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=_chat_template(directory, config),
        bos_token=bos,
        eos_token=eos,
        add_bos=bool(bos) and start[:1] == [tokenizer.token_to_id(bos)],
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def _token_text(value: Any) -> str:
    """A token is written as a string, as an object with `content`, or null."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
