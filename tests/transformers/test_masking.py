# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Padded batches and packed sequences with ``attn_implementation="mtraining"``."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.transformers import configure, take_means
from megatron_mtraining.transformers.masking import PatternMask
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
    from megatron_mtraining.transformers import checkpointing

    shapes, original = [], checkpointing.attend

    def spy(query, *args, **kwargs):
        shapes.append(tuple(query.shape[:2]))
        return original(query, *args, **kwargs)

    monkeypatch.setattr(checkpointing, "attend", spy)
    mask = torch.ones(4, SEQ, dtype=torch.long)
    mask[0, :100] = mask[2, :100] = mask[1, -50:] = mask[3] = 0
    ours = with_pattern(small_model(num_hidden_layers=1), SPARSE)
    logits = ours(tokens.repeat(2, 1), attention_mask=mask, use_cache=False).logits
    assert shapes == [(SEQ - 100, 2), (SEQ - 50, 1)] and logits.isfinite().all()


@pytest.mark.parametrize("how", ("cache", "mask", "padding"))
def test_packed_sequences_are_found_beside_a_cache_or_a_mask(how, tokens, monkeypatch):
    """There transformers itself does not look. It costs one look per forward, not one per layer."""
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


@pytest.mark.parametrize("given", ("nothing", "cache", "mask"))
def test_positions_that_skip_some_are_one_sequence(given, tokens):
    """Where they do not increase, the next begins. transformers itself cuts where they skip, and looks only
    where there is neither a cache nor a mask."""
    stretches = (5, 205), (300, 350), (7, SEQ - 243)
    positions = torch.cat([torch.arange(*each) for each in stretches])[None]
    more = {
        "nothing": dict(use_cache=False),
        "cache": dict(use_cache=True),
        "mask": dict(use_cache=False, attention_mask=torch.ones_like(tokens[:1])),
    }[given]
    model = small_model(num_hidden_layers=1)
    hidden = torch.full((1, 1, SEQ, SEQ), -torch.inf).triu(1)
    hidden[..., 250:, :250] = -torch.inf
    with torch.no_grad():
        expected = model(tokens[:1], position_ids=positions, attention_mask=hidden).logits
        found = with_pattern(model, DENSE)(tokens[:1], position_ids=positions, **more).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", (None, 90))
def test_positions_that_only_skip_some_are_one_sequence(window, tokens):
    positions = torch.cat([torch.arange(200), torch.arange(400, SEQ + 200)])[None]
    model = small_model("mistral", num_hidden_layers=1, sliding_window=window)
    batch = dict(input_ids=tokens[:1], position_ids=positions, use_cache=False)
    with torch.no_grad():
        expected = model(**batch, attention_mask=torch.ones_like(tokens[:1])).logits
        found = with_pattern(model, DENSE)(**batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_positions_between_whole_numbers_increase(tokens):
    batch = dict(input_ids=tokens[:1], position_ids=torch.arange(SEQ)[None] / 2)
    batch["attention_mask"] = torch.ones_like(tokens[:1])  # or transformers cuts
    model = small_model(num_hidden_layers=1)
    with torch.no_grad():
        expected = model(**batch).logits
        found = with_pattern(model, DENSE)(**batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", (1, 3, 4))
def test_sequences_of_one_token_and_of_one_picture(rows, tokens):
    """Positions of time, height and width, as models of pictures have them; or of text alone."""
    lengths, side = (40, 1, 64, 64, 30), torch.arange(8)
    of_text = torch.cat([torch.arange(n) for n in lengths])
    positions = of_text.repeat(rows, 1)
    if rows == 3:
        picture = torch.stack([0 * torch.arange(64), side.repeat_interleave(8), side.repeat(8)])
        positions[:, 41:169] = picture.repeat(1, 2)
    given = positions if rows == 1 else positions[:, None]
    starts = PatternMask(dict(position_ids=given)).parts(1, sum(lengths), tokens.device)[0]
    assert starts.documents.start[0].unique().tolist() == [0, 40, 41, 105, 169]


def test_layers_that_share_keys_have_all_queries():
    """Gemma 4 slices masks for them, to all tokens if logits_to_keep is 0."""
    mask = PatternMask({})
    assert mask[:, :, 0:, :] is mask
    with pytest.raises(ConfigError, match="logits_to_keep is given"):
        mask[:, :, -1:, :]


def test_a_cache_is_not_continued_by_packed_sequences(tokens):
    ours = with_pattern(small_model(num_hidden_layers=1), DENSE).eval()
    numbers = torch.ones_like(tokens[:1])
    numbers[:, 300:] = 2
    with torch.no_grad():
        cache = ours(tokens[:1, :300], use_cache=True).past_key_values
        with pytest.raises(ConfigError, match="counts packed sequences, and there is a KV cache"):
            ours(tokens[:1, 300:], past_key_values=cache, attention_mask=numbers)


LENGTHS = (130, 64, 106)
NUMBERS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]
ENDS = torch.tensor([0, 130, 194, 300], dtype=torch.int32)
RESTARTS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CARRIERS = {
    "cu_seq_lens": dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS, max_length_q=130, max_length_k=130),
    "seq_idx": dict(seq_idx=NUMBERS),
    "numbers": dict(attention_mask=NUMBERS + 1),
    "numbers and a cache": dict(attention_mask=NUMBERS + 1, use_cache=True),
    "all": dict(
        seq_idx=NUMBERS, cu_seq_lens_q=ENDS, position_ids=RESTARTS, attention_mask=NUMBERS + 1
    ),
}


