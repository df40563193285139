"""The trace of commits: counts are the executor's, names are the tokens that blocks really hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins import blocks as block_bytes
from plugins.commit.params import Decision, PublishParams
from plugins.memory import KvMemory
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import ConfigError
from runtime.policy import registry
from runtime.request import Request, SamplingParams
from runtime.step import PublishPlan
from runtime.trace import Trace
from runtime.wiring import load_engine

NAMES = [name for name, policy in registry.ALL_POLICIES.items() if policy.compresses and policy.gate is None]
NUM_TURNS = 5


def use(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    """The policy called `name`, soon enough for short conversations."""
    policy = registry.ALL_POLICIES[name]
    schedule = dataclasses.replace(policy.schedule, min_tokens=200, recent_tokens=64)
    monkeypatch.setitem(registry.ALL_POLICIES, name, dataclasses.replace(policy, schedule=schedule, **changes))
    return name


def load(engine_dir: Path, trace_file: Path | str, **options: Any) -> Engine:
    config = RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1, trace_file=str(trace_file), **options)
    return load_engine(engine_dir, config, verify=False)


def hold(engine: Engine, name: str, conversation: str = "c") -> None:
    for turn in range(NUM_TURNS):
        text = f"Turn {turn}: " + f"the quick brown fox {turn} jumps. Remember this: {turn}. " * 6
        engine.submit(Request(f"{conversation}{turn}", text, SamplingParams(max_tokens=9), conversation, policy=name))
        busy = True
        while busy:
            _, busy = engine.step()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "exact"), [*((name, 0) for name in NAMES), ("commitkv", 6), ("h2o", 40)])
def test_counts_of_fates_are_what_the_executor_did(
    tiny_engine_dir: Path, tmp_path: Path, name: str, exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    hold(load(tiny_engine_dir, path), use(name, monkeypatch, exact_entries=exact))
    header, *records = read(path)
    assert (header["type"], header["version"], header["num_layers"], header["num_kv_heads"]) == ("header", 3, 2, 2)
    commits = [record for record in records if record["type"] == "commit"]
    assert len(commits) >= 3
    for record in commits:
        fates = "".join(row["fates"] for row in record["rows"])
        assert all(len(row["fates"]) == len(row["scores"]) == len(record["positions"]) for row in record["rows"])
        assert fates.count("k") + fates.count("x") == record["kept"]
        old_absorbed = sum(len(row["old_absorbed"]) for row in record["rows"])
        assert fates.count("a") + old_absorbed == record["absorbed"]
        assert fates.count("d") + sum(len(row["old_dropped"]) for row in record["rows"]) == record["dropped"]
        assert all(len(row["into"]) == row["fates"].count("a") for row in record["rows"])
        assert all(len(set(row.get("exact", ()))) == exact >= row["fates"].count("x") for row in record["rows"])
        assert 0 < record["bytes_after"] < record["bytes_before"]


def test_turns_hold_their_tokens_and_positions_are_whole(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    engine = load(tiny_engine_dir, path)
    hold(engine, use("commitkv", monkeypatch))
    conversation = engine.conversation("c")
    records = read(path)
    turns = [record for record in records if record["type"] == "turn"]
    assert [record["turn"] for record in turns] == list(range(1, NUM_TURNS + 1))
    assert list(itertools.chain(*(record["tokens"] for record in turns))) == conversation.tokens
    assert all(record["prompt_end"] - record["first"] == len(record["tokens"]) - 9 for record in turns)
    committed: list[int] = []
    for record in records:
        if record["type"] == "commit":
            committed = [*([] if record["renewed"] else committed), *record["positions"]]
    assert len(committed) == len(set(committed)) and any(record.get("renewed") for record in records)
    protected = {p for start, end in engine._manager[conversation.handle].protected_ranges() for p in range(start, end)}
    assert not protected & set(committed) and protected
    recent = set(range(engine._manager[conversation.handle].num_tokens - 64, len(conversation.tokens)))
    assert not recent & set(committed)


class KeyWatch(Trace):
    """A trace that also remembers the keys of what is staged, and compares them with what blocks hold later."""

    keys: dict[tuple[int, int], torch.Tensor]
    checked: int = 0

    def committing(self, plan: PublishPlan, memory: KvMemory, params: PublishParams, decision: Decision) -> None:
        for row in range(memory.num_rows):
            layer, head = divmod(row, memory.pages[0].shape[1])
            for slot, position in zip(plan.line.staged_slots, plan.line.positions, strict=True):
                page, offset = divmod(slot, memory.pages[0].shape[3])
                self.keys[row, position] = memory.pages[layer][page, head, 0, offset].clone()
        super().committing(plan, memory, params, decision)
        self.table, self.memory = plan.blocks, memory

    def check(self) -> None:
        for row in range(self.memory.num_rows):
            for i in range(self.table.starts[row], self.table.starts[row + 1]):
                raw = self.memory.blocks[self.table.ids[i]][None]
                keys = block_bytes.read_keys(raw, self.memory.layout)[0, : self.table.lens[i]]
                names = self._entries[self.table.format, self.table.ids[i]]
                assert len(names) == self.table.lens[i]
                for key, name in zip(keys, names, strict=True):
                    assert torch.equal(key, self.keys[row, name]), (row, name)
                    self.checked += 1


@pytest.mark.parametrize(("repack_ratio", "exact"), [(0.75, 0), (1.0, 0), (0.75, 20)])
def test_an_entry_is_named_by_the_token_whose_key_it_holds(
    tiny_engine_dir: Path, tmp_path: Path, repack_ratio: float, exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = use("commitkv", monkeypatch, block_format="kv", repack_ratio=repack_ratio, exact_entries=exact)
    engine = load(tiny_engine_dir, "")
    executor: Any = engine._executor
    watch = KeyWatch(tmp_path / "trace.jsonl", engine._manager, engine._manager.spec)
    watch.keys = {}
    executor.watcher = engine._observer = watch
    hold(engine, name)
    watch.check()
    assert watch.checked > 500


def test_nothing_is_watched_without_a_file(tiny_engine_dir: Path) -> None:
    engine: Any = load(tiny_engine_dir, "")
    assert engine._observer is None and engine._executor.watcher is None


def test_two_conversations_and_blocks_that_change_hands(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    engine = load(tiny_engine_dir, path)
    name = use("commitkv", monkeypatch)
    for conversation in ("a", "b", "c"):
        hold(engine, name, conversation)
        engine.end_conversation(conversation)
        engine.step()
    records = read(path)
    for handle in {record["handle"] for record in records[1:]}:
        commits = [r["commit"] for r in records if r["type"] == "commit" and r["handle"] == handle]
        assert commits == list(range(1, len(commits) + 1)) and commits
    lengths = [len([r for r in records if r.get("conversation") == c]) for c in ("a", "b", "c")]
    assert lengths == [NUM_TURNS] * 3


def test_commits_of_one_batch_are_told_each_by_itself(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    engine = load(tiny_engine_dir, path, tokens_per_step=2000)
    name, lengths = use("snapkv", monkeypatch), {"a": 200, "b": 250, "c": 300}
    for conversation, length in lengths.items():
        text = "".join(chr(97 + i * len(conversation) % 26) for i in range(length))
        engine.submit(Request(conversation, text, SamplingParams(max_tokens=1), conversation, policy=name))
    while engine.has_turns():
        engine.step()
    engine.step()
    assert len(engine._upkeep._open) == 3
    while engine.step()[1]:
        pass
    commits = {record["handle"]: record for record in read(path) if record["type"] == "commit"}
    assert len(commits) == 3
    for conversation in lengths:
        record = commits[engine.conversation(conversation).handle]
        positions = range(4, len(engine.conversation(conversation).tokens) - 64)
        assert record["positions"] == list(positions)[: len(record["positions"])] and record["commit"] == 1
        assert record["bytes_after"] == engine._manager.kv_bytes(record["handle"]) < record["bytes_before"]
    assert sum(r["absorbed"] for r in commits.values()) == engine.stats().absorbed
    assert sum(r["dropped"] for r in commits.values()) == engine.stats().dropped > 0


def test_files_that_cannot_be_made_are_refused(tiny_engine_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("something\n", encoding="utf-8")
    for path in (tmp_path / "old.jsonl", tmp_path / "old.jsonl" / "below.jsonl"):
        with pytest.raises(ConfigError, match="trace_file"):
            load(tiny_engine_dir, path)
    assert (tmp_path / "old.jsonl").read_text(encoding="utf-8") == "something\n"


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    tiny_engine_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine: Any = load(tiny_engine_dir, tmp_path / "trace.jsonl")
    engine._observer._file.close()
    engine._observer._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115
    hold(engine, use("commitkv", monkeypatch))
    assert engine.stats().commits >= 3
    assert caplog.text.count("cannot be written") == 1
