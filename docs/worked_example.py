# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Print the worked example of docs/how-it-works.md: ``python docs/worked_example.py``."""

from __future__ import annotations

import torch

from megatron_mtraining.layout import block_at
from megatron_mtraining.pattern.vertical_slash_index import build_index
from megatron_mtraining.ring.schedule import rounds

B, NB, W, I = 64, 12, 4, 2
O = W // I
distances = torch.zeros(1, 1, NB, dtype=torch.bool)
distances[..., [0, 1, 4, 7]] = True
index = build_index(distances, torch.tensor([[[3, 70]]]), NB * B, B, W, I)

for rank in range(W):
    blocks = [block_at(a, rank, W, I) for a in range(NB // W)]
    print(f"rank {rank}, blocks {blocks}")
    for round_ in rounds(rank, I, O):
        start = round_.round_index * NB // O  # of the round in round_ptr
        keys_group = round_.sources[0] // I
        seen = []
        for i in blocks:
            n = i // O - round_.wrap  # last block of the keys' group that is not after block i
            low, high = index.round_ptr[0, 0, [start, start + n + 1]].tolist()
            quotients = index.round_list[0, 0, low:high].tolist()
            seen.append(f"{i}: {[(n - e) * O + keys_group for e in quotients]}")
        print(f"  round {round_.round_index}, keys of {round_.sources}  {'  '.join(seen)}")
