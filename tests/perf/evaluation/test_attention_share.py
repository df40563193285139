"""Attention statistics on a model whose attention is known."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from perf.evaluation.attention_share import BANDS, TOP_SHARE, attention_share

TURNS = [[1 + (7 * turn + i) % 30 for i in range(20)] for turn in range(24)]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024,
        )
    ).eval()  # fmt: skip


def test_even_attention_falls_evenly() -> None:
    model = tiny()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)  # all logits 0
    found = attention_share(model, TURNS)
    assert abs(found.top - TOP_SHARE) < 0.004 and abs(found.top_with_sink - TOP_SHARE) < 0.004
    assert [band for band, _ in found.by_distance] == list(BANDS)
    assert abs(sum(share for _, share in found.by_distance) - 1) < 1e-5
    assert all(abs(even - 1) < 0.01 for even in found.per_token)


def test_one_key_that_takes_everything_is_found_in_its_band() -> None:
    model = tiny()
    marked = 31
    turns = [list(turn) for turn in TURNS]
    turns[7][5] = marked  # 14 to 16 turns before the last three
    with torch.no_grad():
        # Embeddings: every token along one axis, the marked one far along another, which only keys read.
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[marked] = 0.0
        model.model.embed_tokens.weight[marked, 1] = 1.0
        for layer in model.model.layers:
            attention = layer.self_attn
            for linear in (attention.q_proj, attention.k_proj, attention.o_proj):
                linear.weight.zero_()
            for head_dim_end in range(7, 32, 8):  # the slowest rotating channel, so that distance does not matter
                attention.q_proj.weight[head_dim_end, 0] = 40.0
            for head_dim_end in range(7, 16, 8):
                attention.k_proj.weight[head_dim_end, 1] = 40.0
            layer.mlp.down_proj.weight.zero_()
    found = attention_share(model, turns)
    assert found.top > 0.99
    assert found.by_distance[1][1] > 0.99


def test_the_model_is_left_as_it_was() -> None:
    model = tiny()
    before = model.config._attn_implementation
    ids = torch.tensor([TURNS[0]])
    with torch.inference_mode():
        logits = model(ids).logits
    attention_share(model, TURNS)
    assert model.config._attn_implementation == before
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, logits)
