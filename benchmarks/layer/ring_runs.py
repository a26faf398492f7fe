# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ``rings.py`` times: one attention layer on this rank, as functions that run it, by implementation.

For each implementation there is a function that gives its runs, by the name of what is timed: ``fwd``,
``fwdbwd`` and, of this project's ring, ``kernel_fwd``, ``kernel`` and ``index``, which ``rings.py`` explains.
All ranks make the same runs, and call them in the same order, as each of them waits for the others.

- :func:`sparse_runs`: this project's ring, with its silent counterpart, which sends nothing.
- :func:`dense_runs`: Transformer Engine's ring and PyTorch's, or why one cannot run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.cp_group import cp_group_of
from megatron_mtraining.kernels.attention import choose_backward
from megatron_mtraining.kernels.types import BackwardPath
from megatron_mtraining.layout import token_positions
from megatron_mtraining.pattern import build_index, search_pattern
from megatron_mtraining.ring import Ring, ring_of
from megatron_mtraining.ring.attention import KeysAndValues, ring_attention
from megatron_mtraining.ring.pruning import BackwardPruning
from megatron_mtraining.ring.transport import Transfer

from ..lib import workloads
from ..lib.policies_at_density import at_density, config_of
from ..lib.workloads import BLOCK
from .ring_cases import Case

DENSE = ("te_p2p", "torch_cp_cudnn")
IMPLEMENTATIONS = ("mtraining", *DENSE)


@dataclasses.dataclass
class Setting:
    """Where this run is: the ranks, their device, the shape of a layer's heads."""

    device: str
    group: dist.ProcessGroup
    rank: int
    world: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def slowest(self, number: float) -> float:
        """The largest of all ranks' numbers, on all ranks."""
        largest = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.item()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def operands_for(case: Case, setting: Setting, inner: int) -> tuple:
    """query, key, value and a gradient of out, of the tokens a rank has where nodes are ``inner`` ranks."""
    positions = token_positions(case.seq, setting.rank, setting.world, BLOCK, setting.device, inner)
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    return workloads.draw_structured(
        case.seq, positions, setting.heads, setting.kv_heads, setting.dim, case.vertical, dtype
    )


def forward_of(attention: Callable, operands) -> Callable:
    def run():
        with torch.no_grad():
            return attention(*operands[:3])

    return run


def both_ways_of(attention: Callable, operands) -> Callable:
    leaves = [tensor.detach().requires_grad_() for tensor in operands[:3]]

    def run():
        out = attention(*leaves)
        return torch.autograd.grad(out, leaves, operands[3].reshape(out.shape))

    return run


# This project's ring.


def make_ring(group: dist.ProcessGroup, inner: int) -> Ring:
    """The ring over a group, in inner groups of ``inner`` ranks; 0 is the default for so many ranks."""
    return ring_of(cp_group_of(group, inner or None))


def _at_hand(tensor) -> Transfer:
    """A transfer that never was."""
    return Transfer(tensor, tensor, [])


class SilentRing(Ring):
    """A ring that sends nothing: what should have come from other ranks is what this rank had at hand when
    it was first asked."""

    filled = None

    def post(self, tensor, kind, link, received=None):
        self.sent = tensor
        return _at_hand(tensor if received is None else received)

    def gather(self, tensor, after=None):
        # Numbers as real as the others': with zeros, or what is none, a GPU draws less power and runs faster.
        if self.filled is None or self.filled.shape != tensor.shape:
            own = tensor[self.cp.inner_rank] if after is None else self.sent
            self.filled = own.expand(tensor.shape).contiguous()
        return _at_hand(self.filled)

    def sum_columns(self, tensor):
        return _at_hand(tensor)


def silent(ring: Ring) -> SilentRing:
    """A ring like another one, in all but its transfers."""
    copy = object.__new__(SilentRing)
    copy.__dict__.update(ring.__dict__)
    return copy


def draw_given(case: Case, setting: Setting, inner: int):
    """The index of a drawn pattern, the same on all ranks."""
    torch.manual_seed(0)
    distances, columns = workloads.draw_unequal(
        case.seq, setting.heads, case.density, case.vertical
    )
    device = setting.device
    return build_index(
        distances.to(device), columns.to(device), case.seq, BLOCK, setting.world, inner
    )


class Sparse(NamedTuple):
    """What :func:`sparse_runs` makes of a case."""

    runs: dict[str, Callable]
    """Functions by what is to be timed."""
    traced: Callable
    """A forward to be traced."""
    index: Any
    config: MTrainingConfig | None
    """The settings; None if the pattern is drawn."""
    backward: dict[str, float]
    """Whether it is in one pass; with a pruned backward, the density that it keeps and the share of attention
    that it leaves out."""


def settings_of(case: Case, setting: Setting, operands, ring: Ring) -> MTrainingConfig | None:
    """The settings of a case; for policy price, with the price that gives its density on these operands."""
    if not case.price:
        return case.config()
    query, key, _, _ = operands

    def density_of(
        found,
    ) -> float:  # the pattern is the same on all ranks, and so is what they try next
        config = config_of(found, BLOCK)
        index = search_pattern(query, key, config, ring.cp, setting.scale)
        return index.density().double().mean().item()

    found = at_density("price", case.density, case.seq, BLOCK, density_of)
    if not found.is_near(case.density) and setting.rank == 0:
        print(f"  no price gives {case.density:.1%}: {found.density:.1%} is taken", flush=True)
    return case.config(found.setting["price"])


