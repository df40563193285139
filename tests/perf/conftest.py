"""An engine for evaluations: random weights, and a tokenizer that tells the words of a pool apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_engine import END_TOKEN_ID, TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from builder.build import main as build
from perf.evaluation import words
from perf.evaluation.tasks import make_task

VOCAB_SIZE = 3000


@pytest.fixture(scope="session")
def evaluation_engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama of 2 layers for 8,192 tokens, whose tokenizer was trained on the texts of tasks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("evaluation-model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 2, initial_alphabet=alphabet, show_progress=False)
    pools = [f" {word}" for name, pool in vars(words).items() if name.isupper() for word in pool] * 500
    texts = [turn for seed in range(3) for turn in make_task(seed, 4000).turns]
    tokenizer.train_from_iterator([*pools, *texts], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "add_bos_token": False,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, tie_word_embeddings=False,
        bos_token_id=END_TOKEN_ID - 1, eos_token_id=END_TOKEN_ID,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() > 1):
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    output = tmp_path_factory.mktemp("evaluation") / "engine"
    assert build(["--model", str(directory), "--output", str(output), "--dtype", "fp32"]) == 0
    return output
