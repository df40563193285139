"""streaming-llm keeps sinks and the newest tokens, the same in every row."""

from crafted_cache import ROWS, CraftedCache, small

from runtime.policy.streaming import POLICY


def test_only_sinks_and_the_newest_stay() -> None:
    cache = CraftedCache(small(POLICY, block_format="kv"))
    for _ in range(3):
        cache.add(64)
        cache.commit()
    committed = cache.kv.committed_tokens
    for row in range(ROWS):
        newest = sorted(cache.positions(row), reverse=True)
        budget = newest[: round(POLICY.budget_ratio * committed)]
        expected = list(range(cache.kv.num_tokens - 16 - 1, 0, -1))
        assert budget[:10] == expected[:10] and budget == sorted(set(budget), reverse=True)
    assert set(range(4)) <= cache.in_pages()
    assert cache.absorbed == 0 and cache.dropped > 0


def test_attention_raises_nothing() -> None:
    assert not POLICY.records and not POLICY.probe
