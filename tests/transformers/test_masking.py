# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Padded batches and packed sequences with ``attn_implementation="mtraining"``."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.transformers import configure, take_means
from tests.support.transformers_cases import (
    DENSE,
    SEQ,
    SPARSE,
    assert_same,
    small_model,
    with_pattern,
)

pytest.importorskip("transformers")


@pytest.mark.parametrize("side", ("left", "right", "both"))
def test_padding_is_not_attended_to(side, tokens):
    mask = torch.ones(2, SEQ, dtype=torch.long)
    if side != "right":
        mask[0, :100] = 0
    if side != "left":
        mask[1, -77:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if side != "right":
        labels[0, 100] = -100  # the prediction of a first token comes from padding
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model = small_model()
    batch = dict(input_ids=tokens, attention_mask=mask, position_ids=positions, labels=labels)
    assert_same(model, with_pattern(model, DENSE), **batch)


def test_a_mask_without_padding_changes_nothing(tokens):
    ours = with_pattern(small_model(), SPARSE)
    mask = torch.ones_like(tokens)
    assert ours(tokens, use_cache=False).logits.equal(
        ours(tokens, attention_mask=mask, use_cache=False).logits
    )


@pytest.mark.parametrize("side", ("left", "right"))
def test_a_padded_entry_is_attended_to_as_alone(side, tokens):
    """Pattern, density and recall are of the tokens."""
    tail = dict(dense_tail=40)
    for training, options in ((True, {}), (False, {}), (False, tail)):
        ours = small_model().train(training)
        configure(ours, SPARSE, **options)
        padding = torch.zeros(1, 212, dtype=torch.long)
        order = slice(None, None, -1 if side == "left" else 1)
        padded = torch.cat([tokens[:1, :300], padding][order], 1)
        mask = torch.cat([torch.ones_like(tokens[:1, :300]), padding][order], 1)
        batch = torch.cat([padded, tokens[1:]]), torch.cat([mask, torch.ones_like(tokens[1:])])
        with torch.no_grad():
            found = ours(batch[0], attention_mask=batch[1], use_cache=False).logits
            both = take_means(ours, training)
            first = ours(tokens[:1, :300], use_cache=False).logits
            second = ours(tokens[1:], use_cache=False).logits
        alone = take_means(ours, training)
        torch.testing.assert_close(found[:1][mask > 0], first[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1:], second, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-4)
        assert both.density.max() < 1 and both.recall.max() < 1


def test_entries_with_the_same_padding_are_computed_together(tokens, monkeypatch):
    from megatron_mtraining.transformers import interface

    shapes, original = [], interface.attend

    def spy(query, *args, **kwargs):
        shapes.append(tuple(query.shape[:2]))
        return original(query, *args, **kwargs)

    monkeypatch.setattr(interface, "attend", spy)
    mask = torch.ones(4, SEQ, dtype=torch.long)
    mask[0, :100] = mask[2, :100] = mask[1, -50:] = mask[3] = 0
    ours = with_pattern(small_model(num_hidden_layers=1), SPARSE)
    logits = ours(tokens.repeat(2, 1), attention_mask=mask, use_cache=False).logits
    assert shapes == [(SEQ - 100, 2), (SEQ - 50, 1)] and logits.isfinite().all()


@pytest.mark.parametrize("how", ("cache", "mask", "padding"))
def test_packed_sequences_are_found_beside_a_cache_or_a_mask(how, tokens, monkeypatch):
    """There transformers itself does not look. It costs one look per forward, not one per layer."""
    from megatron_mtraining.transformers.masking import PatternMask

    looks, original = [], PatternMask._make_parts
    monkeypatch.setattr(
        PatternMask, "_make_parts", lambda *given: looks.append(1) or original(*given)
    )
    tokens = tokens[:1]
    positions = torch.cat([torch.arange(200), torch.arange(SEQ - 200)])[None]
    model = small_model()
    ours = with_pattern(model, DENSE)
    given = {
        "cache": dict(use_cache=True),
        "mask": dict(use_cache=False, attention_mask=torch.ones_like(tokens)),
        "padding": dict(use_cache=False, attention_mask=torch.ones(1, SEQ + 60, dtype=torch.long)),
    }[how]
    batch, kept = dict(input_ids=tokens, position_ids=positions), slice(None)
    if how == "padding":
        kept = slice(60, None)
        given["attention_mask"][:, :60] = 0
        batch = {name: torch.nn.functional.pad(each, (60, 0)) for name, each in batch.items()}
    with torch.no_grad():
        expected = model(tokens, position_ids=positions, use_cache=False).logits
        found = ours(**batch, **given).logits[:, kept]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert len(looks) == 1


def test_positions_that_skip_some_are_one_sequence_beside_a_mask(tokens):
    """As in transformers, which cuts there only without a mask."""
    positions = torch.cat([torch.arange(200), torch.arange(300, SEQ + 100)])[None]
    batch = dict(
        input_ids=tokens[:1], position_ids=positions, attention_mask=torch.ones_like(tokens[:1]),
        labels=tokens[:1],
    )  # fmt: skip
    model = small_model()
    assert_same(model, with_pattern(model, DENSE), **batch)


def test_packed_sequences_attend_within_themselves(tokens):
    lengths = (130, 7, 200, SEQ - 337)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = dict(input_ids=tokens[:1], position_ids=positions, labels=tokens[:1])
    model = small_model()
    assert_same(model, with_pattern(model, DENSE), **batch)


def test_sparse_packed_sequences_ignore_other_sequences(tokens):
    """What stands in another sequence may change which keys are selected, but the pattern has all of a short
    sequence."""
    lengths = (SEQ - 64, 64)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ours = with_pattern(small_model(), SPARSE)
    changed = tokens[:1].clone()
    changed[:, : lengths[0]] = changed[:, : lengths[0]].flip(-1)
    kept = [
        ours(x, position_ids=positions, use_cache=False).logits[:, lengths[0] :]
        for x in (tokens[:1], changed)
    ]
    torch.testing.assert_close(*kept)
