"""Tables on their way to a device: one copy a step, in order, aligned, growing where a step needs more."""

from __future__ import annotations

import pytest
import torch

from plugins.staging import TableStaging

CPU = torch.device("cpu")


def tables(scale: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(scale)
    return [
        torch.randint(-1, 1000, (7 * scale,), generator=gen, dtype=torch.int32),
        torch.randint(0, 2, (3, scale), generator=gen, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.int32),
        torch.randint(0, 2, (5,), generator=gen).bool(),
        torch.randint(-9, 9, (scale,), generator=gen),
    ]


def test_tables_arrive_in_one_copy() -> None:
    staging = TableStaging(CPU)
    for step in range(1, 5):
        given = tables(step)
        staging.begin()
        views = [staging.put(table) for table in given]
        staging.flush()
        assert staging.num_copies == step
        for view, table in zip(views, given, strict=True):
            assert torch.equal(view, table) and view.dtype == table.dtype
            assert view.data_ptr() % 16 == 0 and (not view.numel() or view.data_ptr() != table.data_ptr())


def test_nothing_is_there_before_the_copy() -> None:
    staging = TableStaging(CPU)
    staging.begin()
    first = staging.put(torch.full((4,), 7, dtype=torch.int32))
    staging.flush()
    staging.begin()
    second = staging.put(torch.full((4,), 9, dtype=torch.int32))
    assert second.tolist() == [7] * 4 and first.data_ptr() == second.data_ptr()
    staging.flush()
    assert second.tolist() == [9] * 4


def test_the_same_tables_keep_their_places() -> None:
    staging, places = TableStaging(CPU), []
    for _ in range(3):
        staging.begin()
        places.append([staging.put(table).data_ptr() for table in tables(3)])
        staging.flush()
    assert places[0] == places[1] == places[2], "a captured graph reads these addresses again"


def test_a_step_larger_than_the_buffer_is_whole_and_the_next_one_fits() -> None:
    staging = TableStaging(CPU, num_bytes=64)
    for copies in (3, 4):
        given = [torch.arange(n, dtype=torch.int32) for n in (12, 40, 200)]
        staging.begin()
        views = [staging.put(table) for table in given]
        staging.flush()
        assert all(torch.equal(view, table) for view, table in zip(views, given, strict=True))
        assert staging.num_copies == copies


def test_misuse_is_caught() -> None:
    staging = TableStaging(CPU)
    with pytest.raises(AssertionError, match="between begin and flush"):
        staging.put(torch.zeros(1))
    staging.begin()
    with pytest.raises(AssertionError):
        staging.put(torch.zeros(4, 4)[:, 1])
