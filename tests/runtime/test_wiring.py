"""An engine directory whose manifest was edited does not start."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import RuntimeConfig
from runtime.errors import CommitKVError
from runtime.wiring import _commit_worker, load_engine


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("model", {"num_layers": 3}, r"layers\.2\.\S+ with shape None, the manifest expects"),
        ("model", {"ffn_size": 88}, r"with shape \[\d+, \d+\], the manifest expects"),
        ("limits", {"policy": "magic"}, "policy: got 'magic', expected one of"),
    ],
)
def test_an_edited_manifest_is_refused(
    tiny_engine_dir: Path, tmp_path: Path, part: str, changes: dict[str, Any], reason: str
) -> None:
    engine = shutil.copytree(tiny_engine_dir, tmp_path / "engine")
    data = json.loads((engine / "manifest.json").read_text(encoding="utf-8"))
    data[part].update(changes)
    (engine / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CommitKVError, match=reason):
        load_engine(engine, RuntimeConfig())


def test_torch_keeps_to_one_thread_where_commits_are_made_and_nowhere_else() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        worker, told = _commit_worker(), threading.Event()
        numbers: list[int] = []
        worker.run(lambda: numbers.append(torch.get_num_threads()), told.set)
        assert told.wait(30)
        other = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert [*numbers, torch.get_num_threads()] == [1, 3, 3]
        worker.close()
    finally:
        torch.set_num_threads(before)
