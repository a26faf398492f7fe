# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Names of benchmarks and tasks, and the files that they need; imports nothing that is not installed."""

from __future__ import annotations

RULER_TASKS = {
    **{
        name: name
        for name in (
            "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
            "niah_multikey_3", "niah_multivalue", "niah_multiquery",
        )
    },
    **{name: f"ruler_{name}" for name in ("vt", "cwe", "fwe", "qa_squad", "qa_hotpot")},
}  # fmt: skip
"""lm-eval's names of RULER's tasks."""
ESSAYS = "PaulGrahamEssays.json"
RULER_FILES = {
    **dict.fromkeys(
        ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"),
        ESSAYS,
    ),
    "qa_squad": "squad.json",
    "qa_hotpot": "hotpotqa.json",
}
"""The file in --data that a task needs; the others need none."""
LONGBENCH_TASKS = (
    "2wikimqa", "dureader", "gov_report", "hotpotqa", "lcc", "lsht", "multi_news", "multifieldqa_en",
    "multifieldqa_zh", "musique", "narrativeqa", "passage_count", "passage_retrieval_en",
    "passage_retrieval_zh", "qasper", "qmsum", "repobench-p", "samsum", "trec", "triviaqa", "vcsum",
)  # fmt: skip
INFINITEBENCH_TASKS = (
    "passkey", "kv_retrieval", "number_string", "code_run", "code_debug", "math_find",
    "longdialogue_qa_en", "longbook_qa_en", "longbook_sum_en", "longbook_choice_en", "longbook_qa_chn",
)  # fmt: skip
TASKS = {
    "ruler": tuple(RULER_TASKS),
    "longbench": LONGBENCH_TASKS,
    "infinitebench": INFINITEBENCH_TASKS,
}
"""By benchmark."""
