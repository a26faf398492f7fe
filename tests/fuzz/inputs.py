# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What hypothesis draws: values of options, changed JSON, changed bytes."""

from __future__ import annotations

import json
import math
import pickletools
import struct

from hypothesis import strategies as st

from megatron_mtraining.config import OPTIONS, REMOVED, RENAMED

from .targets import HEADS, LAYERS, Target

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 64, 127, 128, 4096, 10**9, 2**31, 2**63, 2**64, 10**40, 10**400]),
    st.integers(-10, 300),
    st.integers(),
    st.sampled_from([0.0, -0.0, 0.25, 1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan]),
    st.floats(),
)
WORDS = st.one_of(
    st.sampled_from(
        [
            *"all price fixed coverage xattention moba last strata head model default yarn llama3".split(),
            *"LlamaForCausalLM Qwen3MoeForCausalLM full_attention sliding_attention dense layers".split(),
            *("", "a/b", "..", "a\0b", "\ud800", "n" * 300),
        ]
    ),
    st.text(max_size=8),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=6,
)
NAMES = [each.name for each in OPTIONS]


def _of_option(name: str) -> st.SearchStrategy:
    each = next(each for each in OPTIONS if each.name == name)
    likely = (
        st.sampled_from(each.choices)
        if each.choices
        else st.booleans()
        if each.type is bool
        else NUMBERS
    )
    return st.one_of(likely, likely, VALUES)  # mostly of its type


@st.composite
def options(draw) -> dict:
    """Flat options, likely and unlikely values."""
    names = draw(st.lists(st.sampled_from([*NAMES, *RENAMED, *REMOVED]), max_size=4, unique=True))
    return {name: draw(_of_option(name) if name in NAMES else VALUES) for name in names}


@st.composite
def command_lines(draw) -> list[str]:
    """Words of the command line."""
    flags = [each.flag for each in OPTIONS]
    flags += [f"--mtraining-{name.replace('_', '-')}" for name in (*RENAMED, *REMOVED)]
    flags += ["--mtraining-help-all", "--mtraining-", "--mtraining-s", "--"]
    words = []
    for _ in range(draw(st.integers(0, 5))):
        flag = draw(st.sampled_from(flags))
        # argparse repeats words as they are, line ends too.
        value = draw(st.one_of(NUMBERS.map(_shown), WORDS.filter(str.isprintable)))
        words += draw(st.sampled_from([[flag], [flag, value], [f"{flag}={value}"], [value]]))
    return words


def _shown(value: float) -> str:
    try:
        return str(value)
    except ValueError:  # more digits than Python writes
        return "9" * 5000


@st.composite
def settings(draw) -> object:
    """The content of a settings file."""
    values = st.dictionaries(
        st.sampled_from([*NAMES, "dense"]), NUMBERS | WORDS | st.booleans(), max_size=3
    )
    heads = st.dictionaries(st.integers(-1, HEADS).map(str), values, max_size=3)
    layer = st.tuples(values, heads).map(
        lambda both: {**both[0], **({"heads": both[1]} if both[1] else {})}
    )
    layers = st.dictionaries(st.integers(-1, LAYERS).map(str) | WORDS, layer, max_size=LAYERS)
    return {**draw(values), **draw(st.just({}) | layers.map(lambda found: {"layers": found}))}


def _places(value: object, path: tuple = ()) -> list[tuple]:
    """Paths to everything in a JSON document."""
    found = [path]
    if isinstance(value, dict):
        for key, each in value.items():
            found += _places(each, (*path, key))
    elif isinstance(value, list):
        for place, each in enumerate(value):
            found += _places(each, (*path, place))
    return found


