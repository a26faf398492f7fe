# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings, prices, and means of density and recall of one transformers model."""

from __future__ import annotations

import warnings
import zlib
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..advice import Caps
from ..config import ConfigError, MTrainingConfig, Policy, Span, head_policies, option
from ..cp_group import ProcessGroup, RankGroup
from ..labels import TIMES
from ..pattern import PatternIndex, Steering
from .sequence import SequenceParallel

ATTRIBUTE = "mtraining_state"
"""The attribute of a model's body and of its attention modules that holds the model's state."""
MANY_FORWARDS = 1024
"""Training forwards without a step of an optimizer after which a target recall says that it waits for one."""

_STEPS: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""How often each optimizer of this process has stepped."""
_BODIES: WeakSet[nn.Module] = WeakSet()
"""The bodies of models that have had forwards here."""


def _count_step(optimizer, args, kwargs) -> None:
    _STEPS[optimizer] = _STEPS.get(optimizer, 0) + 1


register_optimizer_step_post_hook(_count_step)


class PatternMeans(NamedTuple):
    """Means over the calls of each layer since the last :func:`take_means`, and over their batch entries.
    Padding does not count."""

    density: Tensor
    """Fraction of the visible query-key pairs that is attended to: float32 ``[layers, heads]``, on
    the CPU; NaN for a layer that has not run, or has a sliding window. 1 of sequences that are too short for
    a pattern, and of long parts of a prompt that continue a KV cache."""
    recall: Tensor
    """Share of the attention mass that the pattern holds, on held-out rows that could have lost some: shape
    and NaN as ``density``. Calls that are dense whatever the settings say, as above, have no such rows; 1
    for a layer that has had no others."""


class BackwardMeans(NamedTuple):
    """Means over the backwards of each layer that were pruned (``backward_threshold``), since the last
    :func:`take_backward_means`."""

    density: Tensor
    """Fraction of the visible query-key pairs that the backward keeps: float32 ``[layers, heads]``, on the
    CPU; NaN for a layer without such a backward."""
    dropped: Tensor
    """Share of the attention in what it leaves out: shape and NaN as ``density``."""


class PatternState:
    """State that the attention layers of a model share.

    Args:
        config: the settings.
        num_layers, num_heads: layers of the model, and query heads of each layer.
        dense_tail: last tokens of a prompt that attend to all keys, in evaluation mode.
        num_steps: steps of the run that a schedule is over; None if a trainer will say it.

    Attributes:
        parallel: the ranks that have parts of the model's sequences; None if each has whole sequences.
        span: what a schedule is over; None if it is not known yet.
        is_placed: whether the devices of the model's parameters have been looked at.

    Raises:
        ConfigError: a settings file that does not fit the model.
    """

    def __init__(
        self,
        config: MTrainingConfig,
        num_layers: int,
        num_heads: int,
        dense_tail: int = 0,
        num_steps: int | None = None,
    ):
        self.config, self.dense_tail = config, dense_tail
        self.parallel: SequenceParallel | None = None
        self.shape = num_layers, num_heads
        self.span = None if num_steps is None else Span(0, num_steps)
        self.steering = Steering(config, shape=self.shape, share=self._share)
        self.is_placed = False
        # Training forwards of the step under way, and steps of optimizers before the first of them.
        self._forwards = 0
        self._steps_before: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._policies = [
            head_policies(config, i, num_layers, num_heads) for i in range(num_layers)
        ]
        # By whether the model trains, and by layer: float32 [4, heads] of density, calls, lost attention, and
        # the share of rows that could lose some.
        self._sums: dict[bool, dict[int, Tensor]] = {True: {}, False: {}}
        # Of backwards: float32 [3, heads] of density, dropped, calls.
        self._backward: dict[int, Tensor] = {}
        # Of each call that was timed: the share of the heads at a cap.
        self._capped: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        # Optimizers that have stepped are none of a copy's, and weak references cannot be pickled.
        return self.__dict__ | dict(_forwards=0, _steps_before=None)

    def __setstate__(self, found: dict[str, Any]) -> None:
        self.__dict__ |= found | dict(_steps_before=WeakKeyDictionary())

    def _share(self) -> float:
        if self.span is not None:
            return self.span.share(self.steering.step)
        warnings.warn(
            f"{option('schedule')} is given, and no training has begun: this evaluates with the price of its "
            "first step. For another, such as that of a trained model, call configure with a price"
        )
        return 0.0

    def share_sequences(self, group: ProcessGroup, evaluates: bool = True) -> None:
        """Have the model take parts of sequences, over the ranks of a group; see
        :class:`~.sequence.SequenceParallel`."""
        self.parallel = SequenceParallel(group, self.shape[1], self.config.block_size, evaluates)

    def agreed(self) -> dict[str, Any]:
        """By name, what ranks with parts of the same sequences must have alike."""
        ours = {
            "the model's layers and heads": self.shape,
            "dense_tail": self.dense_tail,
            "the step": self.steering.step,
        }
        if any(self._policies):  # the file may be another on another host
            ours["what the settings file says"] = zlib.crc32(repr(self._policies).encode())
        return self.config.given() | ours

    def policies(
        self, layer: int, parallel: SequenceParallel | None = None
    ) -> tuple[Policy, ...] | None:
        """The policy of each head of a layer; None if all heads have the policy of the run.

        Args:
            parallel: here and below, the ranks that share the heads; None if this process has all.
        """
        found = self._policies[layer]
        return found if found is None or parallel is None else found[parallel.heads]

    def price(
        self, layer: int, device: torch.device, parallel: SequenceParallel | None = None
    ) -> Tensor | None:
        """The layer's prices in this step, float32 ``[]`` or ``[heads]``; None: the prices of the
        settings."""
        heads = slice(0, self.shape[1]) if parallel is None else parallel.heads
        return self.steering.price(device, layer, heads.start, heads.stop - heads.start)

    def settle(self, body: nn.Module, all_ranks: bool) -> None:
        """Before a forward of the model's body. If an optimizer of its parameters has stepped since the last
        forward with gradients, a step has ended: :meth:`advance`.

        Args:
            all_ranks: whether all processes have such a forward, as in training. Otherwise what needs a
                collective is left to the next that all have.
        """
        if not self._forwards:
            return
        steps = _STEPS.copy()  # does not keep optimizers alive
        if steps == self._steps_before:
            return
        if self.steering.moves and not all_ranks and RankGroup.everyone().world > 1:
            return
        stepped = [each for each in steps if steps[each] != self._steps_before.get(each, 0)]
        if _have_parameters(stepped, body) or (
            not _have_parameters(list(steps), body) and _some_are_of_no_model(stepped)
        ):
            self.advance()

    def begin_forward(self, body: nn.Module) -> None:
        """Before a forward of the model's body with gradients, after :meth:`settle`.

        Raises:
            ConfigError: there is a schedule, and nothing says how many steps it is over.
        """
        if self.steering.has_schedule and self.span is None:
            raise ConfigError(
                f"{option('schedule')} is given, but nothing says how many steps it is over: train by "
                "Trainer, or call configure(model, config, num_steps=...)"
            )
        _BODIES.add(body)
        if not self._forwards:
            self._steps_before = _STEPS.copy()
        self._forwards += 1
        if self._forwards == MANY_FORWARDS and self.steering.changes:
            warnings.warn(
                f"in {MANY_FORWARDS} training forwards no optimizer of torch.optim has stepped, after which "
                "a target recall or a schedule moves the prices: with another optimizer, call "
                "megatron_mtraining.transformers.advance(model) after each of its steps"
            )

    def advance(self) -> None:
        """End a training step: a schedule goes on, and a target recall moves the prices. Then a collective
        over all processes."""
        self._forwards = 0
        with torch.inference_mode(False):  # prices outlive the forward that ends the step
            self.steering.advance(self.steering.step + 1, RankGroup.everyone())

    def observe(
        self,
        layer: int,
        index: PatternIndex,
        training: bool,
        parallel: SequenceParallel | None = None,
    ) -> None:
        """Add the pattern of one call to the means, and in training to the target recall. Does not wait for
        the device. The means are of all heads; the target recall has this rank's until the step ends."""
        # Configurations may have a window that no layer of their model takes.
        self.steering.take_in(layer)
        density, recall, exposed = index.density().detach(), index.recall, index.exposed
        if recall is None:  # everything is kept, whatever the price
            recall, exposed = torch.ones_like(density), 0.0
        elif training:
            first = 0 if parallel is None else parallel.heads.start
            policies = self.policies(layer, parallel)
            in_ring = parallel is not None and parallel.ring is not None
            copies = parallel.ranks.world if in_ring else 1
            self.steering.observe(1 - recall, layer, first, exposed, policies, copies)
            if TIMES.on:
                caps = Caps.of(policies or (self.config.policy,) * density.shape[1], self.config)
                if caps is not None:
                    self._capped.append(caps.reached(index).float().mean())
        ones = torch.ones_like(density)
        weight = ones * (exposed[:, None] if isinstance(exposed, Tensor) else exposed)
        _add(self._sums[training], layer, parallel, density, ones, 1 - recall, weight)

    def observe_dense(self, layer: int, batch: int, training: bool, device: torch.device) -> None:
        """Add a call that attended to everything, without a pattern, to the means."""
        ones = torch.ones(batch, self.shape[1], device=device)
        _add(self._sums[training], layer, None, ones, ones, 0 * ones, 0 * ones)

    def observe_backward(
        self, layer: int, parallel: SequenceParallel | None, density: Tensor, dropped: Tensor
    ) -> None:
        """Add what one pruned backward kept and left out, float32 ``[b, h]`` each, to the means."""
        _add(self._backward, layer, parallel, density, dropped, torch.ones_like(density))

    def take(self, training: bool = True) -> PatternMeans:
        """The means since the last call of this method, over forwards in training mode or over other
        forwards. Waits for the device."""
        means = torch.full((2, *self.shape), torch.nan)
        for layer, sums in self._sums[training].items():
            density, calls, lost, exposed = sums.cpu()
            means[0, layer] = density / calls
            recall = 1 - torch.where(exposed > 0, lost / exposed, 0.0)
            means[1, layer] = recall.clamp(0, 1)  # a quotient of two rounded sums
        self._sums[training] = {}
        return PatternMeans(*means)

    def take_capped(self) -> float | None:
        """The share of this rank's heads that had as many columns or slashes as a cap lets them, in the calls
        that were timed (:data:`~..labels.TIMES`) since the last call of this method; None if there were
        none. Waits for the device."""
        capped, self._capped = self._capped, []
        return torch.stack(capped).mean().item() if capped else None

    def take_backward(self) -> BackwardMeans:
        """The means of pruned backwards since the last call of this method. Waits for the device."""
        means = torch.full((2, *self.shape), torch.nan)
        for layer, sums in self._backward.items():
            means[:, layer] = (sums[:2] / sums[2]).cpu()
        self._backward = {}
        return BackwardMeans(*means)


