# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The console command ``mtraining``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from dataclasses import dataclass

from ..errors import ConfigError
from .common.signals import Ended, ends_as_exceptions


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Its module is imported only when the subcommand is used, and has ``add_arguments(parser)`` and
    ``run(args) -> int``, the exit status. It may have ``when_ended(args) -> str``: what to say of a run
    that is interrupted or ended by a signal.
    """

    name: str
    module: str
    help: str


COMMANDS = (
    Command(
        "quickstart",
        "megatron_mtraining.tools.quickstart.command",
        "train a small model on this machine, dense and sparse, and compare the two",
    ),
    Command(
        "inspect",
        "megatron_mtraining.tools.inspect.command",
        "measure what sparse patterns keep of a trained model's attention, and recommend settings",
    ),
    Command(
        "data",
        "megatron_mtraining.tools.data.command",
        "turn documents into Megatron's indexed dataset, in exactly-long samples",
    ),
    Command(
        "convert",
        "megatron_mtraining.tools.convert.command",
        "convert checkpoints of Hugging Face to Megatron's and back, and compare the two",
    ),
    Command(
        "plan",
        "megatron_mtraining.tools.plan.command",
        "compute the memory that a training setting needs on each GPU",
    ),
    Command(
        "patch",
        "megatron_mtraining.tools.patching",
        "add the attention backend to a Megatron-LM checkout, look whether it is there, remove it",
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Run ``mtraining`` with ``argv`` (by default the process's) and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="mtraining", description="Dynamic sparse ring attention for Megatron-LM."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = None
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if argv[:1] == [command.name]:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
    args = parser.parse_args(argv)
    try:
        with ends_as_exceptions():
            return module.run(args)
    except ConfigError as error:
        print(f"mtraining {args.command}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Ended) as end:
        how = f"ended by {end.name}" if isinstance(end, Ended) else "interrupted"
        left = f"; {module.when_ended(args)}" if hasattr(module, "when_ended") else ""
        print(f"mtraining {args.command}: {how}{left}", file=sys.stderr)
        return 128 + (end.number if isinstance(end, Ended) else signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
