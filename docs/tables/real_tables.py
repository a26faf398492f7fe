# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention on a trained model's own queries, keys and values, and what later tokens change."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.model import mean_cost
from benchmarks.model.frontier_rows import decay_of
from benchmarks.model.mean_cost import cases, share
from benchmarks.model.real_operands import SETTINGS

from . import frontier_tables
from .common import Columns, Row, Table, cell, grouped, last, mean, rows, values

THRESHOLD = 3


def real_cases() -> dict[tuple, list[Row]]:
    """By GPU, model, text, length, price and threshold: the newest row of each layer."""
    return cases(rows("real_operands"))


def _newest() -> dict[tuple, list[Row]]:
    """By model, text, length, price and threshold: the layers, of the last GPU that measured them."""
    return {key[1:]: layers for key, layers in real_cases().items()}


def _settings(_: list[Row]) -> list[Row]:
    """The usual prices, each with and without a threshold."""
    found = _newest()
    usual = dict.fromkeys(each["price"] for each in SETTINGS)
    return [
        dict(
            layers[0], used=layers, pruned=found.get((model, text, seq, price, THRESHOLD), []),
        )
        for (model, text, seq, price, threshold), layers in found.items()
        if price in usual and threshold == (0 if price else THRESHOLD)
    ]  # fmt: skip


def _time(layers: list[Row]) -> str:
    """Over cuDNN's dense attention; empty without layers."""
    return cell("{x:.3f}", x=share(layers, "dense")) if layers else ""


def _over_fa4(layers: list[Row]) -> str:
    """Over FlashAttention-4's dense attention; empty where that was not measured."""
    return cell("{x:.3f}", x=share(layers, "fa4"))


def _range(row: Row) -> str:
    found = [share([layer], "dense") for layer in row["used"]]
    return f"{min(found):.3f} to {max(found):.3f}"


real_operands = Table(
    "real_operands",
    {
        "text, tokens": "{text}, {seq:K}",
        "price": lambda row: f"{row['price']:g}" if row["price"] else "0 (dense forward)",
        "density": lambda row: cell("{x:share}", x=mean(row["used"], "density")),
        "time / cuDNN dense": lambda row: _time(row["used"]) if row["price"] else "",
        "/ FlashAttention-4 dense": lambda row: _over_fa4(row["used"]) if row["price"] else "",
        "with threshold 3": lambda row: _time(row["pruned"]),
        "backward's density there": lambda row: (
            cell("{x:share}", x=mean(row["pruned"], "backward_density")) if row["pruned"] else ""
        ),
        "layers, / cuDNN": _range,
        "layers": lambda row: len(row["used"]),
    },
    find=_settings,
    order=lambda row: (row["seq"], row["text"], row["price"] == 0, row["price"]),
)


def _by_case(*of_case: str) -> Callable[[list[Row]], list[Row]]:
    """Groups of the newest rows of each layer."""

    def find(found: list[Row]) -> list[Row]:
        groups = grouped(last(found, *of_case, "layer"), lambda row: values(row, *of_case))
        return [dict(some[0], used=some) for some in groups.values()]

    return find


def _sum(part: str):
    return lambda row: f"{sum(each[f'{part}_ms'] for each in row['used']):.3g}"


block_lists = Table(
    "real_operands",
    {
        "text, tokens": "{text}, {seq:K}",
        "commit": "{commit}",
        "threshold": "{block_threshold:g}",
        "density": lambda row: cell("{x:share}", x=mean(row["used"], "density")),
        "search, ms": _sum("search"),
        "forward": _sum("forward"),
        "backward": _sum("backward"),
        "time / cuDNN dense": lambda row: _time(row["used"]),
        "/ FlashAttention-4 dense": lambda row: _over_fa4(row["used"]),
    },
    where=lambda row: row.get("policy") == "xattention",
    find=_by_case("gpu", "model", "text", "seq", "block_threshold", "commit"),
    order=lambda row: (row["text"], row["seq"]),
)
"""Policy xattention."""


