# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""An explicit mask beside hidden states: refused if it hides other keys than attention does by itself."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron.inputs import check_mask
from megatron_mtraining.megatron.packed_documents import packed_seq_params_of
from megatron_mtraining.visibility import VisibleRanges
from tests.support.megatron_cases import BATCH_SEQUENCE, make, operands


def causal(length: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Megatron's mask, True where a key is hidden."""
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    if starts is not None:
        mask = mask | (torch.arange(length) < starts[:, None, :, None])
    return mask


def test_an_explicit_mask_is_what_attention_does_by_itself():
    query, key, value = operands()
    length, batch = query.shape[:2]
    documents = VisibleRanges.from_lengths([[10, length - 10], [length]], length)
    params = packed_seq_params_of(documents)
    attention = make()
    expected = attention(query, key, value, None)
    for mask in (causal(length), causal(length).expand(batch, -1, -1, -1)):
        assert torch.equal(attention(query, key, value, mask), expected)
    apart = causal(length, documents.start)
    attention(query, key, value, apart, packed_seq_params=params)
    padding = causal(length).clone()
    padding[..., 100:] = True
    for mask, given in (
        (apart, None),  # though it was right with documents
        (causal(length), params),
        (padding, None),
        (~causal(length), None),
        (causal(length).float(), None),
        (torch.ones(batch, length) > 0, None),
        (causal(length)[..., :-1], None),
    ):
        with pytest.raises(ConfigError, match="attention of layer 3 is given an attention_mask"):
            attention(query, key, value, mask, packed_seq_params=given)


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_is_filled_anew_is_compared_anew(inference):
    query, key, value = (each.detach() for each in operands())
    attention = make()
    with torch.inference_mode(inference):
        mask = causal(len(query)).clone()
        attention(query, key, value, mask)
        attention(query, key, value, mask)
        mask[..., 100:] = True
        with pytest.raises(ConfigError, match="attention of layer 3 is given an attention_mask"):
            attention(query, key, value, mask)


def test_a_mask_over_ranks_is_refused():
    query = torch.zeros(BATCH_SEQUENCE // 2, 2, 1)
    mask = causal(BATCH_SEQUENCE)[:, :, : BATCH_SEQUENCE // 2]
    with pytest.raises(ConfigError, match="over 2 context-parallel ranks: leave it out"):
        check_mask(mask, query, None, 2, "attention")