def _have_parameters(optimizers: list[Optimizer], body: nn.Module) -> bool:
    """Whether one of the optimizers has a parameter of a model. Of a model whose optimizer has flat or
    sharded copies, none has; nor before its optimizer's first step."""
    own = {id(parameter) for parameter in body.parameters()}
    groups = [group for each in optimizers for group in each.param_groups]
    return any(id(parameter) in own for group in groups for parameter in group["params"])


def _some_are_of_no_model(optimizers: list[Optimizer]) -> bool:
    """Whether some of the optimizers have no parameter of a model here: they may have copies of one's."""
    return any(
        not any(_have_parameters([each], body) for body in list(_BODIES)) for each in optimizers
    )


def _add(
    sums: dict[int, Tensor], layer: int, parallel: SequenceParallel | None, *values: Tensor
) -> None:
    """Add values, float32 ``[b, h]`` each, to a layer's sums over ``b``, of all heads."""
    own = torch.stack(values).sum(1)
    if parallel is not None:
        own = parallel.of_all_heads(own)
    sums[layer] = sums[layer] + own if layer in sums else own


def find_state(model: nn.Module) -> PatternState | None:
    """The state of a model with settings; None of another."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    states = (getattr(module, ATTRIBUTE, None) for module in modules)
    return next((state for state in states if state is not None), None)


def state_of(model: nn.Module) -> PatternState:
    """The state of a model that :func:`~.switch.configure` or ``attn_implementation="mtraining"`` has given
    settings.

    Raises:
        ConfigError: it has none.
    """
    state = find_state(model)
    if state is None:
        raise ConfigError(
            f"{type(model).__name__} has no settings of attention mtraining: call "
            "megatron_mtraining.transformers.configure(model, config) first"
        )
    return state


def take_means(model: nn.Module, training: bool = True) -> PatternMeans:
    """Density and recall of a model's layers and heads in this process, since the last call of this function.
    With ``sequence_parallel``, of the sequences that its group shares: the same on all of its ranks.

    Args:
        training: whether to return the means of forwards in training mode, or of other forwards (prefill;
            decoding is dense and does not count). :class:`PatternMeans` says what counts.
    """
    return state_of(model).take(training)


def take_backward_means(model: nn.Module) -> BackwardMeans:
    """What the pruned backwards of a model's layers and heads kept and left out, since the last call of this
    function."""
    return state_of(model).take_backward()


def advance(model: nn.Module) -> None:
    """End a training step now: a target recall moves the prices. With a target and several processes, this is
    a collective over all processes. Without this call, the next forward in training mode after a step of an
    optimizer of ``torch.optim`` ends the step (without a collective, one in evaluation mode, too), and
    ``Trainer`` does so itself. Call it before you save the prices, or their last step is not in them."""
    state_of(model).advance()
