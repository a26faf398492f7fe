# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks.tools.convert``: rows of a model that it makes, converted both ways."""

from __future__ import annotations

from benchmarks.tools import convert as benchmark
from tests.support.convert_cases import convert


def test_rows_of_both_ways(tmp_path, monkeypatch):
    """Both ways of a model it makes; its conversions run in this process here."""
    monkeypatch.setattr(benchmark, "apart", lambda function, *words: function(*words))
    spoilt = False

    def converted(way, source, folder, *words):
        assert convert(way, source, folder, *words) == 0
        if spoilt and way == "megatron-to-hf":
            file = sorted(folder.glob("*.safetensors"))[0]
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        return 1.0, 5 * 10**9

    monkeypatch.setattr(benchmark, "converted", converted)
    words = ["time", "--shape", "tiny", "--layers", "3", "--shard-bytes", "100KB"]
    options = benchmark.parse([*words, "--folder", str(tmp_path)])
    row = benchmark.times(options)
    assert row["identical"] and row["shards"] > 2 and row["largest_shard"] < 110_000
    assert row["layers"] == 3 and not row["within_budget"]
    assert "bit-identical" in benchmark.line(row)
    spoilt = True
    assert not benchmark.times(options)["identical"]
    assert not list(tmp_path.iterdir())
