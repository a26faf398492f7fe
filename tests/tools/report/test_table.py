# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables as plain text."""

from megatron_mtraining.tools.report.table import table


def test_table_aligns_columns():
    text = table(["", "dense", "sparse"], [["loss", "1.25", "1.5"], ["tokens/s", "1", "12,000"]])
    assert text.splitlines() == [
        "          dense  sparse",
        "--------  -----  ------",
        "loss       1.25     1.5",
        "tokens/s      1  12,000",
    ]
