# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The model that is evaluated: any kind of folder or file as a model of transformers, and its attention."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .kept_samples import FOLDER
from .options import DENSE, TEMPLATE_TOKENS, Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...models.hugging_face import HuggingFaceModel

LENGTHS = "--lengths"


@contextmanager
def opened(options: Options, longest: int | None) -> Iterator[HuggingFaceModel]:
    """Open the model without reading its weights; a Megatron checkpoint is converted to a temporary folder in
    the folder of samples, which lasts as long as the context.

    Args:
        longest: the most tokens of a sequence, if that is known.

    Raises:
        ConfigError: there is no model, it is not supported, or has too few positions.
    """
    from ...models.megatron_folder import is_checkpoint
    from ...models.open import open_model
    from ...models.types import ModelOptions

    asked = ModelOptions(
        options.model, options.device, options.dtype, options.tokenizer, options.yarn
    )
    if not (options.model.is_dir() and is_checkpoint(options.model)):
        if options.like is not None:
            raise ConfigError(
                f"--like is {options.like}, but MODEL ({options.model}) is not a Megatron checkpoint: leave "
                "--like out"
            )
        source = open_model(asked)
        check_length(longest, source.shape.positions, options)
        yield source
        return
    from ..convert.to_hf import convert, find_iteration, read_args

    folder = find_iteration(options.model, "MODEL")
    positions = getattr(read_args(folder), "max_position_embeddings", None)
    if isinstance(positions, int):
        check_length(longest, int(positions * (options.yarn or 1)), options)
    with tempfile.TemporaryDirectory(prefix="model-", dir=options.output / FOLDER) as made:
        target = Path(made) / "hf"
        try:
            convert(options.model, target, like=options.like)
        except ConfigError as error:
            raise ConfigError(str(error).replace("SRC is ", "MODEL is ")) from None
        source = open_model(replace(asked, path=target))
        source.description = f"Megatron checkpoint, {folder}"
        check_length(longest, source.shape.positions, options)
        yield source


def check_length(longest: int | None, positions: int, options: Options) -> None:
    """Raise :class:`ConfigError` if the model has too few positions. RULER's lengths are without the chat
    template: it comes beside them."""
    template = TEMPLATE_TOKENS if options.chat and options.benchmark == "ruler" else 0
    if longest is not None and longest + template > positions:
        extend = "--yarn FACTOR to extend them" if options.yarn is None else "a larger --yarn"
        reserved = f", of which --chat reserves {template} for its template" if template else ""
        raise ConfigError(
            f"{LENGTHS} has {longest}, and MODEL has {positions} positions{reserved}: use at most "
            f"{positions - template}, or {extend}"
        )


def tokenizer_of(source: HuggingFaceModel, options: Options):
    """transformers' tokenizer of the model, which has to fit it.

    Raises:
        ConfigError: it has ids that the model has not, or no chat template where one is asked for.
    """
    tokenizer = source.transformers_tokenizer()
    ids = tokenizer.get_vocab().values()
    place = options.tokenizer or options.model
    largest, vocabulary = max(ids, default=-1), source.shape.vocabulary
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer of {place} has the token id {largest}, but MODEL has {vocabulary} tokens: use "
            "the tokenizer that it was trained with (--tokenizer)"
        )
    if options.chat and not tokenizer.chat_template:
        raise ConfigError(
            f"--chat is given, but the tokenizer of {place} has no chat template: leave --chat out"
        )
    return tokenizer


def check_finite(values: Tensor, what: str, dtype: torch.dtype) -> None:
    """Raise :class:`ConfigError` if a value is infinite or NaN, as values too large for fp16 become.

    Args:
        values: losses, logits or hidden states, of any shape.
        what: they are, in the plural.
        dtype: of the model.
    """
    if not values.isfinite().all():
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"{what} are not finite in {name}: is the model complete? If so, try --dtype float32"
        )


@dataclass
class AttendingModel:
    """A loaded model, whose attention can be changed."""

    model: object
    options: Options

    def use(self, attention: str) -> None:
        """Attend dense, or by the settings' pattern."""
        self._sparse = attention != DENSE
        if self._sparse:
            from ...transformers import configure

            configure(self.model, self.options.config, dense_tail=self.options.dense_tail)
        else:
            self.model.set_attn_implementation("sdpa")

    def density(self) -> dict[str, float]:
        """Density and recall of the patterns since the last call, means over layers and heads, for a sample's
        row; empty with dense attention."""
        if not self._sparse:
            return {}
        from ...transformers import take_means

        found = [each[~each.isnan()] for each in take_means(self.model, training=False)]
        if not found[0].numel():
            return {}
        return {
            name: round(each.mean().item(), 6) for name, each in zip(("density", "recall"), found)
        }


def check_settings(options: Options, source: HuggingFaceModel) -> None:
    """Raise :class:`ConfigError` if the settings do not fit the model."""
    if options.config is None:
        return
    from ...config import check_settings_file
    from ...transformers.switch import check_config

    check_config(options.config)
    check_settings_file(options.config, source.shape.layers, source.shape.heads)
