# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Coefficients of the latency model: milliseconds per quantity of a term (:mod:`.latency`).

Those of an NVIDIA H200 were fitted at commit 39f09a0 to 106 shapes of 4K to 512K tokens, with torch 2.11.0
and Triton 3.6.0; predictions of 44 other shapes were 3.8% off in the median and 18% at worst. Other GPUs'
relative times are nearer to them than their absolute ones.
"""

from __future__ import annotations

from collections.abc import Mapping

Coefficients = Mapping[str, Mapping[str, float]]
"""By part of a layer's attention and term."""

# fmt: off
H200: dict[tuple[str, int], Coefficients] = {
    ("vertical_slash", 64): {
        "search": {"launch": 0.26489, "rows": 0.18826, "candidates": 1.3912},
        "forward": {"heads": 0.0014048, "rows": 0.17311, "packed_rows": 0.20621, "pairs": 0.50767,
            "far_pairs": 0.11114, "query_path": 0.032194},
        "backward": {"launch": 0.024445, "heads": 0.0029901, "rows": 0.41934, "packed_rows": 0.091413,
            "key_rows": 1.3515, "pairs": 0.66887, "far_pairs": 0.34832, "key_span": 0.83161},
    },
    ("vertical_slash", 128): {
        "search": {"launch": 0.13469, "heads": 0.0049844, "rows": 0.29411, "packed_rows": 0.074454,
            "candidates": 0.13139},
        "forward": {"launch": 0.00092502, "heads": 0.0020621, "rows": 0.1543, "packed_rows": 0.26498,
            "pairs": 0.71931, "far_pairs": 0.27447, "query_path": 0.038664},
        "backward": {"launch": 0.010713, "heads": 0.0087766, "rows": 0.73342, "key_rows": 2.6507,
            "pairs": 1.0958, "far_pairs": 0.98083, "key_span": 1.327},
    },
    ("block_lists", 64): {
        "search": {"launch": 6.239, "square": 0.01548},
        "forward": {"launch": 0.017589, "rows": 0.065479, "packed_rows": 0.14416, "pairs": 0.53092},
        "backward": {"launch": 0.019375, "rows": 1.3645, "pairs": 0.769, "key_span": 0.75404},
    },
    ("block_lists", 128): {
        "search": {"launch": 5.7359, "rows": 1.0457, "square": 0.017374},
        "forward": {"launch": 0.01907, "rows": 0.046483, "packed_rows": 0.16864, "pairs": 0.74055},
        "backward": {"launch": 0.050223, "rows": 2.4042, "pairs": 1.4774, "key_span": 1.0596},
    },
    ("dense", 64): {
        "search": {"launch": 0.0063723, "rows": 0.0012419},
        "forward": {"heads": 0.0014048, "rows": 0.11016, "packed_rows": 0.20621, "pairs": 0.50767,
            "far_pairs": 0.11114, "query_path": 0.012896},
        "backward": {"launch": 0.024445, "heads": 0.0023854, "rows": 0.41934, "packed_rows": 0.091413,
            "key_rows": 0.19346, "pairs": 0.66887, "far_pairs": 0.34832, "key_span": 0.83161},
    },
    ("dense", 128): {
        "search": {"launch": 0.0061962, "rows": 0.001322},
        "forward": {"launch": 0.00092502, "heads": 0.0020621, "rows": 0.087875, "packed_rows": 0.26498,
            "pairs": 0.71931, "far_pairs": 0.27447, "query_path": 0.011087},
        "backward": {"launch": 0.010713, "heads": 0.0033165, "rows": 0.73342, "key_rows": 0.25369,
            "pairs": 1.0958, "far_pairs": 0.98083, "key_span": 1.327},
    },
}
# fmt: on
"""By kind of pattern and head dimension."""
CPU: dict[tuple[str, int], Coefficients] = {
    at: {"search": {"launch": 0.1}, "forward": {"pairs": 1e5}, "backward": {"pairs": 3e5}}
    for at in H200
}
"""Of a machine without a GPU, for tests: pairs are nearly all that counts."""
