# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Loss by position over long text, and LongPPL (arXiv 2410.23771): loss of tokens that need long context.

The package longppl finds LongPPL's key tokens; the losses are summed here, a chunk of logits at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from tqdm import tqdm

from ...errors import ConfigError
from ...models.hugging_face import HuggingFaceModel, check_logits
from ...models.open import open_model
from ...models.text import read_text
from ...models.types import ModelOptions
from ..common.digests import digest_of_files, digest_of_value
from .kept_samples import KeptSamples
from .model import AttendingModel, check_finite
from .options import Options

BINS = 16
"""Equal ranges of positions that losses are averaged over."""
CHUNK = 512
"""Tokens whose logits exist at once."""
CHARACTERS = 8
"""Text that is encoded at first for each token of a window."""


@dataclass(frozen=True)
class Window:
    """A stretch of the text: one sample."""

    number: int
    text: str
    ids: Tensor
    """int64 ``[length]``."""
    offsets: list
    """Where each token is in ``text``: pairs of begin and end."""

    @property
    def digest(self) -> str:
        return digest_of_value(self.ids.tolist())


@dataclass
class Windows:
    """All windows of one length; to the command as :class:`.planned.Planned`.

    Attributes:
        data: see there.
        keys: where the key tokens are, by the window's number; None without LongPPL.
    """

    length: int
    windows: list[Window]
    data: dict
    keys: dict[int, list] | None = None
    name: str = "perplexity"

    @property
    def label(self) -> str:
        return f"{self.name}-{self.length}"

    @property
    def title(self) -> str:
        return f"{self.name} {self.length}"


def planned(options: Options, source: HuggingFaceModel, tokenizer) -> list[Windows]:
    """The windows of each length.

    Raises:
        ConfigError: the text has none, or the model's logits or its tokenizer are of no use here.
    """
    check_logits(source.config, f"MODEL ({options.model})", "mtraining eval perplexity")
    check_offsets(tokenizer, str(options.tokenizer or options.model))
    data = {
        "the files of --text": [digest_of_files(path) for path in options.text],
        "--longppl": options.longppl,
    }
    return [
        Windows(length, windows_of(options, tokenizer, length), data) for length in options.lengths
    ]


