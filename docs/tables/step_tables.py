# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Whole training steps, training beside dense attention, output layer and loss."""

from __future__ import annotations

from .common import Row, last, last_two, percent, rows, source, table, tokens

SETTING = ("model", "world", "seq", "attention", "vertical", "price", "slash_cap", "weights")
SETTING += ("backward_threshold", "backward_sampling")
"""What the rows of one setting have in common."""


def timed() -> list[Row]:
    """Rows whose time is one of steps. Those that counted the second line of Megatron's log, the mean of the
    first two steps, have one step of warm-up, and do not list the times of their steps."""
    return [row for row in rows("pretrain") if row.get("warm_up") != 1 or "step_ms" in row]


def _measured() -> list[Row]:
    """Steps, without the variants that only compare flags of Megatron's."""

    def counts(row):
        return (
            row["model"] == "qwen2.5-3b"
            and "loss_chunk" in row
            # At a price, rows of random weights that name no cap had one below a trained model's density.
            and not (row.get("price") and row["weights"] == "random" and not row.get("slash_cap"))
            and "--overlap" not in row["command"]
        )

    # Rows from before there were trained weights do not name their weights.
    named = [{"weights": "random", **row} for row in timed()]
    return [row for row in named if counts(row)]


def steps_rows() -> list[Row]:
    """A row for each setting."""
    return list(last(_measured(), *SETTING).values())


def density_of(row: Row) -> str:
    """Density, and that of a pruned backward if something was pruned."""
    said, backward = percent(row["density"]), row.get("backward_density")
    if backward and backward < row["density"]:
        said += f", backward {percent(backward)}"
    return said


def dense_of(row: Row) -> Row | None:
    """The dense step that was measured beside a step: the same commit, model, length and GPUs."""
    same = ("commit", "model", "seq", "world")
    for other in reversed(timed()):
        if other["attention"] == "fused" and all(other[name] == row[name] for name in same):
            return other
    return None


def over_dense(row: Row) -> float:
    """The time of the dense step measured beside a step, over the step's."""
    return dense_of(row)["iter_ms"] / row["iter_ms"]


def step(seq: int, world: int = 4, vertical: int = 1000) -> Row:
    """The sparse step of a length, number of GPUs and columns, of random weights."""
    wanted = (seq, world, "mtraining", vertical, "random", None)
    fields = ("seq", "world", "attention", "vertical", "weights", "backward_threshold")
    [row] = [row for row in steps_rows() if tuple(map(row.get, fields)) == wanted]
    return row


def step_at_price(seq: int, world: int = 4) -> Row:
    """The last step of random weights with a dense one beside it, capped at about the density of a trained
    model."""
    found = [
        row for row in steps_rows()
        if (row["seq"], row["world"], row["weights"]) == (seq, world, "random")
        and row["price"] and row["density"] > 0.1 and dense_of(row)
    ]  # fmt: skip
    return found[-1]


def attention_of(row: Row) -> str:
    if row["attention"] == "fused":
        return "dense, Transformer Engine" + (", loss in chunks" if row["loss_chunk"] else "")
    said = f"price {row['price']}"
    if row["vertical"]:
        said = f"{row['vertical']} columns, {row['slash']} diagonals"
    elif row.get("weights", "random") == "random" and row["slash_cap"] is not None:
        said += f", at most 1000 columns and {row['slash_cap']} slashes"
    if row.get("weights", "random") != "random":
        said += f", weights {row['weights']}"
    if row.get("backward_threshold"):
        said += f", backward threshold {row['backward_threshold']:g}"
        said += ", sampling" if row["backward_sampling"] else ""
    if "--mtraining-recompute-attention" in row["command"]:
        said += ", recomputed"
    return said


def steps() -> str:
    body, used = [], []
    order = sorted(steps_rows(), key=lambda row: (-row["seq"], row["iter_ms"]))
    for row in order:
        dense = dense_of(row) if row["attention"] == "mtraining" else None
        used.append(row)
        seconds = row["iter_ms"] / 1000
        ratio = f"**{over_dense(row):.1f}x**" if dense else ""
        recall = "1" if row["attention"] == "fused" else f"{row['recall']:.2f}"
        body.append(
            [
                row["world"],
                tokens(row["seq"]),
                attention_of(row),
                density_of(row),
                recall,
                f"{seconds:.2f}" if seconds < 50 else f"{seconds:.1f}",
                ratio,
                f"{row['max_alloc_gb']:.1f}",
                row["commit"],
            ]
        )
    header = ["GPUs", "tokens", "attention", "density", "recall", "s / step", "over dense"]
    return table([*header, "peak GiB", "commit"], body) + source(used, "pretrain")


def steps_before() -> str:
    """Steps over four GPUs that several sessions have measured: the last two of each."""
    pairs = last_two((row for row in _measured() if row["world"] == 4), *SETTING)
    body = []
    for before, now in pairs:
        seconds = [f"{row['iter_ms'] / 1000:.2f} ({row['commit']})" for row in (before, now)]
        change = now["iter_ms"] / before["iter_ms"] - 1
        body.append([tokens(now["seq"]), attention_of(now), *seconds, f"{100 * change:+.1f}%"])
    header = ["tokens", "attention", "before, s / step", "last, s / step", "change"]
    return table(header, body) + source([row for pair in pairs for row in pair], "pretrain")


PARTS = ("attention", "layers", "loss", "optimizer", "communication", "waiting")


