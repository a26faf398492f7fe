# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The error that names a setting, and the check of whole numbers that most arguments need."""

LONGEST = 2000
"""Characters of a message; what a file says may be longer by far."""


def one_line(text: str) -> str:
    """A text with the control characters in it, of a file's name say, escaped."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class ConfigError(ValueError):
    """A setting that cannot work. The message names the option, its value and what to do.

    It is one line without control characters, whatever is in the values and file names that it quotes.
    """

    def __init__(self, message: object = ""):
        text = one_line(" ".join(str(message).split("\n")))
        if len(text) > LONGEST:
            text = f"{text[: LONGEST * 3 // 4]} ... {text[-LONGEST // 4 :]}"
        super().__init__(text)


def short(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_whole(**values: object) -> None:
    """Raise :class:`ConfigError` unless all are whole numbers; ``seq_length`` is shown under that name."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}: give a whole number")
