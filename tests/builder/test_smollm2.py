"""The default model from its GGUF file: logits against transformers, tokenizer against known facts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from builder import build
from builder.lower_torch import TORCH_DTYPE, TorchDecoder, load_decoder
from builder.model import weight_recipes
from builder.weights.checkpoint import Checkpoint
from runtime import manifest
from runtime.chat_format import ChatFormat

TEXT = (
    "The quick brown fox jumps over the lazy dog, and in 2024 it paid 1,375 euros for a new umbrella. "
    "def add(a, b):\n    return a + b\n\nParis is the capital of France; Berlin is the capital of"
)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)


def decoder_of(checkpoint: Checkpoint, dtype: str) -> TorchDecoder:
    weights = {
        recipe.name: torch.cat([checkpoint.tensors.read(name) for name, _ in recipe.sources])
        for recipe in weight_recipes(checkpoint.spec)
    }
    return TorchDecoder(checkpoint.spec, weights, dtype)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_logits_agree_with_transformers(
    checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Any, run_decoder: Any, dtype: str, bound: float
) -> None:
    tokens = tokenizer.encode(TEXT).ids
    assert len(tokens) > 50
    decoder = decoder_of(checkpoint, dtype)
    model = reference
    if dtype == "bf16":  # the same rounded weights, computed in fp32
        model = copy.deepcopy(reference)
        rounded = {name: weight.to(TORCH_DTYPE[dtype]).float() for name, weight in model.state_dict().items()}
        model.load_state_dict(rounded)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    for pieces in (None, (20, 1, 1, len(tokens) - 22)):
        got = run_decoder(decoder, tokens, pieces)
        assert float((got - expected).norm() / expected.norm()) < bound
    assert tokenizer.decode([int(expected[-1].argmax())]) == tokenizer.decode([int(got[-1].argmax())])


def test_built_engine_loads_and_answers(tmp_path: Path, tokenizer: Tokenizer, new_kv: Any) -> None:
    output = tmp_path / "engine"
    assert build.main(["--output", str(output), "--dtype", "bf16", "--max-seq-len", "512"]) == 0
    record = manifest.load(output, target="cpu")
    assert record.model.eos_token_ids == (2,) and record.end_tokens == ("<|im_end|>",)
    template = (output / manifest.CHAT_TEMPLATE_FILE).read_text()
    form = ChatFormat(template, record.tokens.bos_token, record.tokens.eos_token, record.end_tokens)
    turn = form.first_turn(None, "What is the capital of France? Answer with one word.")
    decoder = load_decoder(output / manifest.WEIGHTS_FILE, record.model, record.limits.dtype)
    tokens = tokenizer.encode(turn.text, add_special_tokens=False).ids
    kv, answer, start = new_kv(), [], 0
    while not answer or (answer[-1] not in record.model.eos_token_ids and len(answer) < 20):
        rows = torch.tensor(tokens[start:] + answer[-1:])
        positions = torch.arange(start, start + len(rows))
        logits = decoder.forward(rows, positions, kv, torch.tensor([len(rows) - 1]))
        start += len(rows)
        answer.append(int(logits.argmax()))
    assert "Paris" in tokenizer.decode(answer)


def test_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a2024 + 17").tokens == ["a", "2", "0", "2", "4", "Ġ+", "Ġ", "1", "7"]


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n"
    assert tokenizer.encode(text).tokens == ["<|im_start|>", "user", "Ċ", "Hello", "<|im_end|>", "Ċ"]
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, 2]
    assert tokenizer.decode([1, 0, 2]) == ""
    assert tokenizer.get_vocab_size() == 49152


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        ("don't  stop", ["don", "'t", "Ġ", "Ġstop"]),
        ("def f(x):\n    return x", ["def", "Ġf", "(", "x", "):", "ĊĠĠĠ", "Ġreturn", "Ġx"]),
    ],
)
def test_known_splits(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens


# The vocabulary lacks these bytes: six control characters and lead bytes of planes that hold no scripts.
LACKING = b"\x04\x06\x13\x14\x16\x1d\xc0\xc1\xf1\xf2\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff"


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assume(not set(text.encode()) & set(LACKING))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_rebuilt_tokenizer_alike(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """What we wrote means the same to the library that most users come from."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "<|im_start|>system\n你好 🦊 naïve — 42%<|im_end|>\n"
    assert fast(text)["input_ids"] == tokenizer.encode(text).ids
    assert json.loads(checkpoint.tokenizer.tokenizer_json)["model"]["type"] == "BPE"