def profiled() -> list[Row]:
    found = [row for row in rows("pretrain") if row.get("breakdown")]
    fields = ("model", "world", "seq", "attention", "vertical")
    return sorted(
        last(found, *fields).values(), key=lambda row: (row["model"], -row["seq"], row["density"])
    )


def breakdown() -> str:
    body = [
        [
            f"{row['model'].title()}, {tokens(row['seq'])}",
            row["world"],
            attention_of(row),
            percent(row["density"]),
        ]
        + [f"{row['breakdown'][part] / 1000:.2f}" for part in PARTS]
        + [row["commit"]]
        for row in profiled()
    ]
    header = ["setting", "GPUs", "attention", "density", *PARTS, "commit"]
    return table(header, body) + source(profiled(), "pretrain")


# Losses over layouts of ranks


def layouts() -> str:
    found = list(last(rows("layouts"), "layout").values())
    body = []
    for row in found:
        like = row["like"] or ""
        worst = "" if row["worst"] is None else f"{100 * row['worst']:.3f}%"
        same = "every digit" if row["equal"] else "yes" if row["within"] else "**no**"
        body.append(
            [
                row["layout"],
                row["world"],
                "dense, Transformer Engine" if row["attention"] == "fused" else "sparse",
                f"{row['losses'][0]:.4f}, {row['losses'][-1]:.4f}",
                like,
                worst,
                same if like else "",
            ]
        )
    header = ["layout", "GPUs", "attention", "loss, first and last step", "compared with"]
    header += ["largest difference", "equal"]
    return table(header, body) + source(found, "layouts")


# Training beside dense

RUNS = {
    "dense": "dense",
    "overrides": "price, a target recall for each head from `inspect --sensitivity heads` (mean 0.95)",
    "price": "price, target recall 0.95 for each head",
    "coverage": "coverage, last 64 rows (published)",
}
TRAINED = "0fe1024"
"""The commit of the run with all four policies."""


def trained() -> dict[str, Row]:
    found = [row for row in rows("parity") if row["commit"] == TRAINED]
    return {("overrides" if row.get("overrides") else row["run"]): row for row in found}


def signed(share: float) -> str:
    return f"{100 * share:+.2f}%"


def training() -> str:
    found = trained()
    dense = found["dense"]["held_out_after"]
    body = []
    for name, label in RUNS.items():
        row = found[name]
        over = ["", "", ""]
        if name != "dense":
            judged = row["held_out_after_dense"] / dense - 1
            over = [
                signed(row["loss_last_50_over_dense"]),
                signed(row["held_out_after_over_dense"]),
                signed(judged),
            ]
        body.append(
            [
                label,
                percent(row["density"]),
                f"{row['recall']:.3f}",
                f"{row['loss_last_50']:.4f} {over[0]}",
                f"{row['held_out_after']:.4f} {over[1]}",
                f"{row['held_out_after_dense']:.4f} {over[2]}",
            ]
        )
    header = ["run", "density", "recall", "training loss, last 50 steps", "held-out, own attention"]
    return table([*header, "held-out, dense attention"], body) + source(found.values(), "parity")


def training_earlier() -> str:
    """Runs of other commits, each over the dense run of its own."""
    body, used = [], []
    for row in rows("parity"):
        if row["run"] == "dense" or row["commit"] == TRAINED:
            continue
        used.append(row)
        what = row["run"]
        if row.get("overrides"):
            what += ", a target for each layer"
        elif row.get("target_recall"):
            what += f", target recall {row['target_recall']} for each {row['target_scope']}"
        elif row["coverage"]:
            what += f" {row['coverage']:.2f}, last 64 rows"
        elif row["price"]:
            what += ", target recall 0.95 for the model"
        if row.get("dense_steps"):
            what += f", the first {row['dense_steps']} steps dense"
        positions = "YaRN 2" if row.get("yarn") else "8K, as they are"
        body.append(
            [
                what,
                positions,
                percent(row["density"]),
                f"{row['recall']:.3f}",
                signed(row["loss_last_50_over_dense"]),
                signed(row["held_out_after_over_dense"]),
                row["commit"],
            ]
        )
    header = [
        "run",
        "positions",
        "density",
        "recall",
        "training loss",
        "held-out, own attention",
        "commit",
    ]
    return table(header, body) + source(used, "parity")


# Output layer and loss


def loss() -> str:
    found = [row for row in rows("loss") if row["impl"].startswith("megatron")]
    commit = found[-1]["commit"]
    found = [row for row in rows("loss") if row["commit"] == commit]
    names = {
        "chunked": "in chunks of 4096", "megatron": "Megatron", "megatron_fused": "Megatron, fused",
        "megatron_te": "Megatron, fused by Transformer Engine",
    }  # fmt: skip
    body = []
    for (impl, main_grad), name in {
        (row["impl"], row["main_grad"]): names[row["impl"]] for row in found
    }.items():
        cells = []
        for length in (16384, 131072):
            [row] = [
                r
                for r in found
                if (r["impl"], r["main_grad"], r["tokens"]) == (impl, main_grad, length)
            ]
            if row["out_of_memory"]:
                cells += ["out of memory", ""]
            else:
                cells += [f"{row['fwd_ms']:.1f} / {row['bwd_ms']:.1f}", f"{row['peak_gib']:.1f}"]
        body.append([name + (", into `main_grad`" if main_grad else ""), *cells])
    header = ["output layer and loss", "16K tokens: ms", "GiB", "128K tokens: ms", "GiB"]
    return table(header, body) + source(found, "loss")
