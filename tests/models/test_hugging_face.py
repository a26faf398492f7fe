# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face models: their own loss, sizes that are not supported, and the package named kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.models.hugging_face import open_folder, open_gguf
from megatron_mtraining.models.types import ModelOptions
from tests.support.inspect_cases import LAYERS, SEQ

ROOT = Path(__file__).parents[2]


def test_the_loss_is_the_models_own(llama):
    from transformers import AutoModelForCausalLM

    source = open_folder(ModelOptions(llama, torch.device("cpu"), torch.float32))
    tokens = torch.randint(200, (SEQ,), generator=torch.Generator().manual_seed(1))
    seen = []
    with source.loaded(scored=True) as run:
        loss, none = run(tokens, lambda given: seen.append(given))
        # Attention that a visitor returns is taken: nothing, here.
        other, divergence = run(tokens, lambda given: torch.zeros_like(given.query))
    with source.loaded() as run:
        assert run(tokens, lambda given: None) is None
    theirs = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None], labels=tokens[None]).loss.item()
    assert loss == pytest.approx(expected, abs=1e-5) and abs(other - loss) > 1e-4
    assert none == 0 and divergence > 1e-4
    assert len(seen) == LAYERS and seen[0].value.shape == seen[0].key.shape


def python(code: str, *path) -> str:
    """Run code in another interpreter, in the root of the checkout."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_does_not_take_our_kernels_folder_for_a_package():
    pytest.importorskip("transformers")
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    installed = python("import kernels; print(kernels.__file__ is not None)", "") == "True"
    assert python(code, "") == str(installed)


def test_an_installed_kernels_package_is_found_before_our_folder(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '1.2'")
    code = "import kernels, megatron_mtraining.kernels as ours; print(kernels.__version__, ours.__path__)"
    found = python(code, tmp_path)
    assert found.startswith("1.2") and str(ROOT) in found


def changed(llama: Path, folder: Path, change) -> ModelOptions:
    """A copy of the model whose weights are changed, as options."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return ModelOptions(folder, torch.device("cpu"), torch.float32)


DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.q_norm.weight"
WRONG = {
    "missing": (lambda weights: weights.pop(DOWN), [f"has no {DOWN}"]),
    "too many": (lambda weights: weights.update({NORM: torch.ones(64)}), [f"has {NORM}"]),
    "another shape": (
        lambda weights: weights.update({DOWN: weights[DOWN][:7].clone()}),
        [DOWN, "[7, 128]", "[256, 128]"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_are_not_those_of_config_json_are_named(wrong, llama, tmp_path):
    """transformers would make others up, or leave them out."""
    change, named = WRONG[wrong]
    source = open_folder(changed(llama, tmp_path / "model", change))
    with pytest.raises(ConfigError) as refused, source.loaded():
        pass
    for word in named:
        assert word in str(refused.value)


def test_a_model_without_its_head_is_inspected_and_not_scored(llama, tmp_path):
    options = changed(llama, tmp_path / "model", lambda weights: weights.pop("lm_head.weight"))
    with open_folder(options).loaded() as run:
        run(torch.arange(128), lambda given: None)
    with pytest.raises(ConfigError, match=r"has no lm_head\.weight"):
        with open_folder(options).loaded(scored=True):
            pass


def test_a_gguf_file_that_is_cut_off(tmp_path):
    """In its header or in its tensors: one error, before a model is built of the rest."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string("general.description", "a" * 99)
    writer.add_tensor("token_embd.weight", np.ones((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = file.read_bytes()
    for length in (0, 4, 60, len(whole) // 2):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=rf"{file}, which gguf cannot read \("):
            open_gguf(ModelOptions(file, torch.device("cpu"), torch.float32))
