# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a run has logged: Megatron's printed log, TensorBoard's files, or transformers' trainer_state.json."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ...config import ConfigError
from ...files import read_json, read_text
from ...requirements import require

Series = dict[int, float]
"""Values by step."""
WANTED = (
    "Megatron's printed log, a folder of TensorBoard's files, or transformers' trainer_state.json"
)

PRINTED = {
    "lm loss": "loss", "elapsed time per iteration (ms)": "step_s", "learning rate": "learning_rate",
    "grad norm": "grad_norm", "throughput per GPU (TFLOP/s/GPU)": "tflops",
}  # fmt: skip
"""Names in a line that Megatron prints for a step."""
SCALES = {"step_s": 1e-3, "idle": 1e-2, "capped": 1e-2}
"""Of what is printed in milliseconds and percent."""
STEP_TIME = "iteration-time"
TAGS = {
    "lm loss": "loss", "learning-rate": "learning_rate", "grad-norm": "grad_norm",
    STEP_TIME: "step_s", "throughput": "tflops", "mtraining-price": "price",
    "mtraining-density/mean": "density", "mtraining-density/lowest-head": "density_lowest",
    "mtraining-density/highest-head": "density_highest", "mtraining-recall/mean": "recall",
    "mtraining-recall/lowest-head": "recall_lowest",
    "mtraining-backward-density/mean": "backward_density",
    "mtraining-capped/heads": "capped", "mtraining-time/search-ms": "search_ms",
    "mtraining-time/attention-ms": "attention_ms", "mtraining-time/loss-ms": "loss_ms",
    "mtraining-time/exposed-communication-ms": "exposed_ms",
    "mtraining-time/attention-max-over-mean": "imbalance",
    "mtraining_capped": "capped", "mtraining_search_ms": "search_ms",
    "mtraining_attention_ms": "attention_ms", "mtraining_exposed_communication_ms": "exposed_ms",
    "mtraining_backward_density": "backward_density",
    "mtraining_density": "density", "mtraining_recall": "recall", "mtraining_price": "price",
    "loss": "loss", "learning_rate": "learning_rate", "grad_norm": "grad_norm", "eval_loss": "eval_loss",
    "tokens_per_second": "tokens_per_s",
}  # fmt: skip
"""Names in TensorBoard and of transformers, there without ``train/``."""
STEP = re.compile(r"iteration +(\d{1,15})/ *\d+ \|(.*)\|")
FIELD = re.compile(r" *([^|:]+): +([-+\d.eE]+|[-+]?(?:nan|inf)) *(?:\||$)", re.IGNORECASE)
_AT_STEP = r"\[mtraining\] iteration (\d{1,15}) \|"
"""How lines of ours begin; more digits are no number of a step."""
OURS = re.compile(
    _AT_STEP + r" density ([\d.]+) \(lowest head ([\d.]+), highest ([\d.]+)\)"
    r"(?: \| recall ([\d.naif]+) \(lowest head ([\d.naif]+)\))?"
)
OF_OURS = ("density", "density_lowest", "density_highest", "recall", "recall_lowest")
PRICE = re.compile(_AT_STEP + r".*\| price ([\d.e+-]+)")
BACKWARD = re.compile(_AT_STEP + r".*\| backward density ([\d.]+)")
CAPPED = re.compile(_AT_STEP + r".*\| heads at a cap ([\d.]+)%")
TIMES = re.compile(
    _AT_STEP + r".*\| (?:search ([\d.e+-]+) ms, )?attention ([\d.e+-]+) ms "
    r"\(max/mean ([\d.]+)(?:, exposed communication ([\d.e+-]+) ms)?\)(?:, loss ([\d.e+-]+) ms)?"
)
OF_TIMES = ("search_ms", "attention_ms", "imbalance", "exposed_ms", "loss_ms")
IDLE = re.compile(_AT_STEP + r" attention of .*measured .*?idle ([\d.]+)%")
WARNING = re.compile(r"\[mtraining\] (warning: .*)")
LAYER = re.compile(r"mtraining-(density|recall)-layers/(\d+)")

LARGEST = 3.4028235e38
"""Of float32, in which runs compute; charts overflow near float64's."""


