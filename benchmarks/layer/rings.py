# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One attention layer over several GPUs with all that belongs to it, beside dense rings of others.

    torchrun --nproc-per-node 4 -m benchmarks.layer.rings [--inner 0 2] [--case TEXT ...] [--impl NAME ...]
    torchrun --nproc-per-node 2 -m benchmarks.layer.rings --device cpu --seq 2048 --shape 4 2 64    # a trial

Implementations: ``mtraining_flat`` (this project's ring: all ranks a node, or each, by ``--inner``),
``mtraining_hier`` (nodes of several ranks),
``te_p2p`` (Transformer Engine's ring) and ``torch_cp_cudnn`` (PyTorch's experimental context parallelism over
cuDNN), the latter two dense, with the zigzag layout; one that cannot run is left out with its reason. All
take turns in one run with the same numbers; a turn is several calls in a row, as layers of a model come;
between turns, ranks meet at a barrier. A time is a call's, the median over turns on each rank, then the
longest of the ranks:

- ``fwd_ms``, ``fwdbwd_ms``: a forward (the choice of the pattern counted in), and one with its backward.
- ``index_ms``: the choice of the pattern alone; null where the pattern is given or keeps everything.
- ``kernel_fwd_ms``, ``kernel_ms``: a forward, and one with its backward, with a ring that hands back what it
  should send: the same kernels on the same shapes, no transfer. (The choice of the pattern still talks to the
  other ranks.) Null for dense rings, as are the next two.
- ``exposed_fwd_ms``: ``fwd_ms`` less ``kernel_fwd_ms``: what of the transfers compute does not hide in a
  forward.
- ``exposed_comm_ms``: ``fwdbwd_ms`` less ``kernel_ms``: the same of a forward with its backward.

From one more run, watched (``timeline.py``) and queued, ``imbalance_worker`` and ``imbalance_step``: the
slowest rank's time in kernels over the mean, and each step's slowest summed, over the same mean. ``peak_gib``
is memory that forward and backward need beyond the operands. ``rounds_ms`` has the kernels' milliseconds of
each phase, rank and round in that run. ``hop_gb_s`` is the bandwidth of one hop when all ranks send to the
next at once.

``queued``: the same times of our rings where calls are launched while the GPU is busy, by what is timed
(``fwd_ms``, ``fwdbwd_ms``, ``kernel_fwd_ms``, ``kernel_ms``, ``index_ms``). Attention layers right after one
another, as in the other times, leave the host no lead, and short ones wait for it; in a model it has one from
the other layers' work. Without those of more than 50 ms, where it makes no difference; null on CPUs.

``--emulate-hosts`` makes NCCL believe that every two ranks (or N, with ``--emulate-hosts N``) are a host of
their own, so that it uses sockets between them: a slow network, on one machine. Three cases are for such
links, dense enough that a round's kernels take about as long as its transfers there: they run with this
option, or if ``--case`` names them. Two GPUs are enough for it: ranks of different "hosts" then share a GPU,
each at a part of its speed (start MPS, ``nvidia-cuda-mps-control -d``, or they take turns at it); rows say so
in ``ranks_per_gpu``.

Rows go to ``results/rings.jsonl``. What runs a layer is in ``ring_runs.py``, how it is timed in
``ring_times.py``; here are the cases and the rows.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megatron_mtraining.cp_group import shut_down
from megatron_mtraining.ring import Ring

from ..lib import record
from ..lib.workloads import BLOCK
from . import timeline
from .ring_cases import CASES, Case, cases_for
from .ring_runs import (
    DENSE,
    IMPLEMENTATIONS,
    Setting,
    Sparse,
    dense_runs,
    make_ring,
    operands_for,
    sparse_runs,
)
from .ring_times import hop_gb_s, peak_gib, queued, take_turns

SHOWN = (
    "impl", "inner", "density", "fwd_ms", "fwdbwd_ms", "index_ms", "exposed_fwd_ms", "exposed_comm_ms",
    "imbalance_worker", "imbalance_step", "peak_gib", "queued",
)  # fmt: skip
"""Of a row, on the screen."""
RANKS_A_HOST = 2
"""Of an emulated one, if ``--emulate-hosts`` says no other number."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron wants 1 of them, which sets what can overlap: so does this, unless the environment has it."""


def listed(case: Case) -> str:
    """A case's name, and when it is left out."""
    if case.by_name:
        return f"{case.name} (only by its whole name)"
    return case.name + (" (only with --emulate-hosts or by name)" if case.slow_link else "")


def has_dense(case: Case, options) -> bool:
    """Whether others' dense rings are timed beside a case."""
    every_pair = case.slash is not None and case.slash >= case.seq and not case.threshold
    return every_pair or not options.dense_once


# Measuring: times are taken in ring_times.py.


def watch(run: Callable, ring: Ring, operands, setting: Setting) -> list[list[timeline.Span]]:
    """Every rank's spans in a forward and backward, the second of two."""
    leaves = [tensor.detach().requires_grad_() for tensor in operands[:3]]
    ring.trace = trace = timeline.Trace(setting.device, setting.group)
    try:
        for _ in range(2):
            trace.begin()
            trace.phase = "forward"
            out = run(*leaves)
            trace.phase = "backward"
            torch.autograd.grad(out, leaves, operands[3])
        return trace.gather()
    finally:
        ring.trace = None


def run_case(case: Case, setting: Setting, rings: dict, options, common: dict) -> list[dict]:
    """The rows of one case.

    Args:
        rings: our rings by their ``inner``.
    """
    torch.manual_seed(0)
    if setting.device == "cuda":
        torch.cuda.manual_seed(setting.rank)
    by_inner = {}  # operands depend on which tokens a rank has

    def operands_in(inner: int):
        if inner not in by_inner:
            by_inner[inner] = operands_for(case, setting, inner)
        return by_inner[inner]

    runs, sparse = {}, {}
    with ExitStack() as stack:
        for inner, ring in rings.items() if "mtraining" in options.impl else ():
            levels = 1 < ring.cp.inner < ring.cp.world
            impl = ("mtraining_hier" if levels else "mtraining_flat", ring.cp.inner)
            sparse[impl] = sparse_runs(case, setting, operands_in(ring.cp.inner), ring, inner)
            runs[impl] = sparse[impl].runs
        for name in DENSE:
            if name in options.impl and has_dense(case, options):
                found = dense_runs(name, setting, operands_in(setting.world), stack)
                if isinstance(found, str):
                    say(setting, f"  {name} is left out: {found}")
                else:
                    runs[name, 0] = found
        flat = {(impl, op): run for impl, ops in runs.items() for op, run in ops.items()}
        taken = take_turns(flat, setting, options.budget) if flat else {}
        times = {impl: {op: taken[impl, op] for op in ops} for impl, ops in runs.items()}
        peaks = {impl: peak_gib(ops["fwdbwd"], setting) for impl, ops in runs.items()}
        ahead = {impl: queued(runs[impl], times[impl], setting) for impl in sparse}
    layers = {}
    for impl, (_, run, *_) in sparse.items():
        ring = next(ring for ring in rings.values() if ring.cp.inner == impl[1])
        layers[impl] = watch(run, ring, operands_in(ring.cp.inner), setting)
    rows = []
    for impl, ms in times.items():
        ours = sparse.get(impl)
        index = ours and ours.index
        row = row_of(case, setting, impl, index, ms, layers.get(impl), peaks[impl], ahead.get(impl))
        if ours:
            row |= settings_row(case, ours)
        rows.append(row | common)
    return rows


def row_of(case, setting, impl, index, ms, spans, peak, ahead=None) -> dict:
    """One row; ``index`` is None for dense attention."""
    name, inner = impl
    worker, step = timeline.imbalance(spans) if spans else (None, None)

    def rounded(number, digits=3):
        return None if number is None else round(number, digits)

    def exposed(whole, kernels):
        return rounded(ms[whole] - ms[kernels]) if kernels in ms else None

    return dict(
        impl=name, world=setting.world, inner=inner, case=case.name, seq=case.seq,
        heads=setting.heads, kv_heads=setting.kv_heads, dim=setting.dim,
        vertical=case.vertical if index else None, slash=case.slash if index else None,
        distances=rounded(index.distances().sum(-1).float().mean().item(), 1) if index else None,
        density=round(index.density().mean().item(), 5) if index else 1.0,
        fwd_ms=rounded(ms["fwd"]), fwdbwd_ms=rounded(ms["fwdbwd"]), index_ms=rounded(ms.get("index")),
        kernel_fwd_ms=rounded(ms.get("kernel_fwd")), kernel_ms=rounded(ms.get("kernel")),
        exposed_fwd_ms=exposed("fwd", "kernel_fwd"), exposed_comm_ms=exposed("fwdbwd", "kernel"),
        imbalance_worker=rounded(worker, 4), imbalance_step=rounded(step, 4), peak_gib=rounded(peak),
        queued=ahead and {f"{op}_ms": rounded(number) for op, number in ahead.items()},
        rounds_ms=timeline.by_round(spans) if spans else None,
    )  # fmt: skip


def settings_row(case: Case, ours: Sparse) -> dict:
    """What else a row says of our settings: the price, the backward's path and what it leaves out."""
    price = ours.config.policy.price if case.price else None
    pruned = dict(backward_threshold=case.threshold or None)
    if case.price:
        pruned |= dict(vertical=None)
    return dict(price=price, **pruned, **ours.backward)


def say(setting: Setting, text: str) -> None:
    if setting.rank == 0:
        print(text, flush=True)


def parse(words: list[str] | None = None) -> tuple[argparse.Namespace, list[Case]]:
    """Options that can work, and the cases they name; else ends with what is wrong."""
    parser = record.parser(__doc__, "rings.jsonl")
    parser.add_argument("--case", nargs="+", metavar="TEXT", help="cases with such a name only")
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument(
        "--dense-once",
        action="store_true",
        help="others' dense rings beside the cases of all distances only",
    )
    parser.add_argument(
        "--inner",
        type=int,
        nargs="+",
        default=[0],
        metavar="I",
        help="ranks of a node; 0: the default",
    )
    parser.add_argument("--seq", type=int, metavar="N", help="all cases at this length instead")
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[16, 2, 128], metavar=("HEADS", "KV", "DIM")
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=15, help="seconds a case, about")
    parser.add_argument(
        "--emulate-hosts",
        type=int,
        nargs="?",
        const=RANKS_A_HOST,
        metavar="N",
        help="every N ranks (2) are a host; cases for slow links run too",
    )
    parser.add_argument("--list", action="store_true", help="print the cases' names and stop")
    options = parser.parse_args(words)
    cases = cases_for(options.case, bool(options.emulate_hosts))
    if options.list:
        print("\n".join(listed(case) for case in (cases if options.case else CASES)))
        parser.exit()
    if not cases:
        parser.error(f"no case has any of {options.case} in its name; --list names them")
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N -m benchmarks.layer.rings ...")
    world = int(os.environ["WORLD_SIZE"])
    if world < 2:
        parser.error("one process is no ring: --nproc-per-node 2 or more")
    if options.seq is not None:
        cases = [case.at(options.seq) for case in cases]
    for case in cases:
        if case.seq < 4 * BLOCK or case.seq % (2 * world * BLOCK):
            parser.error(
                f"{case.seq} tokens are no multiple of 2 x {world} ranks x {BLOCK}, as all layouts need"
            )
    heads, kv_heads, dim = options.shape
    if min(options.shape) < 1 or heads % kv_heads or dim not in (64, 128):
        parser.error(f"--shape {heads} {kv_heads} {dim}: groups of heads, of dim 64 or 128")
    for inner in options.inner:
        if inner < 0 or (inner and world % inner):
            parser.error(f"--inner {inner}: 0, or a divisor of {world} ranks")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; try --device cpu --seq 2048 --shape 4 2 64")
    of_host = options.emulate_hosts
    if of_host is not None and (options.device == "cpu" or of_host < 2 or world % of_host):
        parser.error(f"--emulate-hosts {of_host} needs GPUs, and ranks in groups of 2 or more")
    if world == of_host:
        parser.error(f"--emulate-hosts {of_host} with {world} ranks is one host: use twice as many")
    local, gpus = ranks_and_gpus(options.device)
    if gpus < (of_host or local):
        parser.error(
            f"{local} ranks on {gpus} GPU(s): NCCL takes one rank of a host for each; start as many ranks as "
            f"there are GPUs, or with --emulate-hosts and {RANKS_A_HOST} GPUs"
        )
    return options, cases


