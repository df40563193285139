"""Rebuild a `tokenizers` tokenizer from what a GGUF file says about it.

Only byte-level BPE (`tokenizer.ggml.model` = gpt2) carries its merges; for others pass `--tokenizer DIR`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from builder.weights.checkpoint import TokenizerFiles
from runtime.errors import CheckpointError

# Token types of the GGUF specification.
CONTROL, USER_DEFINED = 3, 4

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN = ("smollm", "gpt-2", "qwen2", "llama-bpe")


def rebuild_tokenizer(metadata: Mapping[str, Any], path: Path) -> TokenizerFiles:
    """Tokenizer and chat template of a GGUF file; CheckpointError when this tokenizer cannot be rebuilt exactly."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer model {kind!r}, expected 'gpt2' (byte-level BPE), the one a GGUF file describes "
            f"completely; pass the original tokenizer with --tokenizer DIR"
        )
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    if not tokens or not types or merges is None or len(tokens) != len(types):
        raise CheckpointError(
            f"{path}: tokenizer tokens, types or merges are missing or of different lengths; "
            f"fetch the file again or pass --tokenizer DIR"
        )
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: damaged merges ({error}); fetch the file again or pass --tokenizer DIR"
        ) from error
    tokenizer = Tokenizer(model)
    _set_pre_tokenizer(tokenizer, pre, path)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(tokens, types, CONTROL))
    tokenizer.add_tokens(_added(tokens, types, USER_DEFINED))

    def text_of(key: str) -> str:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else ""

    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=text_of("bos"),
        eos_token=text_of("eos"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _added(tokens: list[str], types: list[int], wanted: int) -> list[AddedToken]:
    special = wanted == CONTROL
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == wanted
    ]


def _set_pre_tokenizer(tokenizer: Tokenizer, pre: str, path: Path) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    elif pre in ("qwen2", "llama-bpe"):
        split = Regex(_QWEN2_SPLIT if pre == "qwen2" else _LLAMA3_SPLIT)
        steps = [pre_tokenizers.Split(split, behavior="isolated", invert=False), bytes_only]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise CheckpointError(
            f"{path}: pre-tokenizer {pre!r}, expected one of {', '.join(_KNOWN)}; "
            f"pass the original tokenizer with --tokenizer DIR"
        )
