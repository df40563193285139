"""`CommitKVCache` in transformers: `full` gives DynamicCache's text, `commitkv` the engine's bytes and choices."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import TEMPLATE, save_tiny_model
from transformers import DynamicCache, PreTrainedTokenizerFast

from builder.build import main as build
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import (
    CommitKVError,
    ConfigError,
    OutOfMemoryError,
    PromptTooLongError,
    RequestError,
    UnsupportedPolicyError,
)
from runtime.hf_cache import CommitKVCache
from runtime.hf_model import CacheOptions
from runtime.policy import registry
from runtime.policy.base import Policy, Schedule
from runtime.policy.signals import Signals
from runtime.request import Request, SamplingParams
from runtime.wiring import load_parts

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NEW_TOKENS = 10
EAGER = dataclasses.replace(registry.ALL_POLICIES["commitkv"], schedule=Schedule(min_tokens=200, recent_tokens=64))
UNPROBED = dataclasses.replace(EAGER, name="unprobed", score="seen")
PROMPTS = ("A short one.", "A prompt of some length, over several pages. " * 6, "x")


@dataclass(frozen=True)
class Tiny:
    """A tiny model of one family with its tokenizer."""

    directory: Path
    model: Any
    tokenizer: Any

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])

    def answer(self, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 257} | options
        out: torch.Tensor = self.model.generate(ids, past_key_values=cache, **settings)
        return out


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _tiny(tmp_path_factory.mktemp("plain-llama"), "llama")


def _tiny(directory: Path, family: str) -> Tiny:
    model = save_tiny_model(directory, family)
    file = str(directory / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=file, chat_template=TEMPLATE, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    return Tiny(directory, model, tokenizer)


def grown(tiny: Tiny, cache: CommitKVCache, num_tokens: int = 400) -> torch.Tensor:
    """A conversation of one prompt and its answer."""
    ids = torch.randint(0, 256, (1, num_tokens), generator=torch.Generator().manual_seed(5))
    return tiny.answer(ids, cache)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_full_gives_the_text_of_the_default_cache(tiny: Tiny, prompt: str) -> None:
    ours, theirs = CommitKVCache("full", model=tiny.model), DynamicCache(config=tiny.model.config)
    text = tiny.ids(prompt)
    for turn in range(3):
        answer = tiny.answer(text, theirs)
        assert torch.equal(tiny.answer(text, ours), answer)
        assert ours.get_seq_length() == theirs.get_seq_length()
        ours.commit()  # nothing to do under `full`
        text = torch.cat((answer, tiny.ids(f" And turn {turn}.")), dim=1)
    assert ours.stats().active == ours.get_seq_length() and ours.stats().evicted == 0


def engine_of(tiny: Tiny, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    assert build(["--model", str(tiny.directory), "--output", str(directory), "--dtype", "fp32"]) == 0
    monkeypatch.setitem(registry.ALL_POLICIES, "commitkv", EAGER)
    return Engine(load_parts(directory, RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1), verify=False))


def turn_of(engine: Engine, text: str) -> list[int]:
    """Runs a turn and the idle time behind it; the conversation's tokens."""
    engine.submit(Request(text, text, SamplingParams(max_tokens=NEW_TOKENS), "c"))
    busy = True
    while busy:
        _, busy = engine.step()
    return list(engine.conversation("c").tokens)


def test_commitkv_gives_the_engines_bytes_and_choices(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny, tmp_path / "engine", monkeypatch)
    cache = CommitKVCache(EAGER, model=tiny.model, tokenizer=tiny.tokenizer)
    for turn in range(4):
        user = f"Turn {turn}: " + f"the quick brown fox {turn} jumps. Remember this: my dog {turn} is Rufus. " * 5
        tokens = turn_of(engine, user)
        prompt = torch.tensor([tokens[:-NEW_TOKENS]])
        assert tiny.answer(prompt, cache)[0].tolist() == tokens
        cache.commit()
        theirs, ours = engine.kv_stats("c"), cache.stats()
        assert ours == theirs and ours.evicted > 0
        mine, engines = cache._manager[0], engine._manager[engine.conversation("c").handle]
        assert mine.protected_ranges() == engines.protected_ranges()
        assert (mine.blocks.lens, mine.blocks.starts) == (engines.blocks.lens, engines.blocks.starts)
        # The entries kept are the same ones: their scores agree, block by block.
        for block_a, block_b, length in zip(mine.blocks.ids, engines.blocks.ids, mine.blocks.lens, strict=True):
            a = cache._executor._storage.blocks(EAGER.block_format).score[block_a, :length].float()
            b = engine._executor._storage.blocks(EAGER.block_format).score[block_b, :length].float()
            torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-5)
    cache._manager.check_invariants()


