"""A conversation copied out of arenas and into others, on any device; also run on a card (tests/gpu/checks.py)."""

from __future__ import annotations

import torch

from runtime.checkpoint_tables import KvPlace
from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.kv_state import make_block_table
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.kv_transfer import KvTransfer
from runtime.step import int32

SPEC = ModelSpec("llama", 3, 64, 128, 4, 2, 64, 100, 1e-5, RopeSpec(10000.0), 1024, True)
FORMATS = ("int4", "k8v4", "int8", "fp16", "bf16", "fp32")
NUM_PAGES, NUM_BLOCKS = 9, 20


def random_storage(device: torch.device, seed: int) -> KvStorage:
    """Arenas full of random bytes, NaN among them."""
    limits = EngineLimits(kv_dtype="bf16", page_tokens=16, block_entries=64)
    storage = KvStorage(SPEC, limits, NUM_PAGES, dict.fromkeys(FORMATS, NUM_BLOCKS), ArenaPlace(device))
    gen = torch.Generator().manual_seed(seed)
    arenas = [*storage.pages, *storage.seen]
    arenas += [tensor for name in FORMATS for tensor in (storage.blocks(name).raw, storage.blocks(name).score)]
    for arena in arenas:
        noise = torch.randint(0, 256, (arena.nbytes,), dtype=torch.uint8, generator=gen)
        arena.view(-1).view(torch.uint8).copy_(noise)  # to the device
    return storage


def place(block_format: str, page_ids: list[int], block_ids: list[int]) -> KvPlace:
    """Three pages, the last with 5 tokens; five blocks over six rows, part-filled ones among them."""
    lens = [64, 7, 1, 64, 63]
    blocks = list(zip(block_ids, lens, strict=True))
    rows = [blocks[:2], [], blocks[2:3], blocks[3:4], [], blocks[4:]]
    return KvPlace(int32(page_ids), int32([16, 16, 5]), make_block_table(block_format, rows))


def check_transfer(device: torch.device, block_format: str) -> None:
    """What is filled arrives as it was, what is not is zero, and nothing else is touched."""
    source, target = random_storage(device, 1), random_storage(device, 2)
    untouched = random_storage(device, 2)
    here, there = place(block_format, [7, 0, 4], [9, 3, 0, 19, 11]), place(block_format, [1, 8, 2], [5, 6, 7, 1, 0])
    image = KvTransfer(source).copy_out(here)
    KvTransfer(target).copy_in(there, image)
    again = KvTransfer(target).copy_out(there)
    for name in ("pages", "seen", "blocks", "score"):
        assert bytes(getattr(image, name)) == bytes(getattr(again, name)), f"{name} changed on the way"
    for layer in range(SPEC.num_layers):
        for a, b, length in zip(here.page_ids, there.page_ids, here.page_lens, strict=True):
            got, expected = target.pages[layer][b], source.pages[layer][a]
            assert same_bits(got[:, :, :length], expected[:, :, :length]), f"tokens of page {a}"
            assert not got[:, :, length:].any() and not target.seen[layer][b][:, length:].any(), "unfilled slots"
            assert same_bits(target.seen[layer][b][:, :length], source.seen[layer][a][:, :length])
        others = [page for page in range(NUM_PAGES) if page not in there.page_ids]
        assert same_bits(target.pages[layer][others], untouched.pages[layer][others]), "another page was written"
    arena, old = target.blocks(block_format), source.blocks(block_format)
    for a, b, length in zip(here.blocks.ids, there.blocks.ids, here.blocks.lens, strict=True):
        assert same_bits(arena.score[b, :length], old.score[a, :length]) and not arena.score[b, length:].any()
        if length == 64:
            assert torch.equal(arena.raw[b], old.raw[a]), f"block {a}"
    others = [block for block in range(NUM_BLOCKS) if block not in there.blocks.ids]
    assert torch.equal(arena.raw[others], untouched.blocks(block_format).raw[others]), "another block was written"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as bytes, NaN too."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
