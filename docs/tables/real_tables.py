# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention on a trained model's own queries, keys and values, and what later tokens change."""

from __future__ import annotations

from benchmarks.model import frontier_tables

from .common import NOT_MEASURED, Row, is_measured, last, percent, rows, source, table, tokens

SETTING = ("gpu", "model", "text", "seq", "price", "backward_threshold")


def real_cases() -> dict[tuple, list[Row]]:
    """By model, text, length and setting: the newest row of each layer."""
    cases: dict[tuple, list[Row]] = {}
    if is_measured("real_operands"):
        for row in last(rows("real_operands"), *SETTING, "layer").values():
            cases.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    return cases


def share(
    found: list[Row], dense: str, parts: tuple[str, ...] = ("forward", "backward")
) -> float | None:
    """Time of the layers, with the search, over that of dense attention: ``dense`` is cuDNN's, ``fa4``
    FlashAttention-4's. None where that was not measured."""
    names = [f"{dense}_{part}_ms" for part in parts]
    if any(row[name] is None for row in found for name in names):
        return None
    own = sum(row[f"{part}_ms"] for row in found for part in ("search", *parts))
    return own / sum(row[name] for row in found for name in names)


def mean(found: list[Row], name: str) -> float:
    return sum(row[name] for row in found) / len(found)


def real_operands() -> str:
    """A line for each setting, over the layers."""
    body, used = [], []
    for (*_, text, seq, price, threshold), found in real_cases().items():
        used += found
        name = f"price {price:g}" if price else "dense forward"
        name += f", threshold {threshold:g}" if threshold else ""
        density = percent(mean(found, "density"))
        if threshold:
            density += f"; {percent(mean(found, 'backward_density'))}"
        layers = [share([row], "dense") for row in found]
        fa4 = share(found, "fa4")
        body.append(
            [
                f"{text}, {tokens(seq)}", name, density, f"{share(found, 'dense'):.3f}",
                "" if fa4 is None else f"{fa4:.3f}", f"{min(layers):.3f} to {max(layers):.3f}", len(found),
            ]
        )  # fmt: skip
    if not body:
        return NOT_MEASURED
    header = ["text, tokens", "setting", "density; of the backward", "time / cuDNN dense"]
    header += ["/ FlashAttention-4 dense", "layers, / cuDNN", "layers"]
    return table(header, body) + source(used, "real_operands")


def real_share(seq: int, price: float, threshold: float, text: str = "code") -> list[Row]:
    """The layers of a setting; none if it was not measured."""
    wanted = (text, seq, price, threshold)
    found = [rows for (_, _, *key), rows in real_cases().items() if tuple(key) == wanted]
    return found[-1] if found else []


def real_times(seq: int, price: float, threshold: float = 0.0) -> str:
    """How many times as fast as dense attention on code: over cuDNN's, and FlashAttention-4's."""
    found = real_share(seq, price, threshold)
    if not found:
        return "not measured yet"
    said = f"{1 / share(found, 'dense'):.1f}x cuDNN's dense attention"
    fa4 = share(found, "fa4")
    return said + (f", {1 / fa4:.1f}x FlashAttention-4's" if fa4 else "")


def later_tokens() -> str:
    """How much the loss of tokens moves as what follows them is replaced: a line a run and text."""
    if not is_measured("later_tokens"):
        return NOT_MEASURED
    found = list(
        last(rows("later_tokens"), "model", "seq", "steps", "policy", "wanted", "seed").values()
    )
    body = []
    for row in sorted(found, key=lambda row: (row["model"], row["policy"], row["seed"])):
        for text in dict.fromkeys(each["text"] for each in row["measured"]):
            by_tokens = {each["tokens"]: each for each in row["measured"] if each["text"] == text}
            near, copies = by_tokens["32 before the cut"], by_tokens["copies"]
            body.append(
                [
                    frontier_tables.run_of(row), frontier_tables.name_of(row), percent(row["density"]), text,
                    f"{near['own']:.3f}", _difference(near),
                    f"{copies['own']:.3f}, {copies['dense']:.3f}", _difference(copies),
                ]
            )  # fmt: skip
    header = [
        "model, tokens, steps",
        "policy",
        "density",
        "text",
        "before a cut: loss",
        "difference",
    ]
    header += ["copies: loss, with dense attention", "difference"]
    return table(header, body) + source(found, "later_tokens")


def _difference(measured: Row) -> str:
    said = f"{measured['difference']:+.4f} ± {measured['stderr']:.4f} ({measured['n']})"
    return said.replace("-", "−")