def test_memory_shrinks_while_positions_stay(llama: Tiny) -> None:
    cache = CommitKVCache(EAGER, model=llama.model, tokenizer=llama.tokenizer)
    grown(llama, cache)
    before, length = cache.stats(), cache.get_seq_length()
    cache.commit()
    after = cache.stats()
    assert length == cache.get_seq_length() == 409
    assert after.kv_bytes < 0.6 * before.kv_bytes
    assert after.active + after.committed + after.evicted == length and after.staged == 0
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)


def test_the_next_prompt_commits_what_was_left(llama: Tiny) -> None:
    by_hand = CommitKVCache(UNPROBED, model=llama.model)
    by_itself = CommitKVCache(UNPROBED, model=llama.model)
    never = CommitKVCache(UNPROBED, model=llama.model, options=CacheOptions(auto_commit=False))
    for cache in (by_hand, by_itself, never):
        text = grown(llama, cache)
        if cache is by_hand:
            cache.commit()
        llama.answer(torch.cat((text, llama.ids(" Go on.")), dim=1), cache)
    assert by_hand.stats() == by_itself.stats()
    assert by_itself.stats().evicted > 0 == never.stats().evicted


def test_protected_tokens_stay_exact(llama: Tiny) -> None:
    cache = CommitKVCache(UNPROBED, model=llama.model)
    cache.protect(20, 90)
    grown(llama, cache)
    cache.commit()
    in_pages = [p for page in cache._manager[0].pages for p in page.positions]
    assert set(range(20, 90)) | set(range(4)) <= set(in_pages)
    assert len(in_pages) < 300


def test_other_caches_are_served_as_before(tmp_path: Path) -> None:
    for name in ("sdpa", "eager"):
        tiny = _tiny(tmp_path, "llama")
        tiny.model.set_attn_implementation(name)
        text = tiny.ids("Some text to go on from, " * 3)
        expected = tiny.answer(text, DynamicCache(config=tiny.model.config), output_logits=True)
        CommitKVCache("full", model=tiny.model)
        assert tiny.model.config._attn_implementation == f"commitkv_{name}"
        assert torch.equal(tiny.answer(text, DynamicCache(config=tiny.model.config)), expected)
        batch = tiny.model.generate(text.repeat(2, 1), max_new_tokens=4, do_sample=False, pad_token_id=257, num_beams=2)
        assert batch.shape[0] == 2


def test_one_model_serves_two_conversations_in_turn(llama: Tiny) -> None:
    texts = [llama.ids("First conversation. " * 9), llama.ids("The other one! " * 7)]
    alone = [llama.answer(text, CommitKVCache("full", model=llama.model)) for text in texts]
    caches = [CommitKVCache("full", model=llama.model) for _ in texts]
    with torch.no_grad():
        for text, cache in zip(texts, caches, strict=True):
            llama.model(text[:, :20], cache=cache)
    for text, cache, expected in zip(texts, caches, alone, strict=True):
        assert torch.equal(llama.answer(text, cache), expected)


def test_reset_and_crop(llama: Tiny) -> None:
    cache = CommitKVCache("full", model=llama.model)
    text = llama.ids("Once upon a time, " * 4)
    answer = llama.answer(text, cache)
    cache.crop(0)
    cache.crop(-(cache.get_seq_length() - 30))
    assert cache.get_seq_length() == 30 and cache.token_ids == tuple(text[0, :30].tolist())
    assert torch.equal(llama.answer(text, cache), answer)
    cache.reset()
    assert (cache.get_seq_length(), cache.stats().active) == (0, 0)
    assert torch.equal(llama.answer(text, cache), answer)
    cache._manager.check_invariants()
    with pytest.raises(RequestError, match="crop"):
        cache.crop(5)