class Run(NamedTuple):
    """
    Attributes:
        source: what was read.
        series: finite values by name: ``loss``, ``density``, ``recall``, ``price``, ``step_s`` and others as
            above.
        layers: ``density`` and ``recall``, by the number of a layer.
        warnings: of this package, each once.
        not_finite: the steps whose value is NaN or beyond float32, ascending, by the name of the series.
    """

    source: str
    series: dict[str, Series]
    layers: dict[str, dict[int, Series]]
    warnings: list[str]
    not_finite: dict[str, list[int]]

    @classmethod
    def of(
        cls,
        source: str,
        logged: dict[str, Series],
        layers: dict[str, dict[int, Series]] | None = None,
        warnings: Iterable[str] = (),
    ) -> Run:
        """The run, from all values that were logged."""
        finite = {
            name: {step: value for step, value in values.items() if abs(value) <= LARGEST}
            for name, values in logged.items()
        }
        not_finite = {name: sorted({*values} - {*finite[name]}) for name, values in logged.items()}
        return cls(
            source,
            {name: values for name, values in finite.items() if values},
            layers or {},
            list(warnings),
            {name: steps for name, steps in not_finite.items() if steps},
        )


def read(path: Path) -> Run:
    """What was logged in a file, or in a folder: the first of the kinds in :data:`WANTED` that is there.

    Raises:
        ConfigError: there is nothing, or nothing that says what a step did.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    for find, take in ((_states, _of_trainer), (_events, _of_tensorboard), (_logs, _of_log)):
        if found := find(path):
            run = take(found)
            if run.series or run.not_finite:
                return run
    raise ConfigError(f"{path} has no metrics of a run: give {WANTED}")


def files(path: Path) -> list[Path]:
    """Those that :func:`read` may read."""
    return [*filter(None, [_states(path)]), *_events(path), *_logs(path)]


# transformers


def _states(path: Path) -> Path | None:
    """The trainer_state.json with the most steps. Its time is that of a copy, where the run was copied."""
    if path.is_file():
        return path if path.name == "trainer_state.json" else None
    found = [*path.glob("trainer_state.json"), *path.glob("checkpoint-*/trainer_state.json")]
    return max(found, key=_steps_of, default=None)


def _steps_of(state: Path) -> float:
    steps = read_json(state).get("global_step")
    return steps if isinstance(steps, (int, float)) else 0


def _of_trainer(file: Path) -> Run:
    """
    Raises:
        ConfigError: it is not as transformers writes it.
    """
    series: dict[str, Series] = defaultdict(dict)
    state = read_json(file)
    try:
        for entry in state.get("log_history", []):
            for name, value in entry.items():
                if name in TAGS and isinstance(value, (int, float)):
                    series[TAGS[name]][int(entry["step"])] = float(value)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{file} is not as transformers writes it: log_history is to be a list of what was logged, each "
            "with its step"
        ) from None
    return Run.of(str(file), series)


# TensorBoard


def _events(path: Path) -> list[Path]:
    """Event files, those of a folder one after the other: a later process's has a later time in its name."""
    if path.is_file():
        return [path] if "tfevents" in path.name else []
    return sorted(
        filter(Path.is_file, path.rglob("*tfevents*")), key=lambda file: (file.parent, file.name)
    )


def _go_on(logged: dict[str, Series], more: dict[str, Series]) -> None:
    """Add what the next process has logged. What is there of steps after its first is not of the run that it
    is of: the process before it ended before it saved these steps, or was another run's."""
    first = min((step for values in more.values() for step in values), default=math.inf)
    for name, values in logged.items():
        logged[name] = {step: value for step, value in values.items() if step <= first}
    for name, values in more.items():
        logged[name].update(values)


def step_times(logged: Series) -> Series:
    """The mean time of the steps up to each that a process of Megatron logs, after the one before it.

    Its timer goes on after the first line (``training_log``: ``should_reset``), so that the second line is
    the mean of all steps up to it.
    """
    first, second = [*logged, None, None][:2]
    if first is None or second is None:
        return logged
    after = second - first
    return {**logged, second: ((after + 1) * logged[second] - logged[first]) / after}


def _steps_apart(logged: Series) -> Series:
    """:func:`step_times`, if that brings the second nearer to the third: a log may lack its start."""
    if len(logged) < 3:
        return logged
    apart, (second, third) = step_times(logged), list(logged)[1:3]
    near, far = (abs(times[second] - logged[third]) for times in (apart, logged))
    return apart if near < far else logged