def check_offsets(tokenizer, place: str) -> None:
    """Raise :class:`ConfigError` if a tokenizer does not say where its tokens are in a text."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer of {place} is one in Python, which does not say where its tokens are in a text: "
            "perplexity needs one with a tokenizer.json"
        )


def windows_of(options: Options, tokenizer, length: int) -> list[Window]:
    """The first windows of the text, one after another.

    Args:
        tokenizer: one that says where its tokens are, see :func:`check_offsets`.

    Raises:
        ConfigError: the text has not one.
    """
    text, found = read_text(list(options.text)), []
    begin = 0
    while len(found) < options.samples:
        size = length * CHARACTERS
        while True:
            encoded = tokenizer(
                text[begin : begin + size], return_offsets_mapping=True, verbose=False
            )
            # The last tokens before the cut differ from those of the whole text.
            if len(encoded["input_ids"]) >= length + 64 or begin + size >= len(text):
                break
            size *= 2
        ids, offsets = encoded["input_ids"][:length], encoded["offset_mapping"][:length]
        if len(ids) < length:
            break
        end = max(stop for _, stop in offsets)
        part = text[begin : begin + end]
        found.append(Window(len(found), part, torch.tensor(ids), [list(each) for each in offsets]))
        begin += max(1, end)
    if not found:
        raise ConfigError(
            f"--lengths has {length}, but --text has fewer tokens by this model's tokenizer: give more text"
        )
    return found


class Losses:
    """A model's loss of each token, without all logits at once."""

    def __init__(self, model):
        self.body, self.head = model.base_model, model.get_output_embeddings()
        self.device, self.dtype = model.device, model.dtype

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """``[s, hidden]`` of tokens ``[s]``."""
        inputs = ids[None].to(self.device)
        return self.body(input_ids=inputs, use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Cross entropy of each token after the first, in nats: float32 ``[s - 1]``, on the CPU."""
        hidden, labels = self.hidden(ids)[:-1], ids[1:].to(self.device)
        parts = [
            torch.nn.functional.cross_entropy(self.head(part).float(), label, reduction="none")
            for part, label in zip(hidden.split(CHUNK), labels.split(CHUNK))
        ]
        return torch.cat(parts).cpu()


class _Logits:
    """Logits that are computed where they are looked at, for longppl: ``logits[0, a:b, :]``."""

    def __init__(self, hidden: Tensor, head: Callable):
        self._hidden, self._head = hidden, head

    @torch.no_grad()
    def __getitem__(self, place) -> Tensor:
        return self._head(self._hidden[place[1]]).float()


class _Evaluator:
    """A model as longppl calls it."""

    def __init__(self, losses: Losses):
        self._losses, self.device = losses, losses.device

    def __call__(self, input_ids: Tensor):
        hidden = self._losses.hidden(input_ids[0])
        # Without this there would be no key tokens: NaN is not greater than anything.
        what = "the hidden states of the model that finds LongPPL's key tokens"
        check_finite(hidden, what, self._losses.dtype)
        return SimpleNamespace(logits=_Logits(hidden, self._losses.head))


def key_intervals(model, tokenizer, window: Window, context: int) -> list[list[int]]:
    """Where the key tokens are in a window's text, by longppl: tokens that the model predicts well, and far
    worse with a context of at most ``context`` and a quarter of that.

    Args:
        model: it finds them; dense.
        tokenizer: its own; None for the tokens of the window.

    Raises:
        ConfigError: the model's hidden states are not finite.
    """
    from longppl.longppl import find_key_token

    encoded, step = _encoded(tokenizer, window), context // 4
    # The last step has what is left, and longppl fails on a single token: then the last is no candidate.
    if (encoded["input_ids"].shape[1] - context) % step == 1:
        encoded = {name: each[:, :-1] for name, each in encoded.items()}

    def as_encoded(text: str, **how) -> dict[str, Tensor]:
        return encoded

    found = find_key_token(window.text, _Evaluator(Losses(model)), as_encoded, context, step)
    return [[int(begin), int(end)] for begin, end in found]


def _encoded(tokenizer, window: Window) -> dict[str, Tensor]:
    """What longppl asks a tokenizer for: int64 ``input_ids`` ``[1, s]`` and ``offset_mapping`` ``[1, s, 2]``.

    A window that ends inside a character has the whole character in its text, and the text has more tokens
    than the window: so the window's own are used.
    """
    if tokenizer is None:
        ids, offsets = window.ids.tolist(), window.offsets
    else:
        found = tokenizer(window.text, return_offsets_mapping=True, verbose=False)
        ids, offsets = found["input_ids"], found["offset_mapping"]
    return {"input_ids": torch.tensor([ids]), "offset_mapping": torch.tensor([offsets])}


def evaluator(options: Options) -> tuple:
    """The model of --evaluator, loaded, and its tokenizer.

    Raises:
        ConfigError: it is no model that can find the key tokens of these lengths.
    """
    label = f"--evaluator ({options.evaluator})"
    asked = ModelOptions(options.evaluator, options.device, options.dtype, name="--evaluator")
    source = open_model(asked)
    if not isinstance(source, HuggingFaceModel):
        raise ConfigError(
            f"--evaluator is {options.evaluator}: give a Hugging Face folder or a .gguf file"
        )
    if max(options.lengths) > source.shape.positions:
        raise ConfigError(
            f"--lengths has {max(options.lengths)}, and {label} has {source.shape.positions} positions: use "
            "at most that"
        )
    check_logits(source.config, label, "--longppl")
    tokenizer = source.transformers_tokenizer()
    check_offsets(tokenizer, label)
    return source.causal_model(), tokenizer


def find_keys(model, tokenizer, planned: list[Windows], kept: dict, options: Options) -> None:
    """Set ``keys`` of all that is planned, for the windows that are still to be measured.

    Args:
        model, tokenizer: see :func:`key_intervals`.
        kept: samples by label and attention.
    """
    for each in planned:
        done = [kept[each.label, attention].rows for attention in options.attentions]
        todo = [one for one in each.windows if any(one.number not in rows for rows in done)]
        each.keys = {}
        for window in _progress(todo, f"longppl's key tokens {each.length}"):
            each.keys[window.number] = key_intervals(model, tokenizer, window, options.longppl)


def measured(model: AttendingModel, planned: Windows, kept: KeptSamples, title: str) -> list[dict]:
    """The samples of one length and attention."""
    losses = Losses(model.model)
    for window in _progress(planned.windows, title):
        if kept.get(window.number, window.digest) is not None:
            continue
        started = time.perf_counter()
        model.density()
        found = losses(window.ids)
        check_finite(found, f"the losses of window {window.number} ({title})", losses.dtype)
        row = {
            "id": window.number,
            "prompt": window.digest,
            "tokens": len(found),
            "loss": round(found.double().mean().item(), 6),
            "loss_by_position": _by_position(found),
            **model.density(),
        }
        if planned.keys is not None:
            row |= _of_keys(found, window, planned.keys[window.number])
        kept.add({**row, "seconds": round(time.perf_counter() - started, 3)})
    rows = (kept.rows[window.number] for window in planned.windows)
    return [{name: value for name, value in row.items() if name != "prompt"} for row in rows]


def _by_position(losses: Tensor) -> list[float]:
    """Means over :data:`BINS` ranges of positions."""
    parts = losses.double().tensor_split(BINS)
    return [round(part.mean().item(), 6) for part in parts]


def _of_keys(losses: Tensor, window: Window, intervals: list) -> dict:
    from longppl.longppl import cal_overlap

    places = cal_overlap(window.offsets, intervals) if intervals else []
    found = losses[places].double() if places else losses[:0]
    return {
        "key_tokens": len(found),
        "key_loss": round(found.mean().item(), 6) if len(found) else None,
    }


def _progress(windows: list[Window], title: str) -> Iterator[Window]:
    yield from tqdm(windows, desc=title, unit="window", file=sys.stderr)