def test_crop_of_committed_tokens_is_refused(llama: Tiny) -> None:
    cache = CommitKVCache(UNPROBED, model=llama.model)
    grown(llama, cache)
    cache.commit()
    cache.crop(-10)
    assert cache.get_seq_length() == 399 and not cache.is_croppable
    with pytest.raises(RequestError, match="reach into"):
        cache.crop(-300)
    assert cache.get_seq_length() == 399


def test_a_failed_forward_leaves_no_trace(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CommitKVCache("full", model=llama.model)
    text = llama.ids("Some text that will fail once. " * 3)
    with monkeypatch.context() as patch:
        patch.setattr(llama.model.model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama.answer(text, cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(llama.answer(text, cache), llama.answer(text, CommitKVCache("full", model=llama.model)))
    cache._manager.check_invariants()


def test_a_cache_is_freed_with_its_last_reference(llama: Tiny) -> None:
    cache = CommitKVCache("full", model=llama.model)
    llama.answer(llama.ids("Hello"), cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_prompt_may_come_in_chunks(llama: Tiny) -> None:
    text = llama.ids("A prompt in chunks, piece by piece, with no end in sight. " * 8)
    whole = llama.answer(text, CommitKVCache("full", model=llama.model))
    assert torch.equal(llama.answer(text, CommitKVCache("full", model=llama.model), prefill_chunk_size=37), whole)


def test_assisted_decoding_works_where_crop_leaves_no_trace(llama: Tiny) -> None:
    text = llama.ids("The quick brown fox " * 4)
    expected = llama.answer(text, CommitKVCache("full", model=llama.model))
    cache = CommitKVCache("full", model=llama.model)
    assert torch.equal(llama.answer(text, cache, assistant_model=llama.model), expected)
    assert cache.get_seq_length() in (expected.shape[1] - 1, expected.shape[1])
    cache._manager.check_invariants()


def test_half_precision_is_kept_in_its_own_type(tmp_path: Path) -> None:
    tiny = _tiny(tmp_path, "qwen3")
    tiny.model.to(torch.bfloat16)
    text = tiny.ids("Text in half precision, " * 20)
    with torch.no_grad():
        expected = tiny.model(text).logits.float()
    cache = CommitKVCache(UNPROBED, model=tiny.model)
    with torch.no_grad():
        logits = torch.cat([tiny.model(piece, cache=cache).logits for piece in text.split(37, dim=1)], dim=1).float()
    assert (logits - expected).norm() / expected.norm() < 0.02
    cache.commit()
    assert cache.stats().evicted > 100


def test_tight_memory_commits_early_or_says_so(llama: Tiny) -> None:
    roomy = CommitKVCache(UNPROBED, model=llama.model)
    needed = roomy._manager.page_layout.page_bytes * 40 + roomy._manager.budget.headroom_bytes
    options = CacheOptions(kv_memory_bytes=needed)
    cache = CommitKVCache(UNPROBED, model=llama.model, options=options)
    for start in range(0, 1200, 100):
        with torch.no_grad():
            llama.model(torch.randint(0, 256, (1, 100)), cache=cache)
        assert cache.get_seq_length() == start + 100
    assert cache.stats().evicted > 300 and cache._manager.budget.used_bytes <= needed
    full = CommitKVCache("full", model=llama.model, options=options)
    with pytest.raises(OutOfMemoryError), torch.no_grad():
        llama.model(torch.randint(0, 256, (1, 1200)), cache=full)
    assert full.get_seq_length() == 0


@pytest.fixture
def cache(llama: Tiny) -> Iterator[CommitKVCache]:
    cache = CommitKVCache("full", model=llama.model, options=CacheOptions(max_seq_len=64))
    yield cache
    cache._manager.check_invariants()


def test_batches_beams_and_padding_are_refused(llama: Tiny, cache: CommitKVCache) -> None:
    text = llama.ids("Hello there")
    with pytest.raises(RequestError, match="batch: got 2"):
        llama.answer(text.repeat(2, 1), cache)
    with pytest.raises(RequestError, match="batch: got 3"):
        llama.answer(text, cache, num_beams=3)
    with pytest.raises(RequestError, match="batch: got 2"):
        llama.answer(text, cache, do_sample=True, num_return_sequences=2)
    padded = torch.ones_like(text)
    padded[:, :3] = 0
    with pytest.raises(RequestError, match=r"position_ids|attention_mask"):
        llama.answer(text, cache, attention_mask=padded)
    with pytest.raises(RequestError, match="attention_mask: hides 3"), torch.no_grad():
        llama.model(text, attention_mask=padded, cache=cache)
    with pytest.raises(RequestError, match="position_ids"), torch.no_grad():
        llama.model(text, position_ids=torch.arange(11)[None] + 5, cache=cache)
    with pytest.raises(RequestError, match="one sequence"):
        cache.reorder_cache(torch.tensor([0]))
    for call in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0, 0]))):
        with pytest.raises(RequestError, match="one sequence"):
            call()
    cache.batch_repeat_interleave(1)
    assert cache.get_seq_length() == 0


