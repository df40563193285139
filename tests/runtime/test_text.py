"""Pieces of text hold whole characters only, wherever tokens end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.bad_words import BadWords
from runtime.text import EngineTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> EngineTokenizer:
    """One token per byte."""
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_end|>"])
    made.save(str(path))
    return EngineTokenizer(path, ("<|im_end|>",), None)


@given(text=st.text(max_size=20))
def test_pieces_are_whole_characters_and_lose_none(tokenizer: EngineTokenizer, text: str) -> None:
    stream = tokenizer.stream()
    ids, _ = tokenizer.encode(text, (0, len(text)))
    pieces = [stream.step(token_id) for token_id in ids]
    assert "".join(piece or "" for piece in pieces) == text
    assert len(ids) == len(text.encode())


def test_a_character_that_never_ends_is_not_sent(tokenizer: EngineTokenizer) -> None:
    ids, _ = tokenizer.encode("a\U0001f600")
    stream = tokenizer.stream()
    assert [stream.step(token_id) for token_id in ids[:4]] == ["a", None, None, None]
    assert stream.step(ids[4]) == "\U0001f600"


def test_token_texts_are_made_once(tokenizer: EngineTokenizer) -> None:
    texts = tokenizer.token_texts()
    assert texts is tokenizer.token_texts()
    bad = BadWords(["\u00e9"], texts)
    first, second = tokenizer.encode("\u00e9")[0]
    assert bad.forbidden() == ()
    bad.push(first)
    assert bad.forbidden() == (second,)
