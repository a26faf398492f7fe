# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Training parity: a real model continued on real code, dense and sparse, from the same weights and data.

One process, one GPU (or a CPU, to try it). The model is transformers', with float32 weights under bf16
autocast; in the sparse runs its attention is this package's. Runs, one after the other:

- ``dense``: PyTorch's causal attention.
- ``price``: policy price with ``--target-recall``: the prices follow the recall that is measured. With
  ``--dense-steps`` a run for each, whose first steps are dense.
- ``overrides``: the same with settings of layers and heads from files (``--overrides``), such as
  ``mtraining inspect --sensitivity`` writes.
- ``coverage``: the published way, the last 64 rows and a coverage, found on sequences from all of the data
  so that the density, before training, is that of the last run before (or of the default price).

Each run's row has the loss of every step (training text), and of held-out sequences before and after, with
the run's own attention and with dense attention; densities and recalls are means over layers, heads and
steps. Appends rows to ``results/parity.jsonl`` and draws ``results/parity.png``.

Positions that the model has not been trained on are reached with YaRN, as a user would (``--yarn``): without
it the losses are those of a model that is lost there, and what is compared is how fast it finds its way.

    python -m benchmarks.model.parity MODEL.gguf [--seq N] [--steps N] [--yarn F] [--text FILE ...] \
        [--run NAME ...]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.config import head_policies, settings_of_run
from megatron_mtraining.cp_group import CPGroup, RankGroup
from megatron_mtraining.models.tokenizer import open_tokenizer
from megatron_mtraining.pattern import Steering, search_pattern

from ..lib import record

ATTENTION = "mtraining_parity"
RUNS = ("dense", "price", "overrides", "coverage")


class Attention:
    """What all layers call in place of their attention, and what it has kept."""

    def __init__(self):
        self.config: MTrainingConfig | None = None  # None: dense
        self.steering: Steering | None = None
        self.density, self.recall, self.low = [], [], []

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **more):
        """``[b, h, s, d]`` in, ``[b, s, h, d]`` out."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast: RoPE leaves float32
        if self.config is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2).contiguous(), None
        query, key, value = (t.permute(2, 0, 1, 3).contiguous() for t in (query, key, value))
        price, layer, count = None, module.layer_idx, query.shape[2]
        if self.steering is not None:
            price = self.steering.price(query.device, layer, 0, count)
        policies = head_policies(self.config, layer, None, count)
        found = attend(
            query, key, value, config=self.config, softmax_scale=scaling, price=price,
            head_policies=policies,
        )  # fmt: skip
        density, recall = found.index.density(), found.index.recall
        self.density.append(density.mean())
        recall = torch.ones_like(density) if recall is None else recall
        self.recall.append(recall.mean())
        self.low.append((recall < 0.9).float().mean())
        if self.steering is not None and module.training:
            self.steering.observe(recall, layer)
        return found.out.transpose(0, 1), None

    def take(self) -> tuple[float, float, float]:
        """Mean density and recall since the last call (1 if all was dense), and the share of heads with a
        recall below 0.9."""
        lists = self.density, self.recall, self.low
        found = 1.0, 1.0, 0.0
        if self.low:
            found = torch.stack([torch.stack(each).mean() for each in lists]).tolist()
        self.density, self.recall, self.low = [], [], []
        return tuple(found)


def read_tokens(options) -> Tensor:
    """int64 ``[sequences, seq + 1]``: the training steps' and then the held-out ones."""
    encode = open_tokenizer(options.model).encode
    files = options.text or sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files += [] if options.text else sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    need = (options.steps + options.held_out) * options.seq + 1
    tokens: list[int] = []
    for file in files:
        if len(tokens) >= need:
            break
        tokens += list(encode(Path(file).read_text(encoding="utf-8", errors="ignore")))
    if len(tokens) < need:
        sys.exit(
            f"the text has {len(tokens)} tokens, but {need} are needed: give more --text, or fewer --steps"
        )
    flat = torch.tensor(tokens[:need])
    return flat.unfold(0, options.seq + 1, options.seq)


