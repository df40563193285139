"""The `tokenizers` library behind the engine's `Tokenizer`."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from runtime.bad_words import TokenTexts
from runtime.detokenizer import TokenStream
from runtime.errors import ManifestError
from runtime.token_bytes import token_bytes


class EngineTokenizer:
    """special_tokens: their texts.   bos_token_id: put before raw prompts, or None.

    Raises ManifestError for a file that `tokenizers` cannot read.
    """

    def __init__(self, tokenizer_file: Path, special_tokens: tuple[str, ...], bos_token_id: int | None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
            self._literal = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises bare Exception
            raise ManifestError(
                f"tokenizer: {tokenizer_file} cannot be read ({error}); build the engine again"
            ) from error
        self._literal.encode_special_tokens = True
        self._special_tokens = special_tokens
        self._bos_token_id = bos_token_id
        self._token_texts: TokenTexts | None = None
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, literal: tuple[int, int] | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """See `runtime.detokenizer.Tokenizer`. Without a `literal` range the text is a raw prompt."""
        if literal is None:
            ids, offsets = self._encode(text, 0)
            if self._bos_token_id is not None:
                return [self._bos_token_id, *ids], [(0, 0), *offsets]
            return ids, offsets
        start, end = literal
        if not any(token in text[start:end] for token in self._special_tokens):
            return self._encode(text, 0)
        # A user who writes '<|im_end|>' must not end a message: their text is encoded apart, as letters.
        pieces = (
            self._encode(text[:start], 0),
            self._encode(text[start:end], start, literal=True),
            self._encode(text[end:], end),
        )
        return [i for ids, _ in pieces for i in ids], [span for _, spans in pieces for span in spans]

    def _encode(self, text: str, shift: int, *, literal: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = (self._literal if literal else self._tokenizer).encode(text, add_special_tokens=False)
        return encoding.ids, [(start + shift, end + shift) for start, end in encoding.offsets]

    def stream(self) -> TokenStream:
        return _Stream(self._tokenizer)

    def token_texts(self) -> TokenTexts:
        """See `runtime.detokenizer.Tokenizer`. Made at the first call: a third of a second for 50,000 tokens."""
        if self._token_texts is None:
            self._token_texts = TokenTexts(token_bytes(self._tokenizer))
        return self._token_texts


class _Stream:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token_id: int) -> str | None:
        return self._stream.step(self._tokenizer, token_id)
