# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The console command ``mtraining``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

from .. import __version__
from ..errors import ConfigError, one_line
from ..requirements import absent, installed
from .common import streams
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
    extra: str = ""
    """The package's extra that brings what it imports; none for what the package itself needs."""


COMMANDS = (
    Command(
        "quickstart",
        "megatron_mtraining.tools.quickstart.command",
        "train a small model on this machine with dense and with sparse attention, and compare them",
        "quickstart",
    ),
    Command(
        "inspect",
        "megatron_mtraining.tools.inspect.command",
        "measure how much attention sparse patterns hold in a trained model, and recommend settings",
        "inspect",
    ),
    Command(
        "data",
        "megatron_mtraining.tools.data.command",
        "tokenize documents and pack them into samples of exactly the training length",
        "data",
    ),
    Command(
        "convert",
        "megatron_mtraining.tools.convert.command",
        "convert checkpoints between Hugging Face and Megatron, compare their logits, write their prices",
        "convert",
    ),
    Command(
        "plan",
        "megatron_mtraining.tools.plan.command",
        "rank layouts over GPUs by speed, and say what memory and time a command needs",
    ),
    Command(
        "report",
        "megatron_mtraining.tools.run_report.command",
        "write a page on what a run did, from its log, TensorBoard's files or trainer_state.json",
        "report",
    ),
    Command(
        "eval",
        "megatron_mtraining.tools.eval.command",
        "run long-context benchmarks on a model with dense and sparse attention",
        "eval",
    ),
    Command(
        "patch",
        "megatron_mtraining.tools.patching",
        "add the attention backend to a Megatron-LM checkout, check for it, or remove it",
    ),
    Command(
        "doctor",
        "megatron_mtraining.tools.doctor.command",
        "say what is installed here and what of it will work, and test attention in 20 seconds",
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Run ``mtraining`` with ``argv`` (by default the process's) and return the exit status.

    The last line of standard error says what is wrong, where something is.
    """
    with streams.any_name_can_be_written():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(words: list[str]) -> int:
    """The exit status of a command line, and one line that says why it is not 0."""
    name = "mtraining"

    def left() -> str:
        """What a run leaves that ends early."""
        return ""

    def fail(message: str) -> int:
        with suppress(OSError):  # nobody can be told then
            print(f"{name}: {one_line(message)}", file=sys.stderr, flush=True)
        return 2

    try:
        try:
            parser, module = _parser(words)
            args = parser.parse_args(words)
            name = f"mtraining {args.command}"
            if hasattr(module, "when_ended"):
                left = lambda: f"; {module.when_ended(args)}"  # noqa: E731
            with ends_as_exceptions():
                status = module.run(args)
        except SystemExit:  # after help or an error
            _flush()
            raise
        _flush()
        return status
    except ConfigError as error:
        return fail(str(error))
    except ModuleNotFoundError as error:
        extra = next((each.extra for each in COMMANDS if words[:1] == [each.name]), "")
        return fail(str(absent(error, extra)))
    except BrokenPipeError:  # of a pipe to a program that has read enough, such as head
        streams.drop_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        streams.drop_stdout()
        return fail(f"{streams.what_failed(error)}{left()}")
    except (KeyboardInterrupt, Ended) as end:
        how = f"ended by {end.name}" if isinstance(end, Ended) else "interrupted"
        fail(f"{how}{left()}")
        return 128 + (end.number if isinstance(end, Ended) else signal.SIGINT)


def _flush() -> None:
    """What cannot be written is to be told now."""
    if sys.stdout is not None:
        sys.stdout.flush()


class _Version(argparse.Action):
    """``--version``: this package's, and of the packages that decide what works."""

    def __init__(self, **options):
        super().__init__(
            nargs=0, **{**options, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        )

    def __call__(self, parser, *args):
        names = ("torch", "triton", "megatron-core", "transformer-engine")
        others = ", ".join(f"{name} {installed(name)}" for name in names)
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"mtraining {__version__} (Python {python}, {others})")
        parser.exit()


def _parser(argv: list[str]):
    """The parser, with the arguments of the subcommand in ``argv``, and that one's module."""
    parser = streams.Parser(
        prog="mtraining", description="Dynamic sparse ring attention for Megatron-LM."
    )
    parser.add_argument(
        "--version",
        action=_Version,
        help="print the versions of this package, Python, torch, Triton, Megatron-Core and "
        "Transformer Engine",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = None
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if argv[:1] == [command.name]:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
    return parser, module


if __name__ == "__main__":
    sys.exit(main())
