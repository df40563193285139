"""Copies between arenas, see `transfer_cases`."""

from __future__ import annotations

import pytest
import torch
from transfer_cases import FORMATS, check_transfer, place, random_storage

from runtime.checkpoint_tables import KvPlace
from runtime.kv_state import make_block_table
from runtime.kv_transfer import KvTransfer
from runtime.step import int32


@pytest.mark.parametrize("block_format", FORMATS)
def test_what_is_filled_arrives_and_nothing_else_is_touched(block_format: str) -> None:
    check_transfer(torch.device("cpu"), block_format)


def test_sizes_are_those_of_pages_and_blocks() -> None:
    storage = random_storage(torch.device("cpu"), 1)
    image = KvTransfer(storage).copy_out(place("int8", [0, 1, 2], [0, 1, 2, 3, 4]))
    assert len(image.pages) == 3 * 3 * storage.page_layout.layer_bytes
    assert len(image.blocks) == 5 * storage.blocks("int8").layout.block_bytes
    parts = (image.pages, image.seen, image.blocks, image.score)
    assert image.num_bytes == sum(map(len, parts)) and len(image.score) == 5 * 64 * 2


def test_a_conversation_without_pages_or_blocks_takes_no_bytes() -> None:
    storage = random_storage(torch.device("cpu"), 1)
    nothing = KvPlace(int32(), int32(), make_block_table("int4", [[] for _ in range(6)]))
    image = KvTransfer(storage).copy_out(nothing)
    assert image.num_bytes == 0
    KvTransfer(storage).copy_in(nothing, image)
