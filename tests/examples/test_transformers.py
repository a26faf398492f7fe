# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The scripts of examples/transformers, with a tiny model on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", "5.10", reason="the scripts need transformers")
pytest.importorskip("accelerate", "1.12", reason="transformers' Trainer needs accelerate")
pytest.importorskip("datasets", reason="the scripts read data by datasets")

from tests.support.ranks import run_ranks
from tests.support.trainer_cases import tokenizer
from tests.support.transformers_cases import small_model

SCRIPTS = Path(__file__).parents[2] / "examples/transformers"
NAMES = ("shared", "finetune", "sft")
LENGTH, POSITIONS = 320, 512
TEMPLATE = (
    "{% for each in messages %}{% if each.role == 'assistant' %}> {% generation %}{{ each.content }}\n"
    "{% endgeneration %}{% else %}{{ each.content }}\n{% endif %}{% endfor %}"
)
WORDS = Path(json.__file__).read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, texts and conversations."""
    made = tmp_path_factory.mktemp("given")
    sizes = dict(num_hidden_layers=1, vocab_size=256, max_position_embeddings=POSITIONS)
    small_model("qwen3", tie_word_embeddings=True, **sizes).bfloat16().save_pretrained(
        made / "model"
    )
    words = tokenizer()
    words.save_pretrained(made / "model")
    small_model(**sizes).save_pretrained(made / "chat")
    words.chat_template = TEMPLATE
    words.save_pretrained(made / "chat")
    texts = [WORDS[begin : begin + 130] for begin in range(0, 3900, 130)]
    write_rows(made / "texts.jsonl", [dict(text=text) for text in texts])
    turns = [
        [dict(role="user", content=a), dict(role="assistant", content=b)]
        for a, b in zip(texts[::2], texts[1::2])
    ]
    write_rows(made / "chat.jsonl", [dict(messages=each) for each in turns])
    write_rows(made / "blank.jsonl", [dict(text="")])
    (made / "empty.txt").write_text("")
    (made / "notes.md").write_text(WORDS)
    (made / "broken.jsonl").write_text('{"text": \n')
    (made / "one.txt").write_text(WORDS[:1000])
    return made


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Import a script as python does that is given its path."""
    import datasets
    from accelerate.state import AcceleratorState

    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def options(model, data, output, **more):
    words = [model, data, "--output", output, "--length", LENGTH, "--target-recall", 0.6]
    for name, value in more.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return list(map(str, words))


def log_of(output, step):
    state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def assert_logged(entries, *names):
    for entry in entries:
        assert entry["loss"] > 0
        for name in ("mtraining_density", "mtraining_recall"):
            assert 0 < entry[name] < 1 + 1e-5  # recall is a quotient of two float32 sums
        for name in names:
            assert entry[name] > 0