def test_calls_that_cannot_work_are_refused(llama: Tiny, cache: CommitKVCache) -> None:
    with pytest.raises(PromptTooLongError, match="max_seq_len"):
        llama.answer(llama.ids("x" * 65), cache)
    with pytest.raises(ConfigError, match="no_grad"):
        llama.model(llama.ids("abc"), cache=cache)
    with pytest.raises(RequestError, match="input_ids"), torch.no_grad():
        llama.model(inputs_embeds=torch.zeros(1, 3, 64), cache=cache)
    with pytest.raises(RequestError, match="protect"):
        cache.protect(5, 5)
    commits = CommitKVCache(UNPROBED, model=llama.model)
    with pytest.raises(ValueError, match="crop"):  # transformers' own refusal, by `is_croppable`
        llama.answer(llama.ids("abc"), commits, assistant_model=llama.model)


def test_a_changed_attention_is_noticed(tmp_path: Path) -> None:
    tiny = _tiny(tmp_path, "llama")
    cache = CommitKVCache("full", model=tiny.model)
    tiny.model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="attn_implementation"):
        tiny.answer(tiny.ids("Hello"), cache)
    CommitKVCache("full", model=tiny.model)
    assert tiny.answer(tiny.ids("Hello"), cache).shape[1] == 5 + NEW_TOKENS


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"model_type": "gemma"}, CacheOptions(), "model_type 'gemma'"),
        ({"sliding_window": 100}, CacheOptions(max_seq_len=200), "slides over 100"),
        ({}, CacheOptions(max_seq_len=5000), "max_seq_len"),
        ({}, CacheOptions(page_tokens=7), "page_tokens"),
        ({}, CacheOptions(probe_tokens=0), "probe_tokens"),
        ({}, CacheOptions(kv_memory_bytes=100), "kv_memory_bytes"),
        ({"_attn_implementation": "flex_attention"}, CacheOptions(), "flex_attention"),
    ],
)
def test_models_and_options_that_cannot_work(
    tmp_path: Path, change: dict[str, Any], options: CacheOptions, message: str
) -> None:
    tiny = _tiny(tmp_path, "mistral")
    for name, value in change.items():
        setattr(tiny.model.config, name, value)
    with pytest.raises(CommitKVError, match=message):
        CommitKVCache("full", model=tiny.model, options=options)


def test_a_policy_that_probes_needs_a_tokenizer(llama: Tiny) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        CommitKVCache("commitkv", model=llama.model)
    with pytest.raises(CommitKVError, match="magic"):
        CommitKVCache("magic", model=llama.model)
    watching = dataclasses.replace(UNPROBED, signals=Signals(boundary=1.0))
    with pytest.raises(ConfigError, match="signals"):
        CommitKVCache(watching, model=llama.model, tokenizer=llama.tokenizer)


@pytest.mark.parametrize("name", list(registry.ALL_POLICIES))
def test_every_policy_runs(llama: Tiny, name: str) -> None:
    base: Policy = registry.ALL_POLICIES[name]
    policy = dataclasses.replace(base, schedule=dataclasses.replace(base.schedule, min_tokens=200, recent_tokens=64))
    if base.gate is not None:
        with pytest.raises(UnsupportedPolicyError, match="trained on"):
            CommitKVCache(policy, model=llama.model, tokenizer=llama.tokenizer)
        return
    cache = CommitKVCache(policy, model=llama.model, tokenizer=llama.tokenizer)
    text = grown(llama, cache)
    cache.commit()
    if base.compresses:
        assert cache.stats().active < 409
    assert llama.answer(torch.cat((text, llama.ids(" Next.")), dim=1), cache).shape[1] == 410 + 6 + NEW_TOKENS
    cache._manager.check_invariants()
