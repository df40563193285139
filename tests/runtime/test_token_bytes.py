"""What a token adds to a text, against what the tokenizer itself decodes."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from runtime.errors import RequestError
from runtime.token_bytes import token_bytes


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = [("h", "e"), ("\u0120", "w"), ("\u00c3", "\u00a9")]  # "he", " w", and a whole character of two bytes
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.add_tokens(["<tool>", "\u4f60"])
    return made


def sentencepiece() -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "e", "\u2581he", "\u4f60"]
    made = Tokenizer(models.BPE(
        vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
    ))  # fmt: skip
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    made.add_special_tokens(["<unk>", "</s>"])
    return made


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_pieces_of_any_tokens_are_their_text(make) -> None:
    tokenizer = make()
    pieces = token_bytes(tokenizer)
    choose = random.Random(5)
    for _ in range(200):
        ids = [choose.randrange(len(pieces)) for _ in range(choose.randrange(1, 12))]
        text = b"".join(pieces[i] for i in ids)
        try:
            expected = text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode(ids, skip_special_tokens=True) in (expected, expected.removeprefix(" "))


def test_special_tokens_add_nothing_and_added_ones_their_text() -> None:
    tokenizer = byte_level()
    pieces = token_bytes(tokenizer)
    assert pieces[tokenizer.token_to_id("<|end|>")] == b""
    assert pieces[tokenizer.token_to_id("<tool>")] == b"<tool>"
    assert pieces[tokenizer.token_to_id("\u4f60")] == "\u4f60".encode()
    assert pieces[tokenizer.token_to_id("\u0120w")] == b" w"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder()])
def test_other_kinds_are_refused(decoder) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(RequestError, match=r"bad words: .* expected a byte-level or SentencePiece tokenizer"):
        token_bytes(tokenizer)


def test_a_decoder_that_changes_text_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("h", "H")])
    with pytest.raises(RequestError, match="bad words"):
        token_bytes(tokenizer)


def test_the_real_models_tokenizer(checkpoint) -> None:
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
    pieces = token_bytes(tokenizer)
    text = "Na\u00efve caf\u00e9s sell \u4f60\u597d \U0001f600 for 42 \u20ac."
    assert b"".join(pieces[i] for i in tokenizer.encode(text).ids).decode() == text
    assert pieces[tokenizer.token_to_id("<|im_end|>")] == b""
