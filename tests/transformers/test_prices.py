# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Prices that a target recall moves: what counts for them, and what ends a step."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.transformers import advance, state_of, take_means
from tests.support.transformers_cases import small_model, with_pattern

pytest.importorskip("transformers")


@pytest.mark.parametrize("window", (64, 128))
def test_short_sequences_do_not_move_the_prices(window, tokens):
    """They are too short for the sampled rows, or the local window has all of their blocks."""
    options = dict(block_size=64, window=window, sample_strata=4, sample_rows=40)
    config = MTrainingConfig.from_options(target_recall=0.9, **options)
    short = tokens[:1, : 159 if window == 64 else 192]
    with torch.no_grad():
        found = []
        for count in (0, 3):
            ours = with_pattern(small_model(), config)
            for _ in range(count):
                ours(short, use_cache=False)
            advance(ours)
            assert state_of(ours).steering.now() == pytest.approx(0.25)
            if count:
                means = take_means(ours)
                assert (means.density == 1).all() and (means.recall == 1).all()
            for _ in range(count):
                ours(short, use_cache=False)
            ours(tokens[:1], use_cache=False)
            advance(ours)
            found.append((take_means(ours), torch.tensor(state_of(ours).steering.state())))
    (long, price), (mixed, other) = found
    assert other.equal(price) and not price.eq(0.25).all()
    torch.testing.assert_close(mixed.recall, long.recall)  # the short ones do not count
    torch.testing.assert_close(mixed.density, (3 + long.density) / 4)
    assert (long.recall < 1).any()


def test_packed_documents_within_the_window_do_not_move_the_prices(tokens):
    """As part of a batch entry they do not pay for the others either: the recall is of their rows."""
    config = MTrainingConfig.from_options(
        target_recall=0.9, block_size=64, window=64, sample_strata=16
    )
    positions = torch.arange(64).repeat(tokens.shape[1] // 64 + 1)[None, : tokens.shape[1]]
    found = []
    with torch.no_grad():
        for count in (0, 3):
            ours = with_pattern(small_model(), config)
            for _ in range(count):
                ours(tokens[:1], position_ids=positions, use_cache=False)
            ours(tokens[:1], use_cache=False)
            advance(ours)
            found.append((take_means(ours).recall, torch.tensor(state_of(ours).steering.state())))
    (long, price), (mixed, other) = found
    torch.testing.assert_close(mixed, long)
    torch.testing.assert_close(other, price)
    assert not price.eq(0.25).all() and (long < 1).any()


def test_a_target_recall_moves_the_prices(tokens):
    ours = with_pattern(
        small_model(), MTrainingConfig.from_options(target_recall=0.5, block_size=64)
    )
    before = state_of(ours).price(0, torch.device("cpu")).clone()
    ours(tokens, use_cache=False)
    advance(ours)
    after = state_of(ours).price(0, torch.device("cpu"))
    assert (after > before).all()  # more than half of the mass was kept
    ours.eval()
    ours(tokens, use_cache=False)
    advance(ours)
    assert state_of(ours).price(0, torch.device("cpu")).equal(after)  # evaluation does not count


def test_steps_of_an_optimizer_move_the_prices(tokens):
    """Without a call: at the next training forward. Micro-batches of a step move nothing."""
    config = MTrainingConfig.from_options(target_recall=0.5, block_size=64, window=64)
    tokens, found = tokens[:, :256], []
    for calls in (False, True):
        ours = with_pattern(small_model(num_hidden_layers=1), config)
        optimizers = [torch.optim.SGD([each], lr=1e-3) for each in list(ours.parameters())[:2]]
        for step in range(2):
            for batch in (tokens[:1], tokens[1:]):
                ours(batch, labels=batch, use_cache=False).loss.backward()
                assert state_of(ours).steering.step == step
            for optimizer in optimizers:
                optimizer.step()
            if calls:
                advance(ours)
        with torch.no_grad():  # as for the log-probabilities of old weights
            ours(tokens[:1], use_cache=False)
        assert state_of(ours).steering.step == 2
        found.append(torch.tensor(state_of(ours).steering.state()))
    assert (found[0] > 0.25).all()


def test_forwards_without_gradients_have_the_price_of_their_step(tokens):
    """The step that an optimizer has ended is over for all of them, whatever their mode."""
    config = MTrainingConfig.from_options(target_recall=0.5, block_size=64, window=64)
    ours, tokens = with_pattern(small_model(num_hidden_layers=1), config), tokens[:1, :256]
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    with torch.inference_mode():
        ours(tokens, use_cache=False)
    for step in (1, 2):
        ours(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        ours.train(step == 1)
        with torch.no_grad() if step == 1 else torch.inference_mode():
            before = ours(tokens, use_cache=False).logits
        assert state_of(ours).steering.step == step
        ours.train()
        torch.testing.assert_close(ours(tokens, use_cache=False).logits, before)
        assert state_of(ours).steering.step == step


def test_optimizers_of_other_models_move_no_prices(tokens):
    config = MTrainingConfig.from_options(target_recall=0.5, block_size=64, window=64)
    ours, other = (with_pattern(small_model(num_hidden_layers=1), config) for _ in range(2))
    third = torch.optim.SGD(other.parameters(), lr=1e-3)
    for model in (ours, other):  # before the first step of an optimizer of ours
        model(tokens[:1, :256], labels=tokens[:1, :256], use_cache=False).loss.backward()
    third.step()
    ours(tokens[:1, :256], use_cache=False)
    assert (state_of(ours).steering.step, state_of(other).steering.step) == (0, 0)
    mine, its = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (ours, other))
    for optimizer, steps in ((mine, 1), (its, 1), (mine, 2)):
        ours(tokens[:1, :256], labels=tokens[:1, :256], use_cache=False).loss.backward()
        optimizer.step()
        ours(tokens[:1, :256], use_cache=False)
        assert state_of(ours).steering.step == steps
    # The optimizer of a model whose parameters are copied, as in sharding, is not known by them.
    flat = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=1e-3)
    del mine, its, optimizer
    gc.collect()
    flat.step()
    ours(tokens[:1, :256], use_cache=False)
    assert state_of(ours).steering.step == 3


def test_a_target_recall_that_no_step_moves_says_so(tokens, monkeypatch):
    from megatron_mtraining.transformers import state

    monkeypatch.setattr(state, "MANY_FORWARDS", 2)
    config = MTrainingConfig.from_options(target_recall=0.5)
    ours = with_pattern(small_model(num_hidden_layers=1), config)
    ours(tokens[:1, :70])
    with pytest.warns(UserWarning, match="in 2 training forwards .*advance"):
        ours(tokens[:1, :70])