def load(options, attention: Attention):
    """The model, in float32, with ``attention`` in all layers, and YaRN if the sequence needs it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    if options.loaded is not None:  # as it was before it was trained
        model, weights = options.loaded
        model.load_state_dict(weights)
        return model
    folder, how = options.model, {"local_files_only": True}
    if options.model.is_file():
        folder, how["gguf_file"] = options.model.parent, options.model.name
    config = AutoConfig.from_pretrained(folder, **how)
    options.yarn = options.yarn or max(1.0, options.seq / config.max_position_embeddings)
    if options.yarn > 1:
        config.rope_parameters = {
            **config.rope_parameters, "rope_type": "yarn", "factor": options.yarn,
            "original_max_position_embeddings": config.max_position_embeddings,
        }  # fmt: skip
        config.max_position_embeddings = int(config.max_position_embeddings * options.yarn)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=ATTENTION, **how
    )
    model.to(options.device)
    options.loaded = model, {name: t.clone() for name, t in model.state_dict().items()}
    return model


def loss_of(model, tokens: Tensor, options) -> Tensor:
    """Mean cross entropy of one sequence ``[seq + 1]``."""
    tokens = tokens.to(options.device)
    with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
        hidden = model.base_model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
        losses = []
        for part, labels in zip(hidden.split(2048), tokens[1:].split(2048)):
            # A part's logits at a time; they are computed again in the backward.
            losses.append(
                torch.utils.checkpoint.checkpoint(
                    _part_loss, model, part, labels, use_reentrant=False
                )
            )
    return torch.stack(losses).sum() / (len(tokens) - 1)


def _part_loss(model, hidden, labels):
    logits = model.lm_head(hidden).float()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


@torch.no_grad()
def judged(model, held_out: Tensor, options) -> float:
    model.eval()
    loss = sum(loss_of(model, tokens, options).item() for tokens in held_out) / len(held_out)
    model.train()
    return loss


def coverage_at(
    density: float, layers: list[tuple[Tensor, Tensor]], base: MTrainingConfig
) -> float:
    """The coverage whose density, on these queries and keys, is the given one: by bisection."""
    low, high = 0.01, 0.999
    for _ in range(8):
        middle = (low + high) / 2
        config = base.with_policy(replace(base.policy, coverage=middle))
        found = [
            search_pattern(query, key, config, CPGroup(None), scale).density().mean()
            for query, key, scale in layers
        ]
        if torch.stack(found).mean().item() < density:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 4)


@torch.no_grad()
def queries_and_keys(model, attention: Attention, tokens: Tensor, options) -> list[tuple]:
    """Every fourth layer's, of one sequence under dense attention."""
    kept, number = [], [0]
    dense = attention.__class__.__call__

    def keep(module, query, key, value, mask, scaling=None, **more):
        if number[0] % 4 == 0:
            sides = (t.to(value.dtype).permute(2, 0, 1, 3).contiguous() for t in (query, key))
            kept.append((*sides, scaling))
        number[0] += 1
        return dense(attention, module, query, key, value, mask, scaling=scaling, **more)

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, keep)
    loss_of(model, tokens, options)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    return kept


