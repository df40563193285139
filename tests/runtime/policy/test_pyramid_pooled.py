"""pyramidkv-pooled: pairs by mean, old pairs of pairs by maximum, tiers by task."""

from __future__ import annotations

import math

import pytest
import torch
from crafted_cache import ROWS, CraftedCache, Entry, random_key, small

from plugins.commit.choices import Tier
from runtime.policy import pyramid_pooled
from runtime.policy.pyramid_pooled import CHAT, CODE, POLICY, STORY

TIERS = (Tier(0, 1), Tier(16, 2, "mean"), Tier(64, 4, "max"))


def pooled(**changes: object) -> CraftedCache:
    return CraftedCache(small(CHAT, tiers=TIERS, block_format="kv", **changes))


def mass(entry: Entry) -> int:
    return round(math.exp(entry.bias))


def test_the_tiers_are_the_proposed_ones_and_int8() -> None:
    assert (Tier(0, 1), Tier(128, 2, "mean"), Tier(1024, 4, "max")) == pyramid_pooled.TIERS
    assert CHAT.schedule.recent_tokens == 128 and CHAT.block_format == "int8" and not CHAT.redraw


def test_the_middle_tier_is_the_mean_of_pairs() -> None:
    cache = pooled()
    cache.add(4 + 32 + 20)  # sinks stay in pages; the last page begins inside the recent window
    cache.commit()
    for row in range(ROWS):
        entries = cache.entries(row)
        assert [mass(e) for e in entries] == [2] * len(entries)
        for i, entry in enumerate(entries):
            first = 4 + 2 * i
            assert entry.position == first + 0.5
            expected = (random_key(row, first) + random_key(row, first + 1)) / 2
            torch.testing.assert_close(entry.key, expected)
            assert entry.score == first + 2, "the position of its newest token, plus 1"


def test_what_grows_old_is_pooled_again_by_maximum() -> None:
    cache = pooled()
    for _ in range(5):
        cache.add(40)
        cache.commit()
    newest = cache.kv.num_tokens - 1
    for row in range(ROWS):
        entries = sorted(cache.entries(row), key=lambda e: e.score)
        masses = [mass(e) for e in entries]
        assert sum(masses) == cache.kv.committed_tokens, "every token is counted once"
        assert masses == sorted(masses, reverse=True) and set(masses) <= {1, 2, 4}
        assert all(newest - (e.score - 1) < 64 + 8 for e in entries if mass(e) < 4), "older pairs were merged"
        assert [e for e in entries if mass(e) == 4 and newest - (e.score - 1) < 64 - 8] == []
        # The first ones were pairs when they aged: the largest channel of two means.
        first = entries[0]
        pairs = [(random_key(row, p) + random_key(row, p + 1)) / 2 for p in (4, 6)]
        torch.testing.assert_close(first.key, torch.maximum(*pairs))
        assert first.position == 6.5, "the larger of the values 4.5 and 6.5"


def test_a_long_prompt_goes_to_the_old_tier_at_once() -> None:
    cache = pooled()
    cache.add(4 + 160)
    cache.commit()
    first = cache.entries(0)[0]
    expected = torch.stack([random_key(0, p) for p in range(4, 8)]).amax(dim=0)
    torch.testing.assert_close(first.key, expected)
    assert mass(first) == 4 and first.position == 7.0


@pytest.mark.parametrize(("policy", "base", "top"), [(CODE, 0.7, 0.1), (STORY, 0.2, 0.5)])
def test_task_types_share_the_entries(policy, base: float, top: float) -> None:  # type: ignore[no-untyped-def]
    num_tokens = 6000
    tiers = policy.tiers_at(num_tokens)
    ends = [tier.min_age for tier in tiers[1:]] + [num_tokens]
    entries = [(end - tier.min_age) / tier.size for tier, end in zip(tiers, ends, strict=True)]
    assert entries[0] / sum(entries) == pytest.approx(base, abs=0.01)
    assert entries[2] / sum(entries) == pytest.approx(top, abs=0.01)


def test_code_keeps_its_base_as_it_is_and_a_story_does_not() -> None:
    sizes = {}
    for name, shares in (("code", CODE.tier_shares), ("story", STORY.tier_shares)):
        cache = CraftedCache(small(CHAT, tier_shares=shares, block_format="kv"))
        for _ in range(4):
            cache.add(64)
            cache.commit()
        entries = cache.entries(0)
        sizes[name] = len(entries)
        assert sum(mass(e) for e in entries) == cache.kv.committed_tokens
        if name == "code":
            assert sum(mass(e) == 1 for e in entries) > 0.4 * len(entries)
    assert sizes["story"] < 0.7 * sizes["code"]


def test_the_type_is_detected_or_given() -> None:
    for task, policy in (("code", CODE), ("story", STORY), ("chat", CHAT)):
        chosen = POLICY.for_task(task)
        assert (chosen.name, chosen.chosen_from) == (policy.name, "pyramidkv-pooled")
        assert policy.for_task("code") is policy, "a given type is not detected again"
    strict = small(POLICY).for_task("code")
    assert strict.schedule.min_tokens == small(POLICY).schedule.min_tokens