KERNELS = {
    "own": "this package",
    "flash4": "FlashAttention-4, through this package",
    "cudnn": "cuDNN, through this package (an option that went)",
}
dense_kernels = Table(
    "real_operands",
    {
        "text, tokens": "{text}, {seq:K}",
        "kernels": lambda row: KERNELS.get(row["kernels"], row["kernels"]),
        "layers": lambda row: len(row["used"]),
        "forward, ms": _sum("forward"),
        "backward, ms": _sum("backward"),
        "time / cuDNN dense": lambda row: _time(row["used"]),
    },
    where=lambda row: row.get("policy") == "dense",
    find=_by_case("gpu", "model", "text", "seq", "kernels"),
    order=lambda row: (row["seq"], row["kernels"]),
)
"""Dense attention through this package."""


def xattention_over(dense: str, seq: int) -> tuple[float, list[Row]]:
    """Time of policy xattention over dense attention (``dense``, cuDNN's, or ``fa4``) on code, and its
    layers."""
    newest = [row for row in block_lists.shown() if (row["text"], row["seq"]) == ("code", seq)][-1]
    return share(newest["used"], dense), newest["used"]


def by_density(density: float, seq: int = 131072, text: str = "code") -> float | None:
    """Time over cuDNN's dense attention at a density, between measured prices; None outside of them."""
    points = sorted(
        (mean(layers, "density"), share(layers, "dense"))
        for (_, of, length, price, threshold), layers in _newest().items()
        if (of, length, threshold) == (text, seq, 0) and price
    )
    for (low, faster), (high, slower) in zip(points, points[1:]):
        if low <= density <= high:
            return faster + (slower - faster) * (density - low) / (high - low)
    return None


def _costs(found: list[Row]) -> list[Row]:
    """What each measured price costs, as mean costs of runs count it: a row a threshold."""
    used = mean_cost.counted(found)
    costs = mean_cost.costs_of(used)
    return [
        dict(threshold=f"{threshold:g}" if threshold else "off", costs=line, used=used)
        for threshold, line in sorted(costs.items())
    ]


def _prices(found: list[Row]) -> Columns:
    def cost(price: float):
        return lambda row: cell("{x:–.3f}", x=row["costs"].get(price))

    prices = sorted({price for row in found for price in row["costs"]})
    named = {(f"price {price:g}" if price else "dense"): cost(price) for price in prices}
    return {"threshold": "{threshold}", **named}


price_costs = Table("real_operands", _prices, find=_costs)


def real_share(seq: int, price: float, threshold: float, text: str = "code") -> list[Row]:
    """The layers of a setting."""
    wanted = (text, seq, price, threshold)
    return [layers for key, layers in _newest().items() if key[1:] == wanted][-1]


def _measured(by: str) -> Row:
    """What one layer's pairs are worth, by loss (``all``) or by divergence."""
    found = [row for row in rows("layer_prices") if row["stage"] == "measure"]
    return [row for row in found if row.get("by", "all") == by][-1]


def _over_median(field: str) -> list[float]:
    """``worth`` by divergence or ``density`` of each layer, over the median layer's."""
    found = _measured("divergence")[field]
    return [each / statistics.median(found) for each in found]


def _dearest(count: int = 3) -> str:
    """The layers whose last pairs are worth most, and how much over the median layer's."""
    worth = sorted(enumerate(_over_median("worth")), key=lambda each: -each[1])[:count]
    return ", ".join(f"{layer} ({each:.0f} times)" for layer, each in worth)


def _layer_runs(found: list[Row]) -> list[Row]:
    """A row of each kind of run; its losses are over those of the dense run of the same seed."""
    trained = last((row for row in found if row["stage"] == "train"), "run", "seed", "model", "seq")
    dense = {row["seed"]: row["dense"] for row in trained if row["run"] == "dense"}
    kinds = grouped((row for row in trained if row["run"] != "dense"), lambda row: row["run"])
    return [
        dict(
            some[0],
            used=some,
            divergence=_measured("divergence")[RUNS[run][1]]["divergence"],
            over={
                by: [row[by] / dense[row["seed"]] - 1 for row in some] for by in ("own", "dense")
            },
        )
        for run, some in kinds.items()
    ]


def _each_over(by: str) -> Callable[[Row], str]:
    return lambda row: ", ".join(cell("{x:over}", x=each) for each in row["over"][by])


