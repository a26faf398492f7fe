# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Finds numbers that some versions of Triton lose, in what any version makes of a kernel first.

Of a number that a loop carries from turn to turn, and that only the bounds of its inner loops read, Triton
3.6 and 3.7 keep the first value for all turns: they take it for unused (triton-lang/triton#9036).
"""

from __future__ import annotations

import re
from collections import defaultdict

NAME = r"%[\w$.#-]+"
DEFINED = re.compile(rf"((?:{NAME}(?::\d+)?(?:, )?)+) = ")
FOR = re.compile(rf"scf\.for (?:unsigned )?{NAME} = ({NAME}) to ({NAME}) step ({NAME})")
CARRIED = re.compile(rf"iter_args\(((?:{NAME} = {NAME}(?:, )?)*)\)")


def lost_numbers(source: str) -> list[str]:
    """Names of these numbers in a module, ``kernel.asm["source"]``. Of what a function is called with, it
    takes all for read."""
    # From each value to those that arithmetic makes of it, or that loops and ifs carry it to.
    flows = defaultdict(set)
    bounds = defaultdict(list)  # of the loops that a value bounds, those around them
    read, carried = set(), []
    # Of each region that is open: what its names stand for, as regions beside each other use the same ones;
    # its line, if it is a loop; and what its yields go to, if it is a loop or an if.
    scopes, loops, targets = [{}], [], []

    def value(name):
        return next((scope[name] for scope in reversed(scopes) if name in scope), name)

    for line, text in enumerate(map(str.strip, source.splitlines())):
        if text.startswith("}"):
            scopes.pop()
            last = loops.pop(), targets.pop()
        defined = DEFINED.match(text)
        operation = text[defined.end() :] if defined else text
        operands = [value(name) for name in re.findall(NAME, operation)]
        results = []
        for each in defined[1].split(", ") if defined else ():
            name, _, count = each.partition(":")
            results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
        scopes[-1].update({name: f"{name} {line}" for name in results})
        results = [value(name) for name in results]
        loop = FOR.match(operation)
        if loop:
            for each in loop.groups():
                bounds[value(each)].append(list(loops))
        elif operation.startswith("scf.yield") and targets[-1] is not None:
            for each, reached in zip(operands, targets[-1], strict=True):
                flows[each] |= reached
        elif operation.startswith("arith."):
            for each in operands:
                flows[each].update(results)
        else:
            read.update(operands)
        if not text.endswith("{"):
            continue
        scopes.append({})
        if text.startswith("}"):  # else, of the same if; do, of a while
            loops.append(last[0])
            targets.append(last[1])
        elif loop:
            pairs = CARRIED.search(operation)
            pairs = [pair.split(" = ") for pair in pairs[1].split(", ")] if pairs else []
            inits = [value(init) for _, init in pairs]
            scopes[-1].update({name: f"{name} {line}" for name, _ in pairs})
            arguments = [value(name) for name, _ in pairs]
            carried += [(line, argument) for argument in arguments]
            loops.append(line)
            targets.append([set(pair) for pair in zip(arguments, results, strict=True)])
            for init, reached in zip(inits, targets[-1], strict=True):
                flows[init] |= reached
        else:
            loops.append(None)
            targets.append(
                [{result} for result in results] if operation.startswith("scf.if") else None
            )

    def is_lost(loop, argument):
        reached = [argument]
        for each in reached:
            reached += flows[each].difference(reached)
        bounded = [around for each in reached for around in bounds[each]]
        return read.isdisjoint(reached) and bounded and all(loop in around for around in bounded)

    return [
        re.sub(r"(_\d+)? .*", "", argument[1:])
        for loop, argument in carried
        if is_lost(loop, argument)
    ]