def ranks_and_gpus(device: str) -> tuple[int, int]:
    """Of this machine; on CPUs each rank is taken to have one."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return local, torch.cuda.device_count() if device == "cuda" else local


LONG = 120.0
"""A case that takes more seconds prints where each rank is: one may wait for another that never comes."""


def emulate_hosts(ranks: int) -> None:
    """Before NCCL starts: every so many ranks are a host. Those of different ones reach each other over the
    loopback's sockets only."""
    os.environ["NCCL_HOSTID"] = f"emulated-{int(os.environ['RANK']) // ranks}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"
    # Several connections between two ranks: one alone is slower than any network that trains models.
    os.environ.setdefault("NCCL_SOCKET_NTHREADS", "4")
    os.environ.setdefault("NCCL_NSOCKS_PERTHREAD", "4")


def connect(options) -> Setting:
    """Start the process group."""
    if options.emulate_hosts:
        emulate_hosts(options.emulate_hosts)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    world = dist.get_world_size()
    return Setting(options.device, dist.group.WORLD, dist.get_rank(), world, *options.shape)


def versions(device: str) -> dict:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "none"
    return {"nccl": nccl, "transformer_engine": record.installed("transformer-engine")}


def main() -> None:
    os.environ.setdefault(CONNECTIONS, "1")  # before CUDA starts
    options, cases = parse()
    setting = connect(options)
    try:
        try:
            rings = {
                inner: make_ring(setting.group, inner)
                for inner in dict.fromkeys(
                    0 if inner == setting.world else inner for inner in options.inner
                )
            }
        except ValueError as error:
            sys.exit(str(error))
        hop = hop_gb_s(setting, 2**26 if options.device == "cuda" else 2**20)
        hosts = setting.world // (options.emulate_hosts or setting.world)
        local, gpus = ranks_and_gpus(options.device)
        common = dict(
            hosts=hosts,
            ranks_per_gpu=-(-local // gpus),
            hop_gb_s=round(hop, 3),
            max_connections=os.environ[CONNECTIONS],
            versions=versions(options.device),
        )
        say(setting, f"{setting.world} ranks, {hosts} host(s): {hop:.1f} GB/s a hop")
        for case in cases:
            say(setting, case.name)
            faulthandler.dump_traceback_later(LONG, repeat=True)
            rows = run_case(case, setting, rings, options, common)
            faulthandler.cancel_dump_traceback_later()
            if setting.rank == 0:
                print("\n".join(record.line(row, *SHOWN) for row in rows), flush=True)
                record.append(options.output, rows)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    finally:
        shut_down()


if __name__ == "__main__":
    main()
