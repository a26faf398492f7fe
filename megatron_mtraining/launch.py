# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Run a Megatron-LM training script with the attention backend registered, without a patch.

    torchrun --nproc-per-node 8 -m megatron_mtraining.launch /path/to/pretrain_gpt.py ARGUMENTS

In place of ``torchrun ... /path/to/pretrain_gpt.py ARGUMENTS``. For a first try on a machine without a GPU,
``-m megatron_mtraining.launch --cpu /path/to/pretrain_gpt.py ARGUMENTS`` runs the same script on CPU
tensors over gloo, and adds the arguments that this needs. It is slow: use small models and short sequences.
``--check`` in its place starts nothing: it says what a start would refuse on as many ranks as WORLD_SIZE has,
and needs no GPU.
"""

from __future__ import annotations

import importlib
import io
import runpy
import sys
import sysconfig
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb

from .checkout import python_mismatch, read_version
from .config import ConfigError
from .megatron.wrapping import EndOfRun, log, wrap
from .requirements import first_line

USAGE = (
    "python -m megatron_mtraining.launch [--cpu | --check] /path/to/pretrain_gpt.py [ARGUMENT ...]"
)


def main(argv: list[str] | None = None) -> None:
    """Register the backend, then run the script as ``__main__`` with the rest as its arguments.

    Args:
        argv: ``[--cpu | --check] SCRIPT [ARGUMENT ...]``; by default this process's.

    Raises:
        SystemExit: with a message (once on each host): the script is missing; Megatron is not importable,
            too old, or needs a later Python or pybind11; with ``--cpu``, an argument needs a GPU. What the
            script raises passes through.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    if argv[:1] == ["--check"]:
        _check(argv[1:])
    else:
        on_cpu = argv[:1] == ["--cpu"]
        _run(argv[1:] if on_cpu else argv, on_cpu=on_cpu)


def _check(argv: list[str]) -> None:
    """Run the script up to the end of its validation of arguments, silently.

    Raises:
        SystemExit: with one message, of what a start refuses.
    """
    said = _Kept()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            _run(argv, check=True)
        return
    except _Valid as valid:
        (args,) = valid.args
        absent = find_spec("transformer_engine") is None
        if absent and args.transformer_impl == "transformer_engine":
            # Not refused: a machine without GPUs may check what others run.
            missing = "warning: Transformer Engine is not installed here, and a start needs it"
            print(missing, file=sys.stderr)
        return
    except SystemExit as error:
        problem = error.code
        if not problem:
            return
        if not isinstance(problem, str):  # argparse has printed the usage, and what is wrong last
            problem = said.getvalue().strip().rpartition("\n")[2]
    except Exception as error:  # Megatron refuses by many types
        problem = first_line(error)
        if not str(error):  # an assertion without words: what it asserts
            problem += f": {extract_tb(error.__traceback__)[-1].line}"
    raise SystemExit(problem)


class _Kept(io.StringIO):
    """What a script prints. ``faulthandler.enable()``, which Megatron-LM 0.16 calls as it is imported, needs
    the number of a file: that of standard error."""

    def fileno(self) -> int:
        return 2


class _Valid(BaseException):
    """The arguments, its own one, are validated: nothing that follows is to run."""


def _stop_when_valid(original):
    """In place of ``set_global_variables``, the first that Megatron-LM calls with valid arguments."""

    def set_global_variables(args, *others, **named):
        from megatron.training.arguments import core_transformer_config_from_args

        if (
            find_spec("transformer_engine") is None
            and args.transformer_impl == "transformer_engine"
        ):
            args.apply_rope_fusion = False  # of Transformer Engine, whose absence is said below
        # It refuses sizes that do not divide, as a start does when it builds the model.
        core_transformer_config_from_args(args)
        raise _Valid(args)

    return set_global_variables


def _run(argv: list[str], on_cpu: bool = False, check: bool = False) -> None:
    if not argv:
        _stop(f"name the training script: {USAGE}")
    script = Path(argv[0])
    if not script.is_file():
        _stop(f"there is no training script {script}: {USAGE}")
    # What Python does for a script: its folder comes first, so that the checkout's own megatron,
    # gpt_builders and so on are found.
    checkout = script.resolve().parent
    sys.path.insert(0, str(checkout))
    try:
        mismatch = python_mismatch(read_version(checkout))
    except ConfigError as error:
        mismatch = str(error)
    if mismatch:
        _stop(mismatch)
    added = _use_cpu(argv[1:]) if on_cpu else []
    if check:
        _stop_at_valid_arguments()
    try:
        core = importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        _stop(
            f"Megatron is not importable ({error}): {script} is not in a Megatron-LM checkout and "
            "megatron-core is not installed"
        )
    _check_helpers(Path(core.__file__).parent / "datasets")
    from .megatron import register

    try:
        register()
    except ConfigError as error:
        _stop(f"{error} (found at {Path(core.__file__).parent})")
    sys.argv = [str(script), *argv[1:], *added]
    runpy.run_path(str(script), run_name="__main__")


def _use_cpu(arguments: list[str]) -> list[str]:
    """Prepare this process for ``--cpu``; returns the arguments to add."""
    from .megatron import cpu

    try:
        added = cpu.arguments(arguments)
        cpu.install()
    except ConfigError as error:
        _stop(str(error))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        _stop(f"--cpu runs the scripts of a Megatron-LM checkout, and {error}")
    log(f"--cpu: on CPU tensors, with {' '.join(added) or 'no further arguments'}")
    return added


def _stop_at_valid_arguments() -> None:
    """Let Megatron-LM validate arguments on a machine without a GPU, too, and stop it there."""
    import torch

    from .megatron import cpu

    try:
        owner = importlib.import_module("megatron.training.global_vars")
        if not torch.cuda.is_available():
            cpu.install()
    except ModuleNotFoundError as error:  # which the script says, if it needs it
        if not (error.name or "").startswith("megatron"):
            raise
    else:
        wrap(owner, "set_global_variables", _stop_when_valid)


def _check_helpers(folder: Path) -> None:
    """Stop if Megatron will fail to compile its dataset helpers, which it does as it starts, on one rank."""
    compiled = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    if (folder / "Makefile").is_file() and not compiled.is_file() and find_spec("pybind11") is None:
        _stop(
            "Megatron-LM compiles its dataset helpers with pybind11, which is not installed: "
            "pip install pybind11"
        )


def _stop(message: str) -> None:
    raise EndOfRun(f"megatron_mtraining.launch: {message}")


if __name__ == "__main__":
    main()
