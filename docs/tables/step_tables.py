# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Whole training steps, training beside dense attention, output layer and loss."""

from __future__ import annotations

from collections.abc import Callable

from .common import Row, Table, cell, last, rows

SETTING = ("model", "world", "seq", "gpu", "attention", "vertical", "price", "slash_cap", "weights")
SETTING += ("backward_threshold", "recompute")
"""What the rows of one setting have in common."""
TWICE, KEPT = "twice", "output kept"
"""How recomputation treats attention: its forward runs again, or its output is kept."""
PEAK = 989e12
"""Products of an H100 or H200 in bf16: FLOP/s, dense."""
LAYERS, HEADS, DIM = 36, 16, 128
"""Of Qwen2.5-3B."""
WEIGHTS = 36 * 2048 * (2 * 2048 + 2 * 256 + 3 * 11008) + 2048 * 151936
"""Of its matrices, with the output layer and without the embedding."""


def timed() -> list[Row]:
    """Rows whose time is one of steps. Those that counted the second line of Megatron's log, the mean of the
    first two steps, have one step of warm-up, and do not list the times of their steps."""
    return [row for row in rows("pretrain") if row.get("warm_up") != 1 or "step_ms" in row]


def recompute_of(row: Row) -> str:
    """How recomputation treated attention. Dense rows from before it was recorded ran it twice."""
    if row["attention"] == "fused":
        return row.get("dense_recompute") or TWICE
    return TWICE if "--mtraining-recompute-attention" in row["command"] else KEPT


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
    return [{**row, "recompute": recompute_of(row)} for row in named if counts(row)]


def steps_rows() -> list[Row]:
    """A row for each setting."""
    return last(_measured(), *SETTING)


def density_of(row: Row) -> str:
    """Density, and that of a pruned backward if something was pruned."""
    pruned = row.get("backward_density") and row["backward_density"] < row["density"]
    return cell("{density:share}" + (", backward {backward_density:share}" if pruned else ""), row)


def dense_of(row: Row, recompute: str) -> Row | None:
    """Transformer Engine's dense step of the same model, length, GPUs and versions, with a policy of
    recomputation. Of the same commit, if there is one; other commits change nothing in it."""
    same = ("model", "seq", "world", "gpu", "torch", "versions")
    found = [
        other for other in timed()
        if other["attention"] == "fused" and recompute_of(other) == recompute
        and all(other.get(name) == row.get(name) for name in same)
    ]  # fmt: skip
    own = [other for other in found if other["commit"] == row["commit"]]
    return (own or found or [None])[-1]


def kept_estimate(row: Row) -> float | None:
    """Seconds of the dense step that keeps attention's output, from the one that runs it twice: without one
    forward of Transformer Engine's ring in each layer."""
    dense = dense_of(row, TWICE)
    ring = [
        other for other in rows("rings")
        if (other["impl"], other["seq"], other["world"], other["gpu"], other["hosts"])
        == ("te_p2p", row["seq"], row["world"], row["gpu"], 1) and "all distances" in other["case"]
        and "NVTE_BATCH" not in other["command"]
    ]  # fmt: skip
    if dense is None or not ring:
        return None
    return (dense["iter_ms"] - LAYERS * ring[-1]["fwd_ms"]) / 1000


def kept_seconds(row: Row) -> tuple[float, bool] | None:
    """Seconds of the dense step that keeps attention's output, and whether they are measured or estimated."""
    if dense := dense_of(row, KEPT):
        return dense["iter_ms"] / 1000, True
    estimate = kept_estimate(row)
    return None if estimate is None else (estimate, False)