def _of_tensorboard(files: list[Path]) -> Run:
    require("tensorboard", extra="report")
    series: dict[str, Series] = defaultdict(dict)
    layers: dict[str, dict[int, Series]] = defaultdict(dict)
    begins: dict[int, str] = {}
    for folder, own in groupby(files, key=lambda file: file.parent):
        found: dict[str, Series] = defaultdict(dict)
        for file in own:
            _go_on(found, _of_events(file))
        steps = [step for values in found.values() for step in values]
        _check_goes_on(begins, str(folder), steps)
        for tag, values in found.items():
            if of_layer := LAYER.fullmatch(tag):
                layers[of_layer[1]].setdefault(int(of_layer[2]), {}).update(values)
            else:
                series[_name_of(tag)].update(values)
    sources = files if len(files) == 1 else dict.fromkeys(file.parent for file in files)
    return Run.of(", ".join(map(str, sources)), series, dict(layers))


def _name_of(tag: str) -> str | None:
    return TAGS.get(tag.removeprefix("train/"))


def _of_events(file: Path) -> dict[str, Series]:
    """What one process has logged, by the tags that are known."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    found = {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
        if _name_of(tag) or LAYER.fullmatch(tag)
    }
    if times := found.get(STEP_TIME):
        # Megatron 0.19 leaves out the first step's: the next is a mean that has it.
        of_first = min(times) == min(step for values in found.values() for step in values)
        found[STEP_TIME] = _steps_apart(times) if of_first else dict([*times.items()][1:])
    return found


# Megatron's log


def _logs(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for kind in ("*.log", "*.txt", "*.out") for file in path.glob(kind)]
    return sorted(found, key=lambda file: file.stat().st_mtime)


def _of_log(files: list[Path]) -> Run:
    series: dict[str, Series] = defaultdict(dict)
    warnings: dict[str, None] = {}
    begins: dict[int, str] = {}
    for file in files:
        lines = _lines(file)
        own: dict[str, Series] = defaultdict(dict)
        for logged in _processes(lines):
            logged["step_s"] = _steps_apart(logged["step_s"])
            _go_on(own, logged)
        _check_goes_on(begins, str(file), [step for values in own.values() for step in values])
        for name, values in own.items():
            series[name].update(values)
        for said in filter(None, map(WARNING.search, lines)):
            warnings[said[1]] = None
    return Run.of(", ".join(begins.values()), series, warnings=warnings)


def _processes(lines: list[str]) -> Iterator[dict[str, Series]]:
    """What each process has logged, where one begins at an earlier step than the last had reached."""
    logged: dict[str, Series] = defaultdict(dict)
    reached = 0
    for name, step, value in (each for line in lines for each in _of_line(line)):
        if name == "loss":  # the first that a line of Megatron's yields
            if step < reached:
                yield logged
                logged = defaultdict(dict)
            reached = step
        logged[name][step] = value
    yield logged


def _check_goes_on(begins: dict[int, str], name: str, steps: list[int]) -> None:
    """Note where a log begins. Logs of a run that went on begin at other steps, later ones later.

    Raises:
        ConfigError: another log begins there: it is of another run.
    """
    if not steps:
        return
    first = min(steps)
    if first in begins:
        raise ConfigError(
            f"{begins[first]} and {name} both begin at step {first}: they are of two runs; give one of them"
        )
    begins[first] = name


def _lines(file: Path) -> list[str]:
    """A last line that was cut off is left out."""
    text = read_text(file, str(file))
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def _of_line(line: str) -> Iterator[tuple[str, int, float]]:
    """Name, step and value of what a line says."""
    if said := STEP.search(line):
        values = {printed.strip(): value for printed, value in FIELD.findall(said[2])}
        # Megatron leaves out a loss that is NaN.
        for printed, value in {"lm loss": "nan", **values}.items():
            name = PRINTED.get(printed)
            if name and _is_number(value):
                yield name, int(said[1]), float(value) * SCALES.get(name, 1.0)
        return
    if "[mtraining]" not in line:
        return
    of_many = (OURS, OF_OURS), (TIMES, OF_TIMES)
    of_one = (PRICE, "price"), (BACKWARD, "backward_density"), (CAPPED, "capped"), (IDLE, "idle")
    for pattern, names in (*of_many, *((pattern, (name,)) for pattern, name in of_one)):
        if said := pattern.search(line):
            for name, value in zip(names, said.groups()[1:]):
                # Of two lines that were written at once, what looks like a number may be none.
                if value is not None and _is_number(value):
                    yield name, int(said[1]), float(value) * SCALES.get(name, 1.0)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
