# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ``benchmarks/pretrain.py`` adds to a run of Megatron-LM that the run itself has no options for.

A stand-in for the checkout (:func:`stand_in`) is given to the example's script, which starts it as it
starts any: the plug-in is registered, then ``pretrain_gpt.py`` of the stand-in calls :func:`run`, which goes
on to the real one.
"""

from __future__ import annotations

import functools
import inspect
import json
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.autograd.profiler import record_function

from . import breakdown

SCRIPT = "pretrain_gpt.py"
RANK = "rank-{}.json"
"""A rank's breakdown in the folder of traces."""


def stand_in(checkout: Path, folder: Path, **settings) -> Path:
    """Make ``folder`` a Megatron-LM checkout that runs ``checkout`` with ``settings`` of :func:`run`."""
    checkout = checkout.resolve()
    folder.mkdir()
    for item in checkout.iterdir():
        if item.name != SCRIPT:
            (folder / item.name).symlink_to(item)
    root = str(Path(__file__).resolve().parents[2])
    (folder / SCRIPT).write_text(
        f"import sys\nsys.path.append({root!r})\nfrom benchmarks.model import instrument\n"
        f"instrument.run({str(checkout / SCRIPT)!r}, **{settings!r})\n",
        encoding="utf-8",
    )
    return folder


def run(
    script: str,
    traces: str | None = None,
    steps: int = 2,
    loss_chunk: int = 0,
    keep_output: bool = False,
    drop: Sequence[str] = (),
    documents: str | None = None,
    starts: str | None = None,
) -> None:
    """Run ``script`` as ``__main__``.

    Args:
        traces: a folder for traces and breakdowns of the last ``steps`` steps, one a rank.
        loss_chunk: tokens in a chunk of our loss, where attention is not ours; 0 for Megatron's own.
        keep_output: recomputation does not run Transformer Engine's attention again.
        drop: options to leave out with their values, by how they begin.
        documents: a file for the losses of the packed documents of the first micro-batch.
        starts: a file for the seconds at which rank 0 begins each step, with nothing left to do on its GPU.
    """
    sys.argv = [script, *without(sys.argv[1:], drop)]
    if loss_chunk:
        chunk_loss(loss_chunk)
    if keep_output:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        TEDotProductAttention.forward = kept(TEDotProductAttention.forward)
    if documents:
        record_documents(Path(documents))
    if traces:
        from megatron.training import get_args, training

        def total():
            return get_args().train_iters - get_args().iteration

        training.train_step = Profiling(Path(traces), steps, total).around(training.train_step)
    if starts:
        from megatron.training import training

        training.train_step = timing(training.train_step, Path(starts))
    runpy.run_path(script, run_name="__main__")


def without(words: Sequence[str], drop: Sequence[str]) -> list[str]:
    """``words`` without the options that begin with one of ``drop``, and without their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.startswith(tuple(drop))
        if not dropping:
            kept.append(word)
    return kept


def chunk_loss(chunk: int) -> None:
    """Give every ``GPTModel`` built from now on our loss in chunks, whatever its attention.

    ``GPTModel._postprocess`` goes by the output layer, once the plug-in is registered.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_mtraining.megatron import output_layer

    original = GPTModel.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        output_layer.chunk_loss(self, chunk)

    GPTModel.__init__ = __init__


