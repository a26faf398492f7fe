# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Output layer and loss of one rank: in chunks, and Megatron's own, with the logits of all tokens. Time of
the forward and of the backward, and peak memory beside the operands. Rows go to ``results/loss.jsonl``.

    python -m benchmarks.kernels.loss [--tokens N ...] [--chunk N ...] [--impl NAME ...]
    python -m benchmarks.kernels.loss --device cpu --tokens 256 --hidden 64 --vocab 1000 \
        --chunk 64 --dtype float32

Implementations: ``chunked`` (``main_grad`` in its rows: whether the weight's gradient is added to a float32
``main_grad`` or made in the model's dtype), ``megatron`` (``ColumnParallelLinear``, vocabulary-parallel cross
entropy), ``megatron_fused`` (``--cross-entropy-loss-fusion``), ``megatron_te`` (the same with
``--cross-entropy-fusion-impl te``; needs Transformer Engine). What runs out of memory has a row without
figures. Those of one number of tokens run in turns; times are medians.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from megatron_mtraining.loss import linear_cross_entropy
from megatron_mtraining.megatron.main_grad import MainGrad

from ..lib import record

MEGATRON = ("megatron", "megatron_fused", "megatron_te")
IMPLEMENTATIONS = ("chunked", *MEGATRON)


def megatron_core() -> str:
    """Its version, of a checkout on the path too; or "none"."""
    try:
        import megatron.core
    except ImportError:
        return "none"
    return megatron.core.__version__


def draw(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str):
    """Hidden ``[s, 1, h]``, weight ``[V, h]``, labels and gradients of losses ``[s, 1]``."""
    torch.manual_seed(0)
    states = torch.randn(tokens, 1, hidden, device=device, dtype=dtype).requires_grad_()
    weight = torch.empty(vocab, hidden, device=device, dtype=dtype).normal_(std=hidden**-0.5)
    labels = torch.randint(vocab, (tokens, 1), device=device)
    grad = torch.full((tokens, 1), 1 / tokens, device=device)
    return states, weight.requires_grad_(), labels, grad


def chunked(chunk: int, main_grad: bool):
    """The loss in chunks, as a function of operands; ``main_grad`` is made once."""

    def loss(states, weight, labels):
        if main_grad and not hasattr(weight, "main_grad"):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
        buffer = MainGrad(weight) if main_grad else None
        return linear_cross_entropy(states, weight, labels, chunk, gradient_buffer=buffer)

    return loss


@functools.cache
def start_megatron(device: str) -> None:
    """One process, which is all ranks there are."""
    from megatron.core import parallel_state

    folder = tempfile.mkdtemp()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def megatron(name: str, hidden: int, vocab: int, dtype: torch.dtype, device: str):
    """Megatron's output layer and its loss, as a function of operands."""
    start_megatron(device)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, params_dtype=dtype,
        use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    layer = tensor_parallel.ColumnParallelLinear(
        hidden, vocab, config=config, init_method=None, bias=False, skip_weight_param_allocation=True
    )  # fmt: skip
    group = parallel_state.get_tensor_model_parallel_group()
    if name == "megatron_te":
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

        def cross_entropy(logits, labels):
            # Its strides, as Megatron gives them.
            labels = torch.as_strided(labels, labels.size(), (labels.size()[1], 1))
            return te_parallel_cross_entropy(logits, labels, group, False)

    elif name == "megatron_fused":
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        def cross_entropy(logits, labels):
            return fused_vocab_parallel_cross_entropy(logits, labels, group)
    else:
        function = tensor_parallel.vocab_parallel_cross_entropy
        takes_group = "tp_group" in inspect.signature(function).parameters
        groups = {"tp_group": group} if takes_group else {}

        def cross_entropy(logits, labels):
            # Megatron-Core 0.16 takes no group: it knows one tensor-parallel group, this one.
            return tensor_parallel.vocab_parallel_cross_entropy(logits, labels, **groups)

    return lambda states, weight, labels: cross_entropy(layer(states, weight)[0], labels)


class Clock:
    """Milliseconds since the last call."""

    def __init__(self, device: str):
        self.device, self.last = device, 0.0

    def __call__(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed * 1e3


def run_once(function, operands, device: str):
    """Forward ms, backward ms, and on a GPU peak GiB beside the operands; None if memory runs out."""
    states, weight, labels, grad = operands
    clock, before = Clock(device), 0
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        clock()
        losses = function(states, weight, labels)
        forward = clock()
        losses.backward(grad.to(losses.dtype))
        backward = clock()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else None
        return forward, backward, peak
    except torch.OutOfMemoryError:
        return None
    finally:
        states.grad = weight.grad = None


def run_case(tokens: int, options) -> list[dict]:
    """Rows of all implementations at one number of tokens."""
    dtype, device = getattr(torch, options.dtype), options.device
    plain = draw(tokens, options.hidden, options.vocab, dtype, device)
    fused = (plain[0], plain[1].detach().clone().requires_grad_(), *plain[2:])
    todo = []
    for name in options.impl:
        if name == "chunked":
            for chunk in options.chunk:
                todo.append((name, chunk, False, chunked(chunk, False), plain))
                todo.append((name, chunk, True, chunked(chunk, True), fused))
        else:
            made = megatron(name, options.hidden, options.vocab, dtype, device)
            todo.append((name, None, None, made, plain))
    times: list[list | None] = [[] for _ in todo]
    for turn in range(options.rounds + 1):  # the first compiles, and is not counted
        for at, (*_, function, operands) in enumerate(todo):
            if times[at] is None:
                continue
            once = run_once(function, operands, device)
            if once is None:
                times[at] = None
            elif turn:
                times[at].append(once)
    rows = []
    for (name, chunk, main_grad, *_), measured in zip(todo, times):
        forward, backward, peak = zip(*measured) if measured else (None, None, (None,))
        rows.append(
            dict(
                tokens=tokens, hidden=options.hidden, vocab=options.vocab, dtype=options.dtype,
                impl=name, chunk=chunk, main_grad=main_grad, out_of_memory=measured is None,
                fwd_ms=round(statistics.median(forward), 3) if forward else None,
                bwd_ms=round(statistics.median(backward), 3) if backward else None,
                peak_gib=None if peak[-1] is None else round(max(peak), 3),
                megatron_core=megatron_core(),
            )
        )  # fmt: skip
    return rows


def parse(words=None):
    parser = record.parser(__doc__, "loss.jsonl")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 131072])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--chunk", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument(
        "--impl", nargs="+", choices=IMPLEMENTATIONS, default=["chunked", *MEGATRON[:2]]
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(words)
    for name in ("tokens", "hidden", "vocab", "chunk", "rounds"):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                parser.error(f"--{name} {value}: use 1 or more")
    if set(options.impl) & set(MEGATRON) and megatron_core() == "none":
        parser.error("there is no megatron-core, installed or on the path; try --impl chunked")
    if "megatron_te" in options.impl and record.installed("transformer-engine") == "none":
        parser.error("--impl megatron_te needs Transformer Engine, which is not installed")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; see --help for a run on the CPU")
    return options


def main() -> None:
    options = parse()
    for tokens in options.tokens:
        rows = run_case(tokens, options)
        for row in rows:
            print(
                record.line(
                    row, "tokens", "impl", "chunk", "main_grad", "fwd_ms", "bwd_ms", "peak_gib"
                ),
                flush=True,
            )
        record.append(options.output, rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
