# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tiny random models of the families that can be converted, as transformers saves them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from megatron_mtraining.tools import cli

BASE = dict(
    vocab_size=320, hidden_size=128, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=False,
)  # fmt: skip


def rope(base: float = 1e6, **scaling) -> dict:
    return {"rope_type": "default", "rope_theta": base, **scaling}


LLAMA3 = rope(
    5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
MOE = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1,
    mlp_only_layers=[], head_dim=64,
)  # fmt: skip
CASES = {
    "qwen2": ("Qwen2", dict(head_dim=64, rope_parameters=rope())),
    "qwen2 tied": ("Qwen2", dict(head_dim=64, tie_word_embeddings=True, rope_parameters=rope())),
    "qwen2 yarn": ("Qwen2", dict(head_dim=64, rope_parameters=YARN)),
    "qwen3": ("Qwen3", dict(head_dim=64, rope_parameters=rope())),
    "qwen3 moe": ("Qwen3Moe", dict(**MOE, norm_topk_prob=True, rope_parameters=rope())),
    "qwen3 moe, not normed": (
        "Qwen3Moe",
        dict(**MOE, norm_topk_prob=False, rope_parameters=rope()),
    ),
    "llama": ("Llama", dict(head_dim=64, rope_parameters=rope(1e4), tie_word_embeddings=True)),
    "llama 3": ("Llama", dict(head_dim=64, rope_parameters=LLAMA3)),
}


MOE_CONFIG = dict(
    **BASE, **MOE, architectures=["Qwen3MoeForCausalLM"], rope_parameters=rope(), norm_topk_prob=True
)  # fmt: skip
"""The fields of a Qwen3-MoE config.json that are read."""


def save(name: str, folder: Path, dtype=torch.float32, shard: str = "200KB", **changes) -> Path:
    """Save a model of random weights, biases and norms too, in several files."""
    import transformers

    family, values = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **values, **changes})
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in key))
            else:
                weight.normal_(0, 0.08)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def plain_pair(root: Path) -> tuple[Path, Path]:
    """A Hugging Face folder in bfloat16, and the checkpoint converted from it."""
    folder = save("qwen2", root / "hf", torch.bfloat16)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"top_p": 0.5}')
    assert to_megatron(folder, root / "meg") == 0
    return folder, root / "meg"


def flags_of(checkpoint: Path) -> list[str]:
    """The words of MEGATRON_ARGS, from bash."""
    script = 'source "$1" && printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    words = ["bash", "-c", script, "bash", checkpoint / "megatron_args.sh"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def change_args(checkpoint: Path, **values) -> None:
    """Change the arguments in a checkpoint."""
    file = checkpoint / "release" / "common.pt"
    common = torch.load(file, weights_only=False)
    for name, value in values.items():
        setattr(common["args"], name, value)
    torch.save(common, file)
    file.with_name("integrity.json").unlink(missing_ok=True)


def convert(*words) -> int:
    return cli.main(["convert", *map(str, words)])


def to_megatron(*words) -> int:
    return convert("hf-to-megatron", *words)


def case_id(name: str) -> str:
    """A model's name as a pytest id."""
    return name.replace(",", "").replace(" ", "-")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def same(before: dict, after: dict) -> None:
    """Assert that two folders' weights are bit-identical, in the same dtypes."""
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


def refused(capsys, folder: Path, words, named) -> None:
    """Assert that a conversion fails with one line that contains ``named``, and changes nothing."""
    before = sorted(folder.parent.iterdir())
    there = folder.exists() and sorted(
        (path, path.stat().st_mtime_ns) for path in folder.rglob("*")
    )
    assert convert(*words) == 2
    (error,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("mtraining convert:")
    ]
    for word in named:
        assert str(word) in error, error
    assert sorted(folder.parent.iterdir()) == before
    assert there == (
        folder.exists() and sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    )
