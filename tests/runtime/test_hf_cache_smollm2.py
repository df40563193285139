"""`CommitKVCache` on SmolLM2-135M: `full` gives DynamicCache's text, `commitkv` the engine's, and memory goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedTokenizerFast

from builder.build import main as build
from perf.workload import CONVERSATIONS
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.hf_cache import CommitKVCache
from runtime.request import Request, SamplingParams
from runtime.wiring import load_parts

pytestmark = pytest.mark.slow
NEW_TOKENS = 12
USERS = ("Hi, I am Ada. Who are you?", "What is two plus two?", "Write a line about the sea.", "What was my name?")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("smollm2") / "fp32"
    assert build(["--dtype", "fp32", "--kv-dtype", "fp32", "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def tokenizer(engine_dir: Path) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(engine_dir / "tokenizer.json"),
        chat_template=(engine_dir / "chat_template.jinja").read_text(encoding="utf-8"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )


def generate(model: Any, ids: list[int], cache: Any) -> list[int]:
    out = model.generate(
        torch.tensor([ids]), past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    return [int(i) for i in out[0]]


def test_full_gives_the_text_of_the_default_cache(reference: Any, tokenizer: Any) -> None:
    ours, theirs = CommitKVCache("full", model=reference), DynamicCache(config=reference.config)
    messages: list[dict[str, str]] = []
    for user in USERS:
        messages.append({"role": "user", "content": user})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = generate(reference, ids, theirs)
        assert generate(reference, ids, ours) == expected
        answer = tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        # The next render may spell the answer's last tokens anew: go on from what both caches surely share.
        shared = len(tokenizer.encode(text + answer, add_special_tokens=False)) - NEW_TOKENS - 1
        for cache in (ours, theirs):
            cache.crop(-(cache.get_seq_length() - min(shared, len(ids))))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def test_commitkv_is_the_engines_and_gives_memory_back(reference: Any, tokenizer: Any, engine_dir: Path) -> None:
    """The shipped on-call conversation, teacher-forced with the engine's answers."""
    engine = Engine(load_parts(engine_dir, RuntimeConfig(kv_memory_bytes=512 << 20, num_threads=2), verify=False))
    cache = CommitKVCache("commitkv", model=reference, tokenizer=tokenizer)
    lines = (CONVERSATIONS / "oncall.jsonl").read_text(encoding="utf-8").splitlines()[:7]
    shrunk = 0
    for number, line in enumerate(lines):
        engine.submit(Request(str(number), json.loads(line)["content"], SamplingParams(max_tokens=4), "c"))
        busy = True
        while busy:
            _, busy = engine.step()
        tokens = list(engine.conversation("c").tokens)
        before, cached = resident_bytes(), cache.get_seq_length()
        with torch.no_grad():
            logits = reference(torch.tensor([tokens[cached:-1]]), cache=cache).logits[0]
        assert int(logits[-1].argmax()) == tokens[-1]
        cache.commit()
        shrunk = max(shrunk, before - resident_bytes())
        theirs, ours = engine.kv_stats("c"), cache.stats()
        assert (ours.active, ours.committed, ours.evicted) == (theirs.active, theirs.committed, theirs.evicted)
        assert ours.kv_bytes == pytest.approx(theirs.kv_bytes, rel=0.01)
    assert ours.evicted > 500
    assert shrunk > 10 << 20
