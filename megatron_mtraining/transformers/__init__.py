# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparse attention in Hugging Face transformers: ``attn_implementation="mtraining"``.

For models that go through transformers' attention interface (Llama, Mistral, Qwen3, Gemma 3, gpt-oss and
others), on a GPU or a CPU, with whole sequences or parts of them in each process:

    from megatron_mtraining import MTrainingConfig
    from megatron_mtraining.transformers import configure

    model = AutoModelForCausalLM.from_pretrained("Qwen2.5-0.5B", attn_implementation="mtraining")
    configure(model, MTrainingConfig.from_options(target_recall=0.95))  # without it, default settings
    Trainer(model, ...).train()

- :mod:`.switch`: makes the name known to transformers, which importing this package does; gives models their
  settings.
- :mod:`.interface`: the attention and the mask function that transformers calls.
- :mod:`.dense`: dense attention to a KV cache, and of a prompt's tail.
- :mod:`.checkpointing`: checkpointed layers, whose attention runs once.
- :mod:`.masking`: padding, which is left out, and packed sequences as packed documents.
- :mod:`.sequence`: sequence parallel training, where each rank has a part of the tokens.
- :mod:`.trainers`: that in ``Trainer``, under accelerate's ``ParallelismConfig``.
- :mod:`.state`: settings, prices and means of a model.
- :mod:`.callback`: in ``Trainer``, moves prices, keeps them in checkpoints, and logs density and recall.
"""

from importlib.util import find_spec

from .interface import NAME
from .sequence import cut_batch
from .state import (
    BackwardMeans,
    PatternMeans,
    advance,
    state_of,
    take_backward_means,
    take_means,
)
from .switch import configure, register

__all__ = [
    "NAME",
    "BackwardMeans",
    "PatternMeans",
    "advance",
    "configure",
    "cut_batch",
    "register",
    "state_of",
    "take_backward_means",
    "take_means",
]

# Without transformers there is nothing to register with; configure says what to install.
if find_spec("transformers") is not None:
    register()