@st.composite
def changed_json(draw, document: object) -> object:
    """A JSON document with up to three values replaced, removed or added."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(_places(document)[1:] or [("a",)]))
        inside = document
        for step in path:
            inside = inside[step]
        how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if how == "replace" and isinstance(inside, (dict, list)):
            old = inside[last] if isinstance(inside, list) or last in inside else None
            near = [draw(VALUES)]
            if type(old) is int:
                near += (
                    [old + 1, old - 1, old * 2, -old, old + 0.5, f"{old}", old * 10**12]
                    if old < 10**15
                    else [0]
                )
            inside[last] = draw(st.sampled_from(near))
        elif how == "remove" and last in (
            inside if isinstance(inside, dict) else range(len(inside))
        ):
            del inside[last]
        elif isinstance(inside, dict):
            inside[draw(WORDS)] = draw(VALUES)
        else:
            inside.append(draw(VALUES))
    return document


def as_json(value: object) -> bytes:
    """A document in bytes; what it cannot write is 5000 digits or a lone surrogate."""
    try:
        return json.dumps(value).encode()
    except ValueError:
        return b'{"a": ' + b"9" * 5000 + b"}"


NUMBERS_IN_BYTES = [
    struct.pack(order + letter, value)
    for order in "<>"
    for letter, values in [
        ("I", (0, 1, 2**31 - 1, 2**31, 2**32 - 1)), ("Q", (0, 1, 2**32, 2**62, 2**63, 2**64 - 1))
    ]
    for value in values
]  # fmt: skip


def _place(draw, size: int) -> int:
    """A place in a file: headers and footers are where most of its meaning is."""
    # Not one_of: hypothesis drops those of its strategies that are the same.
    low, high = [(0, 64), (0, 2048), (size - 512, size), (0, size)][draw(st.integers(0, 3))]
    return draw(st.integers(max(0, low), min(high, size)))


@st.composite
def changed_bytes(draw, seeds: list[bytes], tokens: tuple[bytes, ...] = ()) -> bytes:
    """A seed with up to four stretches replaced, removed, inserted, repeated or cut off."""
    data = draw(st.sampled_from(seeds))
    new = st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from(NUMBERS_IN_BYTES))
    if tokens:
        new = st.one_of(new, st.sampled_from(tokens))
    for _ in range(draw(st.integers(1, 4))):
        at = _place(draw, len(data))
        how = draw(
            st.sampled_from(["flip", "replace", "insert", "remove", "repeat", "cut", "join"])
        )
        if how == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        elif how == "replace":
            put = draw(new)
            data = data[:at] + put + data[at + len(put) :]
        elif how == "insert":
            data = data[:at] + draw(new) + data[at:]
        elif how == "remove":
            data = data[:at] + data[at + draw(st.integers(1, 64)) :]
        elif how == "repeat":
            data = (
                data[:at]
                + data[at : at + draw(st.integers(1, 64))] * draw(st.integers(2, 8))
                + data[at:]
            )
        elif how == "cut":
            data = data[:at]
        else:
            data = data + draw(st.sampled_from(seeds))[draw(st.sampled_from([0, 0, 1, 7])) :]
    return data


@st.composite
def changed_pickles(draw, seeds: list[bytes], tokens: tuple[bytes, ...]) -> bytes:
    """A pickle with operations inserted where operations begin, or replaced."""
    data = draw(st.sampled_from(seeds))
    places = [place for _, _, place in pickletools.genops(data)]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(places))
        end = (
            min((place for place in places if place > at), default=at)
            if draw(st.booleans())
            else at
        )
        data = data[:at] + draw(st.sampled_from(tokens)) + data[end:]
        places = [place for place in places if place <= at]
    return data


@st.composite
def changed_headers(draw, seeds: list[bytes]) -> bytes:
    """A safetensors file whose header is another JSON document."""
    data = draw(st.sampled_from(seeds))
    size = struct.unpack("<Q", data[:8])[0]
    header = as_json(draw(changed_json(json.loads(data[8 : 8 + size]))))
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def as_yaml(value: object) -> bytes:
    import yaml

    try:
        return yaml.safe_dump(value).encode("utf-8", "surrogatepass")
    except ValueError:
        return b"a: " + b"9" * 5000


def of(name: str, target: Target, seeds: list[bytes]) -> st.SearchStrategy:
    """The inputs of a target."""
    if name == "options":
        return options()
    if name == "command_line":
        return command_lines()
    plain = changed_bytes(seeds, target.tokens)
    if name in ("settings_json", "settings_yaml"):
        import yaml

        write = as_json if name == "settings_json" else as_yaml
        changed = st.sampled_from([yaml.safe_load(seed) for seed in seeds]).flatmap(changed_json)
        return st.one_of(settings().map(write), changed.map(write), VALUES.map(write), plain)
    if name in ("config_json", "inspect_config", "index_json", "integrity"):
        return st.one_of(
            changed_json(json.loads(seeds[0])).map(as_json), VALUES.map(as_json), plain
        )
    if name == "safetensors":
        return st.one_of(changed_headers(seeds), plain)
    if name == "metadata":
        return st.one_of(changed_pickles(seeds, target.tokens), plain)
    return plain
