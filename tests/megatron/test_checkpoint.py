# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A checkpoint's arguments must load in a process that knows nothing of this package."""

import pickle
import subprocess
import sys
from argparse import Namespace

from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining.megatron import register
from megatron_mtraining.megatron.checkpoint import wrap_generate_state_dict


def state_of(args):
    return wrap_generate_state_dict(lambda args, weights: {"args": args, "model": weights})(args, 1)


def test_saved_arguments_load_without_the_package(tmp_path):
    register()
    args = Namespace(attention_backend=AttnBackend["mtraining"], mtraining_vertical=7, lr=0.1)
    state = state_of(args)
    assert args.attention_backend is AttnBackend["mtraining"], "the run goes on with its backend"
    assert state["model"] == 1 and state["args"].mtraining_vertical == 7
    (tmp_path / "state.pkl").write_bytes(pickle.dumps(state))
    code = (
        "import pickle, sys, megatron.core.transformer.enums as enums\n"
        "state = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert not hasattr(enums.AttnBackend, 'mtraining')\n"
        "print(state['args'].attention_backend.name)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state.pkl")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "auto"


def test_other_runs_save_what_they_have():
    args = Namespace(attention_backend=AttnBackend.flash)
    assert state_of(args)["args"] is args
