# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Every knob of the backend, in one dataclass, validated once."""

from __future__ import annotations

from dataclasses import dataclass, fields

BLOCK_SIZES = (64, 128)
HEAD_DIMS = (64, 128)
"""Head dimensions there are kernels for."""
MAX_BLOCKS = 32768
"""Blocks of a rank, and of the ranks that gather their keys, whose numbers fit the index's 16 bits: 4M
tokens with blocks of 128."""


class ConfigError(ValueError):
    """A setting that cannot work; the message names the option, its value and what to do."""


@dataclass(frozen=True)
class MTrainingConfig:
    """Settings of dynamic sparse attention, as a user gives them with ``--mtraining-*``.

    Each field ``name`` is the option ``--mtraining-name`` (underscores become hyphens), the string
    under it the option's help text. Sizes are in tokens unless said otherwise.
    """

    vertical: int = 1000
    """Key columns each query head keeps, the first ``sink`` columns counted in; the sequence length
    keeps everything."""
    slash: int = 100
    """Token diagonals each query head keeps beside the local window; the sequence length keeps
    every diagonal, which is dense causal attention."""
    window: int = 128
    """Tokens before each query that are always kept (rounded up to whole blocks)."""
    sink: int = 4
    """First columns of the sequence that are always kept, also if ``vertical`` is 0."""
    block_size: int = 128
    """Tokens in a block: the granularity of slashes and of the striped layout."""
    sample_strata: int = 64
    """Stretches of the sequence that the pattern is estimated from, spread over all of it."""
    sample_rows: int = 1
    """Query rows sampled in each stretch."""
    gathered_ranks: int = 0
    """Context-parallel ranks whose keys a rank has at hand at once: more take less time and more memory, 1
    is a ring of single ranks. 0 takes the ranks a node of --hierarchical-context-parallel-sizes or,
    without those, the largest divisor of --context-parallel-size up to 8."""
    recompute_attention: bool = False
    """Compute attention again in the replay of activation recomputation, in place of keeping what the
    first pass has found: takes more time and less memory."""
    bf16_gradients: bool = False
    """Send the gradients of keys and values between context-parallel ranks in bfloat16 in place of
    float32: half the bytes, less exact."""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ConfigError(
                        f"{option(field.name)} must be True or False, but is {value!r}"
                    )
            elif isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{option(field.name)} must be a whole number, but is {value!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"{option('block_size')} is {self.block_size}: use one of {BLOCK_SIZES}"
            )
        at_least = dict(
            vertical=0, slash=0, window=0, sink=0, sample_strata=2, sample_rows=1, gathered_ranks=0
        )
        for name, low in at_least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{option(name)} is {getattr(self, name)}: use {low} or more")
        if self.sink > self.vertical > 0:
            raise ConfigError(
                f"{option('sink')} is {self.sink}, more than {option('vertical')} "
                f"({self.vertical}), which counts the sink columns in: raise "
                f"{option('vertical')} or lower {option('sink')}"
            )

    def check_sequence(self, seq_length: int, cp_size: int, inner: int = 1) -> None:
        """Raise :class:`ConfigError` if a sequence of ``seq_length`` tokens cannot be laid out
        over ``cp_size`` ranks, ``inner`` of which gather their keys, or :meth:`check_budgets` does."""
        multiple = self.block_size * cp_size
        if seq_length <= 0 or seq_length % multiple:
            near = max(multiple, round(seq_length / multiple) * multiple)
            raise ConfigError(
                f"--seq-length is {seq_length}, which is not a multiple of {multiple} = "
                f"{option('block_size')} ({self.block_size}) x --context-parallel-size "
                f"({cp_size}): use {near}, for example"
            )
        if seq_length > MAX_BLOCKS * multiple:
            raise ConfigError(
                f"--seq-length is {seq_length}: each of {cp_size} context-parallel ranks would have more "
                f"than {MAX_BLOCKS} blocks of {self.block_size} tokens; use at least "
                f"{-(-seq_length // (MAX_BLOCKS * self.block_size))} ranks"
            )
        if seq_length > MAX_BLOCKS * self.block_size * (cp_size // inner):
            raise ConfigError(
                f"--seq-length is {seq_length}: {inner} context-parallel ranks that gather their keys would "
                f"have more than {MAX_BLOCKS} blocks of {self.block_size} tokens; use fewer: "
                f"{option('gathered_ranks')} or --hierarchical-context-parallel-sizes"
            )
        self.check_budgets(seq_length)

    def check_budgets(self, seq_length: int) -> None:
        """Raise :class:`ConfigError` if the budgets do not fit ``seq_length`` tokens."""
        for name in ("vertical", "slash", "sink", "window"):
            if getattr(self, name) > seq_length:
                raise ConfigError(
                    f"{option(name)} is {getattr(self, name)}, more than --seq-length "
                    f"({seq_length}): use at most {seq_length}"
                )
        if self.keeps_all(seq_length):
            return
        if self.sample_strata * self.sample_rows > seq_length:
            raise ConfigError(
                f"{option('sample_strata')} x {option('sample_rows')} = {self.sample_strata} x "
                f"{self.sample_rows} rows are more than --seq-length ({seq_length})"
            )

    def keeps_all(self, seq_length: int) -> bool:
        """Whether the budgets keep every pair of a sequence of ``seq_length`` tokens."""
        return max(self.vertical, self.slash, self.window) >= seq_length


def option(name: str) -> str:
    """The command-line option of a field."""
    return "--mtraining-" + name.replace("_", "-")
