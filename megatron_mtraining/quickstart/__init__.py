# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Train a small Megatron-Core model on this machine, dense and sparse, and compare the two."""


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart with command-line arguments ``argv``; returns the exit status."""
    from .run import main as run

    return run(argv)
