# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What tests of ``mtraining inspect`` share: operands, small models and texts, the command and its errors."""

from __future__ import annotations

import torch

from megatron_mtraining.tools import cli

LAYERS, HEADS, KV_HEADS, SEQ = 2, 4, 2, 1024


def operands(seq=SEQ, heads=HEADS, kv_heads=KV_HEADS, dim=64, dtype=torch.float32):
    torch.manual_seed(5)
    query = 2 * torch.randn(seq, 1, heads, dim)
    return query.to(dtype), torch.randn(seq, 1, kv_heads, dim).to(dtype)


def true_attention(query, key, scale):
    """Causal attention probabilities written out: float64 ``[h, s, s]``."""
    group = query.shape[2] // key.shape[2]
    q = query[:, 0].double().transpose(0, 1)
    k = key[:, 0].double().transpose(0, 1).repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * scale
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SIZES = dict(
    vocab_size=256,
    hidden_size=HEADS * 64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=SEQ,
)


def save_model(folder, kind="llama", **changes):
    """A small untrained model and a tokenizer of bytes, in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def argparse_file():
    import argparse

    return argparse.__file__


def inspect(*arguments):
    return cli.main(["inspect", *map(str, arguments)])


def quick(words, out, *more):
    return ["--text", words, "--output", out, "--device", "cpu", "--dtype", "float32", *more]


def refused(capsys, named, *arguments):
    status = inspect(*arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    error = lines[-1] if lines else ""
    assert status == 2 and error.startswith("mtraining inspect: "), lines
    for word in named:
        assert word in error, error
