# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What it costs to bring hidden states from Megatron's layout to the striped one and back, forward and
backward: four exchanges in a micro-batch. Appends rows to ``results/borders.jsonl``.

    torchrun --nproc-per-node 4 -m benchmarks.layer.borders [--tokens 32768] [--hidden 896 2048 4096]
"""

from __future__ import annotations

import os
import statistics

import torch
import torch.distributed as dist

from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.layout import inner_size
from megatron_mtraining.relayout import relayout, striped_owner, zigzag_owner

from ..lib import record

BLOCK = 128
SEQUENCES = {"one sequence": 1, "16 packed sequences": 16}
ROUNDS = 20


def milliseconds(run, device: str) -> float:
    """The median over rounds, of the slowest rank in each."""
    times = []
    for number in range(ROUNDS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        run()
        end.record()
        end.synchronize()
        slowest = torch.tensor(start.elapsed_time(end), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times += [slowest.item()] if number >= 3 else []
    return statistics.median(times)


def main():
    parser = record.parser(__doc__, "borders.jsonl")
    parser.add_argument("--tokens", type=int, default=32768, help="of a rank")
    parser.add_argument("--hidden", type=int, nargs="+", default=[896, 2048, 4096])
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = RankGroup(dist.group.WORLD)
    device, length, rows = "cuda", options.tokens * group.world, []
    for name, count in SEQUENCES.items():
        source = zigzag_owner([length // count] * count, group.world, device)
        target = striped_owner(length, group.world, BLOCK, inner_size(group.world), device)
        plan = relayout(source, target, (options.tokens, options.tokens), group)
        for hidden in options.hidden:
            states = torch.randn(options.tokens, 1, hidden, device=device, dtype=torch.bfloat16)
            states.requires_grad_()
            grad = torch.randn_like(states)

            def both_ways():
                out = plan.back(plan.there(states))
                torch.autograd.grad(out, states, grad)

            assert torch.equal(plan.back(plan.there(states)), states)
            row = dict(
                sequences=count, tokens=options.tokens, hidden=hidden, ranks=group.world,
                ms=round(milliseconds(both_ways, device), 3),
            )  # fmt: skip
            rows.append(row)
            if group.rank == 0:
                print(name, row, flush=True)
    if group.rank == 0:
        record.append(options.output, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