RUNS = {"same": ("one price for all", "loss"), "layers": ("prices by layer", "own_loss")}
"""What a table calls a run, and where its losses before training are."""
layer_prices = Table(
    "layer_prices",
    {
        "": lambda row: RUNS[row["run"]][0],
        "density": lambda row: cell("{x:share}", x=mean(row["used"], "density")),
        "loss over dense training, both evaluated dense, of each seed": _each_over("dense"),
        "with its own attention": _each_over("own"),
        "divergence before training, nats": "{divergence:.4f}",
    },
    find=_layer_runs,
    order=lambda row: (row["run"] != "same",),
)

LAYER_PRICES = {
    "loss": lambda: cell(
        "{x:over}", x=_measured("all")["own_loss"]["all"] / _measured("all")["loss"]["all"] - 1
    ),
    "dearest": _dearest,
    **{
        f"falls_{by}": lambda by=by: str(sum(each < 0 for each in _measured(by)["worth"]))
        for by in ("all", "divergence")
    },
    **{
        f"{field}_22": lambda field=field: f"{_over_median(field)[22]:.1f}"
        for field in ("worth", "density")
    },
}
"""What was found, by the end of its name."""


def real_times(seq: int, price: float, threshold: float = 0.0, text: str = "code") -> str:
    """How many times as fast as dense attention on a text: over cuDNN's, and FlashAttention-4's."""
    found = real_share(seq, price, threshold, text)
    fa4 = share(found, "fa4")
    said = f"{1 / share(found, 'dense'):.1f}x cuDNN's dense attention"
    return said + (f", {1 / fa4:.1f}x FlashAttention-4's" if fa4 else "")


# Later tokens

REACH = {"xattention": "its block", "moba": "its block"}
"""How far later tokens reach by construction, where it is not the whole sequence."""


def _reach(row: Row) -> str:
    return (
        "none" if row["policy"].endswith("_previous") else REACH.get(row["policy"], "the sequence")
    )


def _over_dense(row: Row, more: float = 0.0, judged: str = "own") -> str:
    """A loss, and ``more`` nats, over that of the dense run with the same seed, data and learning rates."""
    same = ("model", "seq", "steps", "lr", "seed", "data")
    dense = [
        each for each in rows("frontier_runs")
        if each["stage"] == "train" and each["policy"] == "dense"
        and values(each, *same) == values(row, *same) and decay_of(each) == row["decay"]
    ]  # fmt: skip
    return cell("{x:–over}", x=(row[judged] + more) / dense[-1]["dense"] - 1 if dense else None)


def _pooled(row: Row, what: str) -> tuple[float, float]:
    """The mean difference over texts, which have equally many cuts or copies, and its standard error."""
    found = [each for each in row["measured"] if each["tokens"] == what]
    error = sum(each["stderr"] ** 2 for each in found) ** 0.5 / len(found)
    return mean(found, "difference"), error


def _difference(what: str):
    def said(row: Row) -> str:
        value, error = _pooled(row, what)
        return f"{value:+.4f} ± {error:.4f}".replace("-", "−")

    return said


def _replaced(row: Row) -> str:
    """The own-attention loss over dense, and with another future."""
    value, error = _pooled(row, "32 before the cut")
    return f"{_over_dense(row)}; {_over_dense(row, value)} ± {100 * error / row['dense']:.2f}"


later_tokens = Table(
    "later_tokens",
    {
        "model, tokens, steps": frontier_tables.run_of,
        "policy, density": lambda row: frontier_tables.name_of(row) + cell(", {density:share}", row),
        "later tokens that reach a query": _reach,
        "own-attention loss over dense; with another future, by the last 32 tokens before a cut": _replaced,
        "dense-attention loss over dense": lambda row: _over_dense(row, judged="dense"),
        "last 32 tokens before a cut, nats": _difference("32 before the cut"),
        "all before it": _difference("all before the cut"),
        "8 tokens of a copied block": _difference("copies"),
    },
    find=lambda found: last(
        ({**row, "decay": decay_of(row)} for row in found),
        "model", "seq", "steps", "decay", "policy", "wanted", "seed",
    ),
    order=lambda row: (row["model"], row["policy"], row["wanted"], row["seed"]),
)  # fmt: skip
"""How much losses with the pattern move as what follows is replaced: a line a run."""
