# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Conversations short and long, packed, of Python's sources: a set for Megatron-LM's ``--sft``.

    python -m benchmarks.model.conversations FOLDER

Each line of ``chat.jsonl`` fills a pack. The tokenizer knows the most frequent words of the set.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_mtraining.tools.quickstart import text

ABOUT = "about.json"
"""What a set is, for rows of runs on it."""
SHORTEST, GRANULARITY = 64, 16
"""Tokens of a document. Megatron pads them to multiples of twice the context-parallel ranks: these are."""
ROLES = ("system", "user", "assistant")
SPECIAL = ("<unk>", "<pad>", "</s>", *(f"<{role}>" for role in ROLES))
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
AROUND = 2 * len(ROLES)
"""Tokens of a document that the template adds."""


def words_of() -> Iterator[str]:
    """Words, signs and line ends of Python's sources, file after file, again and again."""
    files = sorted(text.source_files())
    for path in itertools.cycle(files):
        for word in re.findall(r"\w+|[^\w\s]|\n", text.read(path)):
            yield "⏎" if word == "\n" else word


def lengths_of(pack: int, draw: random.Random) -> list[int]:
    """Lengths of documents that fill a pack: as many short ones as long ones, up to half of the pack."""
    found, left = [], pack
    while left:
        length = math.exp(draw.uniform(math.log(SHORTEST), math.log(max(SHORTEST + 1, pack // 2))))
        found.append(min(left, GRANULARITY * max(1, round(length / GRANULARITY))))
        left -= found[-1]
    return found


def save_tokenizer(folder: Path, words: list[str]) -> int:
    """Write a tokenizer of words, ``SFTTokenizer``'s with ``--sft-tokenizer-prompt-format default``, and
    return the size of its vocabulary, in which the special tokens come first."""
    import tokenizers
    import transformers

    ids = {word: at for at, word in enumerate([*SPECIAL, *words])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(ids)


def write(folder: Path, seq: int, packs: int, vocabulary: int) -> None:
    """Write conversations that fill packs, ``chat.jsonl``, and a tokenizer of their words."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, words, counts = random.Random(5), words_of(), collections.Counter()
    with open(folder / "chat.jsonl", "w", encoding="utf-8") as file:
        for _ in range(packs):
            messages = []
            for length in lengths_of(seq, draw):
                said = list(itertools.islice(words, length - AROUND))
                counts.update(said)
                asked = draw.randint(1, max(1, len(said) // 4))
                turns = ("", " ".join(said[:asked]), " ".join(said[asked:]))
                messages += [dict(role=role, content=turn) for role, turn in zip(ROLES, turns)]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    known = [word for word, _ in counts.most_common(vocabulary - len(SPECIAL))]
    about = dict(seq=seq, packs=packs, vocabulary=save_tokenizer(folder / "tokenizer", known))
    (folder / ABOUT).write_text(json.dumps(about))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seq", type=int, default=131072, help="tokens of a pack")
    parser.add_argument("--packs", type=int, default=40)
    parser.add_argument("--vocabulary", type=int, default=16384)
    options = parser.parse_args(words)
    if options.seq % GRANULARITY or options.seq < 2 * SHORTEST:
        parser.error(
            f"--seq {options.seq}: use a multiple of {GRANULARITY}, {2 * SHORTEST} or more"
        )
    write(**vars(options))


if __name__ == "__main__":
    main()
