# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A needle in a haystack: a sentence with a number at a known depth of a long text, and a question for it.

The sentences are those of RULER, whose own tasks put needles at random depths.
"""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

from ...errors import ConfigError
from ...models.text import read_text
from ..common.digests import digest_of_files
from .options import TEMPLATE_TOKENS, Options
from .planned import Planned

ANSWER_TOKENS = 24
"""The most tokens that are generated."""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the "
    "provided text?"
)
PREFIX = "The special magic number for {key} mentioned in the provided text is"
CHARACTERS = 12
"""The most characters of a haystack's token, on average, up to which text is looked at."""


def planned(options: Options, tokenizer) -> list[Planned]:
    """A task for each length, with samples for each depth.

    Raises:
        ConfigError: the haystack is too short, or a length too small.
    """
    data: dict[str, Any] = {"--depths": len(options.depths)}
    text = None
    if options.text:
        text = read_text(options.text)
        data["the files of --text"] = [digest_of_files(path) for path in options.text]
    found = []
    for length in options.lengths:
        sentences = [NOISE] if text is None else _sentences(text, length)
        counts = [len(ids) + 1 for ids in tokenizer(sentences, verbose=False)["input_ids"]]
        if options.text and sum(counts) < length:
            raise ConfigError(
                f"--text has {sum(counts)} tokens by this model's tokenizer, and --lengths has {length}: "
                "give more text"
            )
        make = partial(_documents, options, tokenizer, length, sentences, counts)
        found.append(
            Planned(
                "needle",
                length,
                _task(make),
                "score",
                lambda document: " " + document["outputs"][0],
                lambda document: {"depth": document["depth"]},
                data=data,
            )
        )
    return found


def _sentences(text: str, length: int) -> list[str]:
    """The sentences at the beginning of a text. How many depends on this length alone, so that the samples of
    a length are the same whatever other lengths are asked for."""
    text = text[: length * CHARACTERS * 4]
    return [each for each in re.split(r"(?<=[.!?])\s+|\n+", text) if each.strip()]


def _task(make):
    from lm_eval.api.task import ConfigurableTask

    from .harness import quiet

    with quiet():
        return ConfigurableTask(
            config={
                "task": "needle",
                "output_type": "generate_until",
                "test_split": "test",
                "custom_dataset": make,
                "doc_to_text": "{{input}}",
                "doc_to_target": "{{outputs}}",
                "gen_prefix": "{{gen_prefix}}",
                "target_delimiter": " ",
                "process_results": score,
                "metric_list": [
                    {"metric": "score", "aggregation": "mean", "higher_is_better": True}
                ],
                "generation_kwargs": {
                    "do_sample": False, "temperature": 0.0, "max_gen_toks": ANSWER_TOKENS, "until": [],
                },
            }
        )  # fmt: skip


def score(document: dict, results: list[str]) -> dict[str, float]:
    """1 if the answer has the number in it, as RULER scores."""
    return {"score": float(document["outputs"][0] in results[0])}


def _documents(options: Options, tokenizer, length: int, sentences, counts, **_) -> dict:
    import datasets

    found = []
    # Sample by sample and not depth by depth: a run of fewer samples has the first of these.
    for number in range(options.samples):
        for depth in options.depths:
            found.append(document(options, tokenizer, length, sentences, counts, depth, number))
    return {"test": datasets.Dataset.from_list(found)}


def document(
    options: Options, tokenizer, length: int, sentences: list[str], counts: list[int], depth: float,
    number: int,
) -> dict:  # fmt: skip
    """One sample.

    Args:
        length: the most tokens of prompt and answer.
        sentences, counts: of the haystack, and their tokens.
        depth: where the needle is, in percent of the sentences before it.
        number: of the sample, at this length and depth.
    """
    generator = random.Random(f"0-{length}-{depth:g}-{number}")
    key = generator.choice(KEYS)
    value = str(generator.randint(10**6, 10**7 - 1))
    needle = NEEDLE.format(key=key, value=value)
    prefix = PREFIX.format(key=key)

    def prompt(kept: list[str]) -> str:
        at = round(len(kept) * depth / 100)
        context = "\n".join([*kept[:at], needle, *kept[at:]])
        return QUESTION.format(context=context, key=key)

    def tokens(kept: list[str]) -> int:
        return len(tokenizer(f"{prompt(kept)} {prefix}", verbose=False)["input_ids"])

    room = length - ANSWER_TOKENS - (TEMPLATE_TOKENS if options.chat else 0)
    kept: list[str] = []
    place, before = generator.randrange(len(sentences)), -1
    while len(kept) > before:  # sentences have fewer tokens together than each by itself
        before, left = len(kept), room - tokens(kept)
        while counts[place % len(sentences)] <= left:
            kept.append(sentences[place % len(sentences)])
            left -= counts[place % len(sentences)]
            place += 1
    while kept and tokens(kept) > room:
        kept.pop()
    if not kept:
        raise ConfigError(
            f"--lengths has {length}, in which no sentence of the haystack fits beside the question with "
            "this tokenizer: use greater lengths"
        )
    return {"input": prompt(kept), "outputs": [value], "gen_prefix": prefix, "depth": float(depth)}


KEYS = tuple(
    f"{one}-{other}"
    for one in "quiet amber hollow eager distant silver gentle crooked".split()
    for other in "harbour lantern meadow compass orchard violin glacier feather".split()
)
"""What a needle's number is asked for by."""