def pruned_backward(layer: Callable, operands, setting: Setting) -> dict[str, float]:
    """What a backward keeps and leaves out, the mean over heads and ranks.

    Args:
        layer: ``attend`` with settings that prune, of operands and ``observe_backward``.
    """
    seen: list = []
    leaves = [tensor.detach().requires_grad_() for tensor in operands[:3]]
    out = layer(*leaves, observe_backward=lambda *both: seen.append(both))
    torch.autograd.grad(out, leaves, operands[3])
    means = torch.stack([each.double().mean() for each in seen[0]])
    dist.all_reduce(means, group=setting.group)
    density, dropped = (means / setting.world).tolist()
    return dict(backward_density=round(density, 5), dropped_mass=round(dropped, 6))


def sparse_runs(case: Case, setting: Setting, operands, ring: Ring, inner: int) -> Sparse:
    """This project's ring on a case, and its silent counterpart."""
    query, key, value, _ = operands
    config = settings_of(case, setting, operands, ring)
    given = None if config else draw_given(case, setting, ring.cp.inner)
    pruning = BackwardPruning(case.threshold) if case.threshold else None

    def chosen():
        return search_pattern(query, key, config, ring.cp, setting.scale)

    def over(ring):
        def run(*tensors):
            # As a model's layer: keys are on their way while the pattern is chosen, columns travel once.
            keys = KeysAndValues(*tensors[1:], ring)
            index = given or search_pattern(
                *tensors[:2], config, ring.cp, setting.scale,
                gather_keys=keys.gather_column_keys,
            )  # fmt: skip
            return ring_attention(*tensors, index, ring, setting.scale, keys=keys, pruning=pruning)[
                0
            ]

        return run

    def layer(*tensors, **more):  # what a model calls, over the same ring
        return attend(
            *tensors, config=config, cp_group=setting.group, cp_inner=inner or None, **more
        )[0]

    whole = layer if config else over(ring)
    # One ring for both runs: what it hands back is kept, and is as large as a node's keys.
    kernels = over(silent(ring))
    runs = {
        "fwd": forward_of(whole, operands),
        "fwdbwd": both_ways_of(whole, operands),
        "kernel_fwd": forward_of(kernels, operands),
        "kernel": both_ways_of(kernels, operands),
    }
    if config and not config.keeps_all(case.seq):
        runs["index"] = chosen
    index = given or chosen()
    in_one_pass = not pruning and choose_backward(index, *operands) is BackwardPath.ONE_PASS
    backward: dict[str, float] = dict(one_pass=in_one_pass)
    if pruning:
        backward |= pruned_backward(layer, operands, setting)
    return Sparse(runs, over(ring), index, config, backward)


# Others' rings, dense.


def te_p2p(setting: Setting, stack: ExitStack) -> list[Callable]:
    """Ways to call it, the best first."""
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(
        setting.heads, setting.dim, num_gqa_groups=setting.kv_heads, attention_dropout=0.0,
        qkv_format="sbhd", attn_mask_type="causal", softmax_scale=setting.scale,
    )  # fmt: skip
    ranks = dist.get_process_group_ranks(setting.group)
    stream = torch.cuda.Stream()
    attention.set_context_parallel_group(setting.group, ranks, stream, cp_comm_type="p2p")
    return [attention]


def torch_cp_cudnn(setting: Setting, stack: ExitStack) -> list[Callable]:
    """Ways to call it, the best first: with grouped heads as they are, with key heads repeated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    set_rotate_method("alltoall")  # a ring; the default gathers all keys
    mesh = init_device_mesh(setting.device, (setting.world,))
    # It wants a buffer to cut into 2 x W chunks; the operands are cut already.
    buffer = torch.zeros(2 * setting.world, device=setting.device)
    stack.enter_context(context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]))
    stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))

    def grouped(*tensors):
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in tensors)
        # By its full name: context_parallel replaces the function in the module.
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=setting.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return out.permute(2, 0, 1, 3)

    def repeated(query, *rest):
        count = setting.heads // setting.kv_heads
        return grouped(query, *(tensor.repeat_interleave(count, 2) for tensor in rest))

    return [grouped, repeated]


def dense_runs(name: str, setting: Setting, operands, stack: ExitStack) -> dict | str:
    """Functions by what is to be timed; or why it cannot run, if every way to call it fails."""
    if setting.device != "cuda":
        return "it needs GPUs"
    reason, ways = "", []
    try:
        ways = {"te_p2p": te_p2p, "torch_cp_cudnn": torch_cp_cudnn}[name](setting, stack)
    except Exception as error:  # of any kind: another's code, of any version
        reason = first_line(error)
    if setting.slowest(not ways):
        return reason or "it is not there on another rank"
    # Contiguous, as its own model code would have them.
    operands = tuple(tensor.contiguous() for tensor in operands)
    for attention in ways:
        failed = False
        runs = {
            "fwd": forward_of(attention, operands),
            "fwdbwd": both_ways_of(attention, operands),
        }
        try:
            for run in runs.values():
                run()
            setting.synchronize()
        except Exception as error:
            failed, reason = True, reason or first_line(error)
        if not setting.slowest(failed):
            return runs
    return reason or "it failed on another rank"


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
