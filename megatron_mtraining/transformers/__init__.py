# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparse attention in Hugging Face transformers: ``attn_implementation="mtraining"``.

For models that go through transformers' attention interface (Llama, Mistral, Qwen2, Qwen3 and others), in one
process without context parallelism, on a GPU or a CPU:

    from megatron_mtraining import MTrainingConfig
    from megatron_mtraining.transformers import configure, watch

    model = AutoModelForCausalLM.from_pretrained("Qwen2.5-0.5B")
    configure(model, MTrainingConfig.from_options(target_recall=0.95))
    trainer = Trainer(model, ...)
    watch(trainer)
    trainer.train()

- :mod:`.interface`: the attention and the mask function that transformers calls.
- :mod:`.masking`: padding, which is left out, and packed ``position_ids`` as packed documents.
- :mod:`.state`: settings, prices and means of a model.
- :mod:`.callback`: after each step of ``Trainer``, moves prices and logs density and recall.
"""

from .interface import NAME, configure, register
from .state import (
    BackwardMeans,
    PatternMeans,
    advance,
    state_of,
    take_backward_means,
    take_means,
)

__all__ = [
    "NAME",
    "BackwardMeans",
    "PatternMeans",
    "advance",
    "configure",
    "register",
    "state_of",
    "take_backward_means",
    "take_means",
    "watch",
]


def __getattr__(name: str):
    # .callback imports transformers' Trainer, which takes seconds and needs accelerate.
    if name == "watch":
        from .callback import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
