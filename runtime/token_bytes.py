"""What each token of a `tokenizers` tokenizer adds to a text, in bytes: a token may end inside a character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from runtime.errors import RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """By token id; b"" for special tokens and for ids that are not used.

    Read off the vocabulary, as the two usual decoders do it (byte-level, and SentencePiece's), and compared with what
    the tokenizer itself decodes. Raises RequestError for any other kind, or where the two differ.
    """
    kinds = set(_decoder_kinds(json.loads(tokenizer.to_str())["decoder"]))
    byte_of = _bytes_of_characters()
    added = tokenizer.get_added_tokens_decoder()
    found = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id in added and added[token_id].special:
            continue
        if "ByteLevel" in kinds:
            found[token_id] = _from_byte_level(token, byte_of)
        elif kinds & {"ByteFallback", "Metaspace"}:
            found[token_id] = _from_sentencepiece(token, "ByteFallback" in kinds)
        else:
            raise _unknown_kind()
    _compare(tokenizer, found)
    return found


def _from_byte_level(token: str, byte_of: dict[str, int]) -> bytes:
    if all(char in byte_of for char in token):
        return bytes(byte_of[char] for char in token)
    return token.encode("utf-8")  # an added token, kept as it is


def _from_sentencepiece(token: str, has_bytes: bool) -> bytes:
    single = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
    return bytes([int(single[1], 16)]) if single else token.replace("\u2581", " ").encode("utf-8")


def _compare(tokenizer: tokenizers.Tokenizer, found: list[bytes]) -> None:
    """A text's first blank may be stripped, and a part of a character alone decodes to a replacement mark."""
    decoded = tokenizer.decode_batch([[token_id] for token_id in range(len(found))], skip_special_tokens=True)
    for piece, text in zip(found, decoded, strict=True):
        try:
            expected = piece.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text not in (expected, expected.removeprefix(" ")):
            raise _unknown_kind()


def _decoder_kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _decoder_kinds(part)


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's byte-level alphabet (openai/gpt-2, encoder.py): printable bytes stand for themselves, the others for
    the characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _unknown_kind() -> RequestError:
    return RequestError(
        "bad words: got some for a model whose tokenizer does not tell the text of single tokens, expected a "
        "byte-level or SentencePiece tokenizer; leave them out, or check the answer yourself"
    )