def test_finetune(folder, script, tmp_path):
    """It logs, saves what loads, and goes on from a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    main = script("finetune").main
    output = tmp_path / "out"
    given = folder / "model", folder / "texts.jsonl", output
    more = dict(length=640, rope_factor=2, batch=2, learning_rate=1e-3)
    main(options(*given, steps=1, **more))
    main(options(*given, steps=2, resume=True, offload=True, **more))
    log = log_of(output, 2)
    assert [entry["step"] for entry in log] == [1, 2]
    assert_logged(log, "tokens_per_second")
    before = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == torch.bfloat16 and model.config.use_cache
    assert model.config.max_position_embeddings == 1024
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 2)
    assert rope["original_max_position_embeddings"] == POSITIONS
    weights = [each.get_input_embeddings().weight for each in (before, model)]
    assert not torch.equal(*weights)
    assert len(AutoTokenizer.from_pretrained(output)("ab").input_ids) == 2
    checkpoint = AutoModelForCausalLM.from_pretrained(output / "checkpoint-2", dtype="auto")
    assert checkpoint.dtype == torch.float32


def test_tensorboard_has_what_the_log_has(folder, script, tmp_path):
    pytest.importorskip("tensorboard", reason="its files are read by it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = folder / "model", folder / "texts.jsonl", tmp_path
    script("finetune").main(options(*given, steps=1, report_to="tensorboard"))
    (entry,) = log_of(tmp_path, 1)
    (file,) = tmp_path.rglob("*.tfevents.*")
    found = EventAccumulator(str(file)).Reload()
    for name in ("loss", "mtraining_density", "mtraining_recall", "mtraining_price"):
        assert [each.value for each in found.Scalars(f"train/{name}")] == pytest.approx(
            [entry[name]]
        )


def test_finetune_dense(folder, script, tmp_path):
    script("finetune").main(
        options(folder / "model", folder / "texts.jsonl", tmp_path / "out", steps=1, dense=True)
    )
    (entry,) = log_of(tmp_path / "out", 1)
    assert entry["loss"] > 0 and "mtraining_density" not in entry


def train_rank(rank, world, words):
    import datasets
    from accelerate.state import AcceleratorState

    from tests.support.sequence_trainers import allow_cpu

    AcceleratorState._reset_state(reset_partial_state=True)
    allow_cpu()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    datasets.config.HF_DATASETS_CACHE = Path(words[3]) / "cache"
    sys.path.insert(0, str(SCRIPTS))
    importlib.import_module("finetune").main(words)


@pytest.mark.slow
def test_ranks_that_share_a_sequence_train_as_one(folder, script, tmp_path):
    from transformers import AutoModelForCausalLM

    given = folder / "model", folder / "texts.jsonl"
    more = dict(steps=2, learning_rate=1e-3)
    script("finetune").main(options(*given, tmp_path / "one", **more))
    run_ranks(2, train_rank, options(*given, tmp_path / "two", offload=True, **more))
    names = ("loss", "grad_norm", "mtraining_density", "mtraining_recall")
    one, two = (
        [[entry[name] for name in names] for entry in log_of(tmp_path / place, 2)]
        for place in ("one", "two")
    )
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-4, atol=1e-4)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / place) for place in ("one", "two")]
    for whole, shared in zip(*(model.state_dict().values() for model in models)):
        torch.testing.assert_close(shared, whole, rtol=0.01, atol=1e-3)


def test_documents_are_cut_and_kept_apart(script):
    from datasets import Dataset

    rows = [[1, 2, 3], [4] * 9, [], [5, 6]]
    documents = Dataset.from_dict(dict(input_ids=rows, length=[len(row) for row in rows]))
    packed = script("finetune").Packed(documents.with_format("numpy"), 5)
    first, second = packed
    assert len(packed) == 2  # the last four tokens are less than a sequence
    assert first["input_ids"].tolist() == [1, 2, 3, 4, 4]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert first["labels"].tolist() == [-100, 2, 3, -100, 4]
    assert second["input_ids"].tolist() == [4] * 5
    assert second["position_ids"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rank", (0, 8), ids=("all weights", "lora"))
def test_sft(rank, folder, script, tmp_path):
    pytest.importorskip("trl", "1.1", reason="sft.py trains by TRL")
    if rank:
        pytest.importorskip("peft", reason="LoRA is peft's")
    given = folder / "chat", folder / "chat.jsonl"
    script("sft").main(options(*given, tmp_path / "out", steps=2, lora=rank, length=POSITIONS))
    assert_logged(log_of(tmp_path / "out", 2))
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert ("adapter_model.safetensors" if rank else "model.safetensors") in saved
    assert {"tokenizer.json", "chat_template.jinja"} <= saved


WRONG = [
    (dict(data="nowhere.jsonl"), "there is no .*nowhere.jsonl"),
    (dict(data="notes.md"), "notes.md ends in none of .jsonl"),
    (dict(data="empty.txt"), "empty.txt is empty"),
    (dict(data="blank.jsonl"), "blank.jsonl has no row with something in 'text'"),
    (dict(data="broken.jsonl"), "broken.jsonl cannot be read as a data set: "),
    (dict(data="chat.jsonl"), "chat.jsonl has no column 'text', but messages"),
    (dict(data="one.txt", length=4096, rope_factor=8), "has 1[0-9]+ tokens, fewer than the 4096"),
    (dict(model="nowhere"), "nowhere is no model that can be read: "),
    (dict(length="1K"), "1024, but .* has 512 positions: give --rope-factor 2 to extend"),
    (dict(length="2K", rope_factor=2), "has 1024 positions: give --rope-factor 4 to extend"),
    (dict(rope_factor=0.5), "--rope-factor is 0.5: give a factor above 1"),
    (dict(length="long"), "argument --length: 'long' is no number of tokens such as"),
    (dict(length="0"), "argument --length: '0' is no number"),
    (dict(target_recall=1.5), "--target-recall is 1.5"),
    (dict(steps=0), "argument --steps: '0' is no number above 0"),
    (dict(sequence_ranks=2), "--sequence-ranks is 2, which does not divide the 1 ranks"),
    (dict(resume=True), "there is no checkpoint in .*out: leave --resume out"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_is_wrong_is_named(given, message, folder, script, tmp_path, capsys):
    places = dict(model="model", data="texts.jsonl") | given
    model, data = (folder / places.pop(name) for name in ("model", "data"))
    with pytest.raises(SystemExit) as ended:
        script("finetune").main(options(model, data, tmp_path / "out", **places))
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert re.search(f"error: .*{message}", last), last


def test_checkpoints_are_not_overwritten(folder, script, tmp_path, capsys):
    (tmp_path / "checkpoint-3").mkdir()
    words = options(folder / "model", folder / "texts.jsonl", tmp_path)
    with pytest.raises(SystemExit):
        script("finetune").main(words)
    assert "checkpoint-3: give --resume to go on from it" in capsys.readouterr().err
    (tmp_path / "checkpoint-3/pytorch_model_fsdp.bin").touch()
    with pytest.raises(SystemExit):
        script("finetune").main([*words, "--resume"])
    assert "checkpoint-3 is of a run on several GPUs: go on as" in capsys.readouterr().err


CHATS = [
    (dict(model="model"), "has no chat template: give a chat model"),
    (dict(data="texts.jsonl"), "texts.jsonl has no column 'messages', but text"),
    (dict(lora=-1), "--lora is -1: give a rank, or 0"),
    (dict(rope_factor=2, lora=8), "--rope-factor is given with --lora"),
    (dict(data="nowhere.jsonl"), "there is no .*nowhere.jsonl"),
]


@pytest.mark.parametrize(("given", "message"), CHATS)
def test_what_is_wrong_with_a_chat_is_named(given, message, folder, script, tmp_path, capsys):
    pytest.importorskip("trl", "1.1", reason="sft.py trains by TRL")
    places = dict(model="chat", data="chat.jsonl", lora=0) | given
    model, data = (folder / places.pop(name) for name in ("model", "data"))
    with pytest.raises(SystemExit) as ended:
        script("sft").main(options(model, data, tmp_path / "out", **places))
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert re.search(f"error: .*{message}", last), last


def test_a_template_without_marks_is_refused(script):
    pytest.importorskip("trl", "1.1", reason="sft.py trains by TRL")
    from megatron_mtraining import ConfigError

    words = tokenizer()
    words.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="no {% generation %} around what the assistant says"):
        script("sft").check_template(words, "model")


def shown():
    """The page's commands, by their script."""
    found = re.findall(
        r"^    (?:python|torchrun --nproc-per-node \d) examples/transformers/(\w+)\.py (.*)$",
        (SCRIPTS / "README.md").read_text(),
        re.MULTILINE,
    )
    assert len(found) >= 7
    return found


@pytest.mark.parametrize(("name", "words"), shown())
def test_options_of_the_page_exist(name, words, script):
    if name == "sft":
        pytest.importorskip("trl", "1.1", reason="sft.py trains by TRL")
    options = script(name).options_parser().parse_args(words.split())
    assert options.length >= 32768


LENGTHS = {"32768": 32768, "128K": 131072, "128k": 131072, "1M": 1048576}


def test_lengths(script):
    tokens = script("shared").tokens
    assert {words: tokens(words) for words in LENGTHS} == LENGTHS
    for words in ("", "K", "1.5K", "-1", "1G", "1 K"):
        with pytest.raises(ArgumentTypeError):
            tokens(words)