def record_documents(path: Path) -> None:
    """Let the first ``GPTModel.forward`` with a loss write the length and the mean loss of each document, as
    rows of two numbers: of whole sequences, whatever context-parallel rank has their tokens."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    original = GPTModel.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        losses = original(self, *args, **kwargs)
        GPTModel.forward = original
        group = parallel_state.get_context_parallel_group()
        # Megatron gives each rank as many tokens of every document, in the order of documents.
        ends = kwargs["packed_seq_params"].cu_seqlens_q.long() // group.size()
        mask = kwargs["loss_mask"].reshape(-1).double()
        sums = torch.stack([mask * losses.detach().reshape(-1).double(), mask])
        sums = torch.nn.functional.pad(sums.cumsum(1), (1, 0))[:, ends].diff()
        torch.distributed.all_reduce(sums, group=group)
        if torch.distributed.get_rank() == 0:
            lengths = ends.diff() * group.size()
            path.write_text(json.dumps([lengths.tolist(), (sums[0] / sums[1]).tolist()]))
        return losses

    GPTModel.forward = forward


def kept(forward):
    """An attention's ``forward`` whose result full recomputation keeps, as it does the plug-in's: the first
    pass records the graph of attention alone, and the backward of the replay goes through that.

    Each attention has one call in flight at a time. Beside the output, all that its backward needs is kept:
    query, key and value.
    """

    @functools.wraps(forward)
    def call(self, query, key, value, *args, **kwargs):
        given = (query, key, value)
        if not self.training:
            return forward(self, *given, *args, **kwargs)
        if torch.is_grad_enabled():
            return _Kept.apply(self.__dict__.pop("kept"), *given)
        grads: list[torch.Tensor] = []
        with torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True)
            out = forward(self, *_Collect.apply(leaf, grads, *given), *args, **kwargs)
        self.kept = out, grads
        return out.detach()

    return call


class _Collect(torch.autograd.Function):
    """Operands as they are; puts their gradients into a list. No leaf holds their memory."""

    @staticmethod
    def forward(ctx, leaf, grads, *operands):
        ctx.grads = grads
        return tuple(each.detach() for each in operands)

    @staticmethod
    def backward(ctx, *grads):
        ctx.grads.extend(grads)
        return (None,) * (2 + len(grads))


class _Kept(torch.autograd.Function):
    """The output that the first pass kept."""

    @staticmethod
    def forward(ctx, kept, *operands):
        ctx.kept = kept
        return kept[0].detach()

    @staticmethod
    def backward(ctx, grad):
        out, grads = ctx.kept
        del ctx.kept
        torch.autograd.backward(out, grad)
        return None, *grads


class Profiling:
    """Traces the last ``steps`` training steps and writes this rank's :func:`breakdown.read` of them.

    Args:
        folder: gets ``trace-RANK.json`` and ``rank-RANK.json``.
        total: says in the first step how many there will be. The step before those traced runs under the
            profiler too, which gets ready in it; those before have ranges (microseconds) and no profiler.
    """

    def __init__(self, folder: Path, steps: int, total):
        self.folder, self.steps = folder, steps
        self._total, self._first, self._done, self._profiler = total, None, 0, None

    def around(self, train_step):
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def wrapped(*args, **kwargs):
            if self._first is None:
                self._first = self._total() - self.steps
                if self._first < 1:
                    raise ValueError(f"{self._total()} steps are too few to trace {self.steps}")
                given = signature.bind(*args, **kwargs).arguments
                mark(given["model"], given["optimizer"])  # what cannot be marked fails early
            at, self._done = self._done, self._done + 1
            if at < self._first - 1 or at >= self._first + self.steps:
                return train_step(*args, **kwargs)
            if at == self._first - 1:
                self._start()
            _finish()
            with record_function(breakdown.PREFIX + breakdown.STEP):
                result = train_step(*args, **kwargs)
                _finish()
            self._profiler.step()
            if self._done == self._first + self.steps:
                self._profiler.stop()
            return result

        return wrapped

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def _write(self, profiler) -> None:
        rank = torch.distributed.get_rank()
        trace = self.folder / f"trace-{rank}.json"
        profiler.export_chrome_trace(str(trace))
        try:
            found = breakdown.read(trace)
        except Exception:  # the run has been paid for, and the trace is there
            traceback.print_exc()
            return
        (self.folder / RANK.format(rank)).write_text(json.dumps(found), encoding="utf-8")


def timing(train_step, file: Path):
    """``train_step``, which first writes to ``file`` when it begins."""

    @functools.wraps(train_step)
    def call(*args, **kwargs):
        _finish()
        if torch.distributed.get_rank() == 0:
            with open(file, "a", encoding="utf-8") as seconds:
                seconds.write(f"{time.perf_counter()}\n")
        return train_step(*args, **kwargs)

    return call


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mark(model: Sequence[torch.nn.Module], optimizer) -> None:
    """Put ranges around the parts of a model (in Megatron's wrappers, a list) and of its optimizer."""
    for chunk in model:
        chunk.zero_grad_buffer = ranged(chunk.zero_grad_buffer, "optimizer")
        for module in list(chunk.modules()):
            core = getattr(module, "core_attention", None)
            if isinstance(core, torch.nn.Module):
                core.forward = both_ways(core.forward, "attention", ("query", "key", "value"))
            if hasattr(module, "_postprocess") and getattr(module, "post_process", False):
                module._postprocess = both_ways(module._postprocess, "loss", ("hidden_states",))
    for name in ("zero_grad", "step"):
        setattr(optimizer, name, ranged(getattr(optimizer, name), "optimizer"))


def ranged(function, part: str):
    """``function`` in the range of a part."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with record_function(breakdown.PREFIX + part):
            return function(*args, **kwargs)

    return call


def both_ways(function, part: str, names: Sequence[str]):
    """``function``, which returns a tensor, in the range of a part, and its backward, too.

    Args:
        names: parameters, whose gradients are the last that the backward computes.
    """
    signature = inspect.signature(function)
    name = breakdown.PREFIX + part

    @functools.wraps(function)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        given.update(zip(names, _Entry.apply(*(given[name] for name in names))))
        with record_function(name):
            result = function(*bound.args, **bound.kwargs)
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"{part} returns {type(result).__name__}, and only tensors can be marked"
            )
        return _Exit.apply(result, name)

    return call


_open = threading.local()
"""The ranges of backwards that this thread is in: autograd runs all nodes of a device in one thread."""


class _Exit(torch.autograd.Function):
    """Where a part's forward ends and its backward begins: nothing but that is done to its result."""

    @staticmethod
    def forward(ctx, result, name):
        ctx.name = name
        return result

    @staticmethod
    def backward(ctx, grad):
        if not hasattr(_open, "ranges"):
            _open.ranges = []
        _open.ranges.append(record_function(ctx.name))
        _open.ranges[-1].__enter__()
        return grad, None


class _Entry(torch.autograd.Function):
    """Where a part's forward begins: one node for all operands, so that its backward runs when all of their
    gradients are there."""

    @staticmethod
    def forward(ctx, *operands):
        ctx.set_materialize_grads(False)
        return operands

    @staticmethod
    def backward(ctx, *grads):
        _open.ranges.pop().__exit__(None, None, None)
        return grads