def train(
    name: str, config: MTrainingConfig | None, dense_steps: int, tokens: Tensor, options
) -> dict:
    """One run, whose first ``dense_steps`` are dense."""
    torch.manual_seed(options.seed)
    attention = Attention()
    model = load(options, attention)
    held_out = tokens[options.steps :]
    before = judged(model, held_out, options)
    attention.config = config
    flat = {} if config is None else config.options()
    if flat.get("target_recall") is not None:
        shape = model.config.num_hidden_layers, model.config.num_attention_heads
        attention.steering = Steering(config, shape=shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    losses, kept, start = [], [], time.time()
    model.train()
    for step in range(options.steps):
        attention.config = config if step >= dense_steps else None
        rate = options.lr * min(1.0, (step + 1) / options.warm_up)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, tokens[step], options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if attention.steering is not None:
            attention.steering.advance(step + 1, RankGroup(None))
        losses.append(loss.item())
        kept.append(attention.take())
        if (step + 1) % 10 == 0 or step + 1 == options.steps:
            density, recall, _ = kept[-1]
            print(
                f"  {name} {step + 1:4d}: loss {losses[-1]:.4f}, density {density:.4f}, recall {recall:.4f}",
                flush=True,
            )
    attention.config = config
    own = judged(model, held_out, options)
    attention.take()
    attention.config = None
    late = kept[len(kept) // 2 :]
    return dict(
        run=name, model=options.model.name, seq=options.seq, yarn=options.yarn, steps=options.steps,
        lr=options.lr,
        held_out_before=round(before, 5), held_out_after=round(own, 5),
        held_out_after_dense=round(judged(model, held_out, options), 5),
        loss_last_50=round(sum(losses[-50:]) / len(losses[-50:]), 5),
        **mean_of(kept), **{f"{name}_late": value for name, value in mean_of(late).items()},
        overrides=flat.get("settings") and json.loads(Path(config.settings).read_text()),
        target_recall=flat.get("target_recall"), target_scope=flat.get("target_scope"),
        dense_steps=dense_steps if name == "price" else None,
        price=None if attention.steering is None else round(attention.steering.now(), 5),
        coverage=flat.get("coverage"),
        seconds=round(time.time() - start, 1), losses=[round(loss, 5) for loss in losses],
    )  # fmt: skip


def mean_of(kept: list[tuple[float, float, float]]) -> dict[str, float]:
    names = "density", "recall", "heads_below_0.9"
    return {name: round(sum(each) / len(each), 5) for name, each in zip(names, zip(*kept))}


def settings(options) -> list[tuple[str, MTrainingConfig | None, int]]:
    """The runs, what they attend with (None: dense), and how many of their first steps are dense."""
    common, found = dict(block_size=options.block_size), []
    for name in options.run:
        if name == "dense":
            found.append((name, None, 0))
        elif name == "coverage":
            config = MTrainingConfig.from_options(policy="coverage", estimator="last", **common)
            found.append((name, config, 0))
        else:
            scope = dict(target_scope=options.target_scope, **common)
            for target in options.target_recall if name == "price" else ():
                for steps in options.dense_steps:
                    config = MTrainingConfig.from_options(target_recall=target, **scope)
                    found.append((name, config, steps))
            for file in options.overrides if name == "overrides" else ():
                aim = dict(target_recall=options.target_recall[0], **scope)
                aim.update(settings_of_run(str(file)), settings=str(file))
                found.append((name, MTrainingConfig.from_options(**aim), 0))
    return found


def draw(path: Path, rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in rows:
        losses = torch.tensor(row["losses"])
        width = min(10, len(losses))
        smooth = losses.unfold(0, width, 1).mean(-1)
        label = row["run"] + (f" {row['target_recall']}" if row["target_recall"] else "")
        label += f": density {row['density']:.3f}, recall {row['recall']:.3f}"
        axes.plot(range(width, len(losses) + 1), smooth, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss, mean of 10 steps")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--yarn",
        type=float,
        help="default: from the positions that the model has to --seq; 1: none",
    )
    parser.add_argument("--held-out", type=int, default=8, help="held-out sequences")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target-recall", type=float, nargs="+", default=[0.95], help="a run of price for each"
    )
    parser.add_argument(
        "--dense-steps", type=int, nargs="+", default=[0],
        help="a run of price for each: steps at the start with dense attention",
    )  # fmt: skip
    parser.add_argument(
        "--overrides", type=Path, nargs="+", default=[],
        help="a run for each of these files, with the first target for what they leave out",
    )  # fmt: skip
    parser.add_argument("--target-scope", choices=("head", "model"), default="head")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument(
        "--text", type=Path, nargs="+", help="files; Python's own sources if not given"
    )
    parser.add_argument("--run", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "parity.jsonl")
    parser.set_defaults(loaded=None)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    tokens = read_tokens(options)
    rows = []
    for name, config, dense_steps in settings(options):
        if name == "coverage":
            attention = Attention()
            model = load(options, attention)
            layers = [
                layer
                for step in range(0, options.steps, -(-options.steps // 3))
                for layer in queries_and_keys(model, attention, tokens[step], options)
            ]
            before = [row["density"] for row in rows if row["run"] != "dense"]
            density = before[-1] if before else None
            if density is None:
                at = MTrainingConfig.from_options(block_size=options.block_size)
                found = [
                    search_pattern(q, k, at, CPGroup(None), s).density().mean()
                    for q, k, s in layers
                ]
                density = torch.stack(found).mean().item()
            coverage = coverage_at(density, layers, config)
            config = config.with_policy(replace(config.policy, coverage=coverage))
            del layers
        row = train(name, config, dense_steps, tokens, options)
        print({key: value for key, value in row.items() if key != "losses"}, flush=True)
        if not all(map(math.isfinite, row["losses"])):
            sys.exit(f"a loss of run {name} is not finite: its row is not kept")
        rows.append(row)
        dense = next((row for row in rows if row["run"] == "dense"), None)
        for figure in ("held_out_after", "loss_last_50") if dense is not None else ():
            row[f"{figure}_over_dense"] = round(row[figure] / dense[figure] - 1, 6)
        record.append(options.output, [row])  # now: a run that follows may be stopped
    draw(options.output.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