def seconds_of(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 50 else f"{seconds:.1f}"


def over_dense(row: Row) -> float:
    """The dense step with the same policy of recomputation over a step."""
    if recompute_of(row) == TWICE:
        return dense_of(row, TWICE)["iter_ms"] / row["iter_ms"]
    return kept_seconds(row)[0] * 1000 / row["iter_ms"]


def ratio(row: Row, recompute: str) -> str:
    """The dense step with a policy of recomputation over a step; "~" before it if it is estimated."""
    if recompute == TWICE:
        dense = dense_of(row, TWICE)
        return f"{dense['iter_ms'] / row['iter_ms']:.1f}x" if dense else ""
    found = kept_seconds(row)
    if found is None:
        return ""
    return f"{'' if found[1] else '~'}{found[0] * 1000 / row['iter_ms']:.1f}x"


def _best(found: list[Row]) -> Row:
    """Of rows that keep the output, the last with a measured dense step that does; else the last."""
    found = [row for row in found if recompute_of(row) == KEPT]
    return max(enumerate(found), key=lambda each: (dense_of(each[1], KEPT) is not None, each[0]))[1]


def step(seq: int, world: int = 4, vertical: int = 1000, gpu: str | None = None) -> Row:
    """The sparse step of a length, number of GPUs and columns, of random weights; of a GPU, or of any."""
    wanted = (seq, world, "mtraining", vertical, "random", None)
    fields = ("seq", "world", "attention", "vertical", "weights", "backward_threshold")
    return _best([
        row for row in steps_rows()
        if tuple(map(row.get, fields)) == wanted and gpu in (None, row["gpu"])
    ])  # fmt: skip


def step_at_price(seq: int, world: int = 4, gpu: str | None = None) -> Row:
    """The step of random weights, capped at about the density of a trained model; of a GPU, or of any."""
    return _best([
        row for row in steps_rows()
        if (row["seq"], row["world"], row["weights"]) == (seq, world, "random")
        and gpu in (None, row["gpu"]) and row["price"] and row["density"] > 0.1
        and (dense_of(row, KEPT) or dense_of(row, TWICE))
    ])  # fmt: skip


def of_two_gpus(model: str, seq: int) -> Row:
    """The newest step of this project's over two GPUs."""
    return [
        row for row in steps_rows()
        if (row["model"], row["seq"], row["world"]) == (model, seq, 2) and row["price"]
    ][-1]  # fmt: skip


def tokens_a_second(row: Row) -> float:
    """Of one GPU."""
    return row["seq"] * row["batch"] / row["world"] / row["iter_ms"] * 1000


def mfu(row: Row) -> float:
    """Model FLOPs of a step of Qwen2.5-3B's shape over what its GPUs could compute: products with weights,
    and attention of the selected pairs; nothing that is computed again."""
    pairs = row["density"] * row["seq"] * (row["seq"] + 1) / 2
    flops = 6 * WEIGHTS * row["seq"] + 12 * DIM * HEADS * LAYERS * pairs
    return flops * row["batch"] / (row["iter_ms"] / 1000 * row["world"] * PEAK)


def attention_of(row: Row) -> str:
    if row["attention"] == "fused":
        said = "dense, Transformer Engine" + (", loss in chunks" if row["loss_chunk"] else "")
        return f"{said}; {'run twice' if recompute_of(row) == TWICE else recompute_of(row)}"
    said = f"price {row['price']}"
    if row["vertical"]:
        said = f"{row['vertical']} columns, {row['slash']} diagonals"
    elif row["price"] == 0:
        said = "dense, this package"
    elif row.get("target_recall"):
        said = f"target recall {row['target_recall']}"
    elif row.get("schedule"):
        said = f"schedule {row['schedule']}"
    elif row.get("weights", "random") == "random" and row["slash_cap"] is not None:
        said += f", at most 1000 columns and {row['slash_cap']} slashes"
    if row.get("weights", "random") != "random":
        said += ", trained weights"
    if row.get("backward_threshold"):
        said += f", backward threshold {row['backward_threshold']:g}"
    return said + ("; run twice" if recompute_of(row) == TWICE else "")


def _steps_of(wanted: Callable[[Row], bool]) -> Table:
    def over(recompute: str, text: str) -> Callable[[Row], str]:
        def said(row: Row) -> str:
            is_sparse = row["attention"] == "mtraining" and row["price"] != 0
            ratio_ = (
                ratio(row, recompute)
                if is_sparse and recompute in (TWICE, row["recompute"])
                else ""
            )
            return ratio_ and text.format(ratio_)

        return said

    return Table(
        "pretrain",
        {
            "tokens, GPUs": "{seq:K}, {world} {gpu:gpu}",
            "attention": attention_of,
            "density": density_of,
            "recall": lambda row: "1" if row["recall"] is None else cell("{recall:.2f}", row),
            "s / step": lambda row: seconds_of(row["iter_ms"] / 1000),
            "over dense, output kept": over(KEPT, "**{}**"),
            "over dense, run twice": over(TWICE, "{}"),
            "tokens/s/GPU": lambda row: f"{tokens_a_second(row):,.0f}",
            "MFU": lambda row: f"{100 * mfu(row):.0f}%",
            "peak GiB": "{max_alloc_gb:.1f}",
        },
        find=lambda _: [row for row in steps_rows() if wanted(row)],
        order=lambda row: (-row["seq"], row["gpu"], row["iter_ms"]),
    )


steps = _steps_of(lambda row: row["world"] > 2)
steps_two = _steps_of(lambda row: row["world"] == 2)


def _part(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row['breakdown'][name] / 1000:.2f}"


PARTS = ("attention", "layers", "loss", "optimizer", "communication", "waiting")
breakdown = Table(
    "pretrain",
    {
        "setting": lambda row: row["model"].title() + cell(", {seq:K}", row),
        "GPUs": "{world}",
        "run": attention_of,
        "density": "{density:share}",
        **{name: _part(name) for name in PARTS},
        "commit": "{commit}",
    },
    where=lambda row: row.get("breakdown"),
    newest=("model", "world", "seq", "attention", "vertical", "target_recall", "schedule"),
    order=lambda row: (row["model"], -row["seq"], row["density"]),
)


def _apart(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.1e}" if row.get("like") else ""


sft = Table(
    "sft",
    {
        "run": "{label}",
        "tokens": "{seq:K}",
        "density": "{density:share}",
        "ms / step": lambda row: f"{row['iter_ms']:.0f}" if row["alone"] else "",
        "mean loss of the steps": lambda row: f"{sum(row['losses']) / len(row['losses']):.4f}",
        "compared with": lambda row: row.get("like"),
        "first step": _apart("worst_first"),
        "its worst document": _apart("worst_document"),
        "worst step": _apart("worst"),
    },
    where=lambda row: row["label"] != "start" and row["device"] == "cuda",
    newest=("label", "gpu"),
)
"""Packed conversations."""


def _faster(row: Row) -> str:
    same = ("model", "layers", "length", "gpus", "steps", "gpu", "commit")
    dense = [
        each
        for each in rows("sequences")
        if each["setting"] == "dense"
        and all(each[name] == row[name] for name in same)
        and each.get("offload", False) == row.get("offload", False)
    ]
    return f"**{dense[-1]['step_s'] / row['step_s']:.1f}x**" if row["densities"] and dense else ""


def _at_end(name: str, how: str) -> Callable[[Row], str]:
    return lambda row: cell("{" + how + "}", {name: row[name][-1]}) if row[name] else ""


sequences = Table(
    "sequences",
    {
        "tokens, GPUs": "{length:K}, {gpus}",
        "attention": lambda row: (
            "dense, PyTorch" if row["setting"] == "dense" else row["setting"].replace("_", " ")
        ),
        "density": _at_end("densities", "densities:share"),
        "recall": _at_end("recalls", "recalls:share"),
        "s / step": "{step_s:.2f}",
        "over dense": _faster,
        "tokens/s/GPU": "{tokens_per_s_gpu:,.0f}",
        "peak GiB": "{memory_gib:.1f}",
        "loss, first and last step": lambda row: f"{row['losses'][0]:.4f}, {row['losses'][-1]:.4f}",
    },
    where=lambda row: row["model"] == "coder.gguf",
    newest=("length", "setting", "gpus", "gpu"),
    order=lambda row: (row["length"], row["gpus"], row["setting"]),
)
"""Sequences that GPUs share, in transformers."""


def _projected(row: Row) -> str:
    """Seconds of a step of the whole model on 8 GPUs: of so many layers of one as others take."""
    if row["model"] != "qwen3-8b" or row["length"] < 2**20:
        return ""
    return f"{row['step_s'] * 36 / row['layers'] * row['gpus'] / 8:.0f}"


def _shapes(found: list[Row]) -> list[Row]:
    """The newest row of each case; rows from before there was a choice kept activations on the GPU."""
    cases = ({**row, "offload": row.get("offload", False)} for row in found)
    return last(cases, "model", "length", "setting", "gpus", "gpu", "offload")


def _offloaded(name: str) -> tuple[float, float]:
    """Of Qwen3-8B's layers at 1M tokens, with activations on the GPU and on the host."""
    found = _shapes(
        [row for row in rows("sequences") if row["length"] == 2**20 and row["gpus"] == 2]
    )
    by = {row["offload"]: row[name] for row in found if row["setting"] != "dense"}
    return by[False], by[True]


def _offload_gib() -> str:
    kept, offloaded = _offloaded("memory_gib")
    return f"{kept - offloaded:.0f} GiB"


def _offload_time() -> str:
    kept, offloaded = _offloaded("step_s")
    return f"{offloaded / kept - 1:.0%}"


OFFLOAD = {"offload_gib": _offload_gib, "offload_time": _offload_time}

sequences_shapes = Table(
    "sequences",
    {
        "shape, layers": "{model}, {layers}",
        "tokens": "{length:K}",
        "GPUs": "{gpus}",
        "attention": lambda row: (
            ("dense" if row["setting"] == "dense" else "pattern")
            + (", activations on the host" if row["offload"] else "")
        ),
        "density": _at_end("densities", "densities:share"),
        "s / step": "{step_s:.2f}",
        "over dense": _faster,
        "peak GiB": "{memory_gib:.1f}",
        "36 layers, 8 GPUs, projected: s / step": _projected,
    },
    # A run's first step also compiles.
    where=lambda row: row["model"] != "coder.gguf" and row["steps"] > 1,
    find=_shapes,
    order=lambda row: (row["model"], row["length"], row["gpus"]),
)
"""Time and memory of shapes with random weights."""


def _equal(row: Row) -> str:
    same = "every digit" if row["equal"] else "yes" if row["within"] else "**no**"
    return same if row["like"] else ""


layouts = Table(
    "layouts",
    {
        "layout": "{layout}",
        "GPUs": "{world}",
        "attention": lambda row: (
            "dense, Transformer Engine" if row["attention"] == "fused" else "sparse"
        ),
        "loss, first and last step": lambda row: f"{row['losses'][0]:.4f}, {row['losses'][-1]:.4f}",
        "compared with": "{like}",
        "largest difference": lambda row: (
            "" if row["worst"] is None else f"{100 * row['worst']:.3f}%"
        ),
        "equal": _equal,
    },
    newest=("layout",),
)


# Training beside dense

RUNS = {
    "dense": "dense",
    "overrides": "price, a target recall for each head from `inspect --sensitivity heads` (mean 0.95)",
    "price": "price, target recall 0.95 for each head",
    "coverage": "coverage, last 64 rows (published)",
}
TRAINED = "0fe1024"
"""The commit of the run with all four policies."""


def _runs(found: list[Row]) -> list[Row]:
    """The runs in order, with their losses over dense."""
    named = {("overrides" if row.get("overrides") else row["run"]): row for row in found}
    dense = named["dense"]["held_out_after"]
    return [
        {**named[name], "label": label, "judged": named[name].get("held_out_after_dense", dense) / dense - 1}
        for name, label in RUNS.items()
    ]  # fmt: skip


def _loss(field: str, over: str) -> Callable[[Row], str]:
    return lambda row: cell(
        f"{{{field}:.4f}}" + ("" if row["run"] == "dense" else f" {{{over}:over}}"), row
    )


training = Table(
    "parity",
    {
        "run": "{label}",
        "density": "{density:share}",
        "recall": "{recall:.3f}",
        "training loss, last 50 steps": _loss("loss_last_50", "loss_last_50_over_dense"),
        "held-out, own attention": _loss("held_out_after", "held_out_after_over_dense"),
        "held-out, dense attention": _loss("held_out_after_dense", "judged"),
    },
    where=lambda row: row["commit"] == TRAINED,
    find=_runs,
)


def _logging(attention: str = "mtraining") -> Row:
    return [row for row in rows("logging") if row["attention"] == attention][-1]


def _logged(attention: str = "mtraining") -> float:
    """Milliseconds that a logged step takes more."""
    return _logging(attention)["logged_ms"] - _logging(attention)["unlogged_ms"]


LOGGING = {
    "logging_step": lambda: cell("{x:.2f} s", x=_logging()["unlogged_ms"] / 1000),
    "logging_gpu": lambda: cell("{world} {gpu:gpu}", _logging()),
    "logging_ms": lambda: f"{_logged():.0f} ms",
    "logging_cost": lambda: f"{100 * _logged() / _logging()['unlogged_ms']:.1f}%",
    "logging_dense_ms": lambda: f"{_logged('fused'):.0f} ms",
}
"""What a logged step takes more."""