@pytest.mark.parametrize("name", CARRIERS)
def test_packed_sequences_need_no_position_ids(name, tokens):
    """Each attends to itself alone, however the batch says where it starts."""
    model = small_model(num_hidden_layers=1)
    batch = dict(use_cache=False, input_ids=tokens[:1, :300]) | CARRIERS[name]
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in tokens[:1, :300].split(LENGTHS, 1)], 1)
        found = with_pattern(model, DENSE)(**batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ("position_ids", "attention_mask", "cu_seq_lens_q", "seq_idx"))
def test_several_entries_with_padding_and_packed_sequences(name, tokens):
    """Padding on the left of one and on the right of the other."""
    width = 320
    mask = torch.zeros(2, width, dtype=torch.long)
    mask[0, 20:] = NUMBERS + 1
    mask[1, :300] = (NUMBERS > 1) + 1
    ids = tokens[:, :width] * (mask > 0)
    given = {
        "position_ids": dict(position_ids=torch.zeros(2, width, dtype=torch.long)),
        "cu_seq_lens_q": dict(cu_seq_lens_q=torch.tensor([0, 20, 150, 214, 320, 514, 620, 640])),
        "seq_idx": dict(seq_idx=mask),
        "attention_mask": {},
    }[name]
    if name == "position_ids":
        given[name][0, 20:] = RESTARTS
        given[name][1, :300] = torch.cat([torch.arange(194), torch.arange(106)])
    sent = mask if name == "attention_mask" else (mask > 0).long()
    model = small_model(num_hidden_layers=1)
    with torch.no_grad():
        found = with_pattern(model, DENSE)(ids, attention_mask=sent, **given).logits
        for entry, lengths in enumerate((LENGTHS, (194, 106))):
            parts = ids[entry : entry + 1, mask[entry] > 0].split(lengths, 1)
            expected = torch.cat([model(part).logits for part in parts], 1)[0]
            torch.testing.assert_close(
                found[entry][mask[entry] > 0], expected, rtol=1e-3, atol=1e-4
            )


REFUSED = {
    "cu_seq_lens_q and position_ids differ .* token 100 of batch entry 0": dict(
        cu_seq_lens_q=torch.tensor([0, 100, 300]), position_ids=RESTARTS
    ),
    "cu_seq_lens_q and cu_seq_lens_k differ .* token 130": dict(
        cu_seq_lens_q=torch.tensor([0, 130, 300]), cu_seq_lens_k=torch.tensor([0, 300])
    ),
    "seq_idx and position_ids differ .* token 130": dict(
        seq_idx=0 * NUMBERS, position_ids=RESTARTS
    ),
    "cu_seq_lens_q of the batch: .* up to 194: .* 300 tokens": dict(cu_seq_lens_q=ENDS[:3]),
    "seq_idx numbers .* 2 is followed by 0, at token 250": dict(
        seq_idx=torch.cat([NUMBERS[:, :250], NUMBERS[:, :50]], 1)
    ),
    r"seq_idx is of shape \[1, 299\]": dict(seq_idx=NUMBERS[:, 1:]),
    "values other than 0 and 1": dict(attention_mask=-NUMBERS),
    "is torch.float32 with values other": dict(attention_mask=NUMBERS.log()),
    "attention_mask is 0 everywhere": dict(attention_mask=torch.zeros(1, 300)),
    r"attention_mask is of shape \[1, 310\]": dict(
        attention_mask=torch.ones(1, 310, dtype=torch.long), use_cache=True
    ),
    r"mask of shape \[1, 1, 300, 300\]": dict(attention_mask=torch.ones(1, 1, 300, 300).bool()),
    "token_type_ids, which attention mtraining does not know": dict(token_type_ids=NUMBERS),
    "softcap, which": dict(softcap=30.0),
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_says_where_tokens_are_is_read_or_refused(match, tokens):
    ours = with_pattern(small_model(num_hidden_layers=1), DENSE)
    with pytest.raises(ConfigError, match=match):
        ours(tokens[:1, :300], **REFUSED[match])


def test_masks_of_the_models_own_are_refused(tokens, monkeypatch):
    """One that sees pictures, or everything, both ways."""
    from transformers.masking_utils import create_causal_mask
    from transformers.models.llama import modeling_llama

    def overlaid(**given):
        return create_causal_mask(**given, block_sequence_ids=(NUMBERS == 1).int() - 1)

    ours = with_pattern(small_model(num_hidden_layers=1), DENSE)
    with pytest.raises(ConfigError, match="overlays a mask of its own|is not causal"):
        ours(tokens[:1, :300], is_causal=False)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", overlaid)
    with pytest.raises(ConfigError, match="overlays a mask of its own"):
        ours(tokens[:1, :300], use_cache=False)


def test_bounds_over_several_entries_do_not_cross_them(tokens):
    ours = with_pattern(small_model(num_hidden_layers=1), DENSE)
    with pytest.raises(ConfigError, match="goes on from batch entry 0 to 1"):
        ours(tokens[:, :300], cu_seq_lens_q=torch.tensor([0, 200, 600]))
    with pytest.raises(ConfigError, match="seq_idx is given beside a KV cache"):
        cache = ours.eval()(tokens[:, :300], use_cache=True).past_key_values
        ours(tokens[:, 300:302], past_key_values=cache, seq_idx=torch.zeros(2, 2))


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
