# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A policy and a selector of a user's own, as CONTRIBUTING says, alone and beside others in a layer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.config import FixedPolicy, MobaPolicy, Policy, PricePolicy
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.pattern import Pattern, Selected, Selector, search_pattern, selects_for
from megatron_mtraining.pattern.selector import _SELECTORS
from tests.support.attention_cases import dense_attention, random_operands

SEQ, BLOCK = 500, 64


@dataclass(frozen=True)
class EveryPolicy(Policy):
    """Blocks at every ``step``-th distance."""

    name = "every"
    step: int = 3


@dataclass(frozen=True)
class NobodysPolicy(Policy):
    name = "nobody's"


@selects_for(EveryPolicy)
class EverySelector(Selector):
    def select(self, query, key, call):
        (batch, heads), sample = query.shape[1:3], call.sample
        apart = torch.arange(-(-sample.seq_length // sample.block_size), device=query.device)
        steps = torch.tensor([each.step for each in self.policies], device=query.device)
        kept = (apart % steps[:, None] == 0) | (apart < sample.window_blocks)
        distances = kept.to(torch.uint8).expand(batch, -1, -1).contiguous()
        columns = torch.arange(call.sink, dtype=torch.int32, device=query.device)
        columns = columns.expand(batch, heads, -1).contiguous()
        return Selected(
            Pattern(distances, columns), {"kept": kept.float().mean(-1).expand(batch, -1)}
        )


def settings(policy):
    config = MTrainingConfig.from_options(block_size=BLOCK, window=64, sink=4, sample_strata=16)
    return config.with_policy(policy)


def search(config, **given):
    torch.manual_seed(0)
    query, key, _, _ = random_operands(SEQ, 2, 4, 2, 64, torch.float32, "cpu")
    return search_pattern(query, key, config, CPGroup(None), 0.125, **given)


def test_attention_by_a_policy_of_a_users_own():
    query, key, value, _ = random_operands(SEQ, 2, 4, 2, 64, torch.float32, "cpu")
    result = attend(query, key, value, config=settings(EveryPolicy(step=4)))
    assert result.index.distances()[0, 0].tolist() == [n < 2 or n % 4 == 0 for n in range(8)]
    masks = torch.stack(
        [torch.stack([result.index.token_mask(b, h) for h in range(4)]) for b in range(2)]
    )
    truth = dense_attention(query, key, value, torch.ones_like(query), masks, 64**-0.5)[0]
    torch.testing.assert_close(result.out.double(), truth.double(), atol=1e-4, rtol=1e-4)
    assert (result.index.metrics["kept"] == 3 / 8).all()


def test_recall_is_measured_where_a_selector_does_not():
    """By the same numbers as the selectors that do."""
    config = settings(FixedPolicy(30, 2))
    theirs = search(config)

    @selects_for(NobodysPolicy)
    class Same(Selector):
        def select(self, query, key, call):
            return Selected(Pattern(theirs.member, theirs.columns), {})

    ours = search(config.with_policy(NobodysPolicy()))
    del _SELECTORS[NobodysPolicy]
    assert torch.equal(ours.recall, theirs.recall) and (ours.recall < 1).all()


@pytest.mark.parametrize("block_lists", [False, True], ids=["slashes", "and lists"])
def test_each_head_has_what_its_own_policy_selects(block_lists):
    """Kinds that share a selector, with other settings in each head; and metrics that one kind alone has."""
    policies = [EveryPolicy(3), PricePolicy(price=0.8), FixedPolicy(30, 2), EveryPolicy(5)]
    if block_lists:
        policies[1:3] = [MobaPolicy(top_k=1), MobaPolicy(top_k=2)]
    found = search(settings(PricePolicy(price=0.8)), head_policies=policies)
    for head, policy in enumerate(policies):
        alone = search(settings(policy))
        for batch in range(2):
            assert torch.equal(found.token_mask(batch, head), alone.token_mask(batch, head))
        for name, value in found.metrics.items():
            own = alone.metrics.get(name)
            if own is None:
                assert value[:, head].isnan().all()
            else:
                assert torch.equal(value[:, head], own[:, head])


def test_a_policy_without_a_selector_is_named():
    with pytest.raises(ConfigError, match="policy nobody's has no selector: decorate one"):
        search(settings(NobodysPolicy()))
