# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``register`` and its table: every function of Megatron that the plug-in replaces, and why.

From the table come the wrapping, the log line at the start of a run and ``docs/live-changes.md``
(``python docs/generate.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from ..config import ConfigError
from .checks import is_from
from .layer_pattern import HYBRID
from .missing_names import define_missing_names
from .wrapping import wrap

OLDEST = (0, 16)
"""The first Megatron-Core that has all of :func:`live_changes`."""


class LiveChange(NamedTuple):
    """A function that is replaced in the running Megatron."""

    owner: str
    """``package.module``, or ``package.module:Class``."""
    name: str
    wrapper: Callable[[Callable], Callable]
    """Takes the original and returns its replacement, which calls the original in runs with another
    attention backend."""
    why: str
    since: tuple[int, int] = OLDEST
    """The first Megatron-Core that has the function."""


def live_changes() -> tuple[LiveChange, ...]:
    """The table, in the order a run meets the functions. Importing the wrappers needs megatron-core."""
    from . import (
        arguments,
        checkpoint,
        decoder,
        density,
        gpt_model,
        hybrid_model,
        mtp,
        output_layer,
        packed_documents,
        recompute,
        recurrent,
        rotary_embedding,
    )
    from .balance import batching

    gpt = "megatron.core.models.gpt.gpt_model:GPTModel"
    prediction = "megatron.core.transformer.multi_token_prediction"
    hybrid = "megatron.core.models.hybrid"
    return (
        LiveChange(
            "megatron.training.arguments",
            "parse_args",
            arguments.wrap_parse_args,
            "Refuses `--yaml-cfg` together with `--mtraining-*` options: Megatron then replaces the whole "
            "command line by the file and would silently drop them.",
        ),
        LiveChange(
            "megatron.training.arguments",
            "add_megatron_arguments",
            arguments.wrap_add_megatron_arguments,
            "Adds the `--mtraining-*` options: Megatron's own hook for extra options belongs to the training "
            "script.",
        ),
        LiveChange(
            "megatron.training.arguments",
            "validate_args",
            arguments.wrap_validate_args,
            "Refuses unsupported settings before process groups exist, so that all ranks stop with one "
            "message and no rank waits; then fills in defaults.",
        ),
        LiveChange(
            "megatron.core.models.common.language_module.language_module:LanguageModule",
            "__init__",
            gpt_model.wrap_any_model,
            "Refuses models other than GPTModel and HybridModel: Megatron ignores a backend that it does not "
            "know, so they would silently run dense attention.",
        ),
        LiveChange(
            "megatron.core.models.common.vision_module.vision_module:VisionModule",
            "__init__",
            gpt_model.wrap_any_model,
            "As for `LanguageModule`: refuses vision encoders.",
        ),
        LiveChange(
            "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper:"
            "AbstractModelInferenceWrapper",
            "__init__",
            gpt_model.wrap_inference,
            "Refuses inference by name: Megatron raises `Unknown attention backend` at the first prompt, or, "
            "with dynamic batching, never calls core attention.",
        ),
        LiveChange(
            gpt,
            "__init__",
            gpt_model.wrap_gpt_model,
            "Puts `MTrainingAttention` into a copy of the layer spec, and gives the model "
            "`--rope-scaling-factor` and `--rotary-seq-len-interpolation-factor` where Megatron-LM drops "
            "them (with other backends a warning says so); then changes the rotary embedding and the output "
            "layer of the built model (see below). Megatron has no registry of core attentions; "
            "all versions build their GPT models here.",
        ),
        LiveChange(
            f"{hybrid}.hybrid_model:HybridModel",
            "__init__",
            hybrid_model.wrap_hybrid_model,
            "As for `GPTModel`, in the attention layers of `--hybrid-layer-pattern`; refuses patterns with "
            "layers that are not supported.",
            HYBRID,
        ),
        LiveChange(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding",
            "_set_cos_sin_cache",
            rotary_embedding.wrap_yarn_cache,
            "Builds YaRN's first table unsliced while such a model is built: the constructor slices it in "
            "zigzag order, which fails for context-parallel sizes that do not divide it (3, for example), "
            "and the result is not used.",
        ),
        LiveChange(
            "megatron.training.datasets.data_samplers",
            "build_pretraining_data_loader",
            batching.wrap_build_data_loader,
            "Gives the training data loader a batch sampler that places each global batch's samples "
            "(`--mtraining-batching`), and plans steps: Megatron has no option for a sampler. Other splits, "
            "and runs without batching and tuning, keep Megatron's.",
        ),
        LiveChange(
            gpt,
            "forward",
            packed_documents.wrap_forward,
            "Hands the documents of a batch to all layers as `packed_seq_params`, which every version "
            "passes on; as one sequence, which layers do not cut document by document.",
        ),
        LiveChange(
            f"{hybrid}.hybrid_model:HybridModel",
            "forward",
            hybrid_model.wrap_forward,
            "As for `GPTModel`; and output layer and loss, between which it has the logits of all tokens, in "
            "chunks.",
            HYBRID,
        ),
        LiveChange(
            gpt,
            "build_schedule_plan",
            gpt_model.wrap_build_schedule_plan,
            "As for `forward`, in place of which Megatron calls it with "
            "`--overlap-moe-expert-parallel-comm`.",
        ),
        LiveChange(
            "megatron.core.tensor_parallel.random",
            "checkpoint",
            recompute.wrap_checkpoint,
            "Saves the result of attention from the first pass of a recomputed layer for its second pass: "
            "only this function knows which two passes belong together. It changes nothing until a model "
            "with this backend is built.",
        ),
        LiveChange(
            "megatron.core.extensions.transformer_engine",
            "te_checkpoint",
            recompute.wrap_checkpoint,
            "As for `checkpoint`; Megatron uses it under FP8.",
        ),
        LiveChange(
            gpt,
            "_preprocess",
            decoder.wrap_preprocess,
            "Makes the rotary table of packed sequences for the layout that layers have, also in forwards of "
            "trainers' own.",
        ),
        LiveChange(
            "megatron.core.transformer.transformer_block:TransformerBlock",
            "forward",
            decoder.wrap_forward,
            "With context parallelism, brings hidden states from Megatron's layout of tokens to the striped "
            "one before the first layer, and back after the last; hands layers the documents of packed "
            "sequences. Whatever calls the layers passes here: trainers have forwards of their own.",
        ),
        LiveChange(
            f"{hybrid}.hybrid_block:HybridStack",
            "forward",
            decoder.wrap_forward,
            "As for `TransformerBlock`: the layers of a `HybridModel`.",
            HYBRID,
        ),
        LiveChange(
            "megatron.core.ssm.gated_delta_net:GatedDeltaNet",
            "forward",
            recurrent.wrap_forward,
            "Says to the next two in which order the layer gets tokens; refuses packed documents, across "
            "which it would run.",
        ),
        LiveChange(
            "megatron.core.ssm.mamba_mixer:MambaMixer",
            "forward",
            recurrent.wrap_forward,
            "As for `GatedDeltaNet`, in Mamba layers.",
        ),
        LiveChange(
            "megatron.core.ssm.mamba_context_parallel",
            "_undo_attention_load_balancing",
            recurrent.wrap_undo,
            "Brings the tokens of such a layer from the striped layout, and not from zigzag order, into "
            "the order of the sequence.",
        ),
        LiveChange(
            "megatron.core.ssm.mamba_context_parallel",
            "_redo_attention_load_balancing",
            recurrent.wrap_redo,
            "The way back, after the recurrence.",
        ),
        LiveChange(
            gpt,
            "_postprocess",
            output_layer.wrap_postprocess,
            "Computes output layer and loss in chunks of tokens (`--mtraining-loss-chunk`): every version "
            "computes both here, with the logits of all tokens between them.",
        ),
        LiveChange(
            "megatron.core.models.common.language_module.language_module:LanguageModule",
            "compute_language_model_loss",
            output_layer.wrap_language_model_loss,
            "Computes output layer and loss of multi-token prediction in chunks, too: Megatron shifts its "
            "labels after the output layer.",
        ),
        LiveChange(
            prediction,
            "_compute_mtp_acceptance_counts",
            output_layer.wrap_acceptance_counts,
            "Counts the tokens that multi-token prediction has right in chunks: it needs their logits.",
            (0, 19),
        ),
        LiveChange(
            prediction,
            "roll_tensor",
            mtp.wrap_roll_tensor,
            "Shifts the tokens of multi-token prediction within packed documents, however these are cut over "
            "ranks: Megatron sends the ends of each document on their own, and finds them in `cu_seqlens_q` "
            "only.",
        ),
        LiveChange(
            "megatron.training.training",
            "training_log",
            density.wrap_training_log,
            "Ends a step (a target recall moves the price) and logs density and recall: Megatron's log has "
            "no hook for figures of a layer.",
        ),
        LiveChange(
            "megatron.training.training",
            "train",
            density.wrap_train,
            "Says where a run ends before the end of its schedule (`--mtraining-schedule`): at "
            "`--exit-interval`, for example, Megatron ends the process here.",
        ),
        LiveChange(
            "megatron.training.training",
            "num_floating_point_operations",
            density.wrap_floating_point_operations,
            "Counts the query-key pairs that attention computed (`--log-throughput`), documents of a sample "
            "as one: Megatron counts all causal ones, which gives sparse runs more TFLOP/s than a GPU has.",
        ),
        LiveChange(
            "megatron.training.checkpointing",
            "generate_state_dict",
            checkpoint.wrap_generate_state_dict,
            "Saves the arguments with attention backend `auto`: they are pickled into each checkpoint, and "
            "a process without this package could not read the enum member `mtraining`.",
        ),
        LiveChange(
            "megatron.training.checkpointing",
            "check_checkpoint_args",
            checkpoint.wrap_check_checkpoint_args,
            "Restores the price, or the prices of the heads, of the checkpoint's run: only this function "
            "gets a checkpoint's arguments, and only when training continues.",
        ),
        LiveChange(
            "megatron.training.checkpointing",
            "load_args_from_checkpoint",
            arguments.wrap_load_args_from_checkpoint,
            "Refuses `--use-checkpoint-args` where it takes a checkpoint's kind of positions without their "
            "scaling: Megatron would train on other positions than the checkpoint's.",
        ),
        LiveChange(
            "megatron.training.checkpointing",
            "load_checkpoint",
            checkpoint.wrap_load_checkpoint,
            "Continues the step count of the checkpoint, which only this function returns.",
        ),
    )


class LiveState(NamedTuple):
    """Anything else that is added to live objects of Megatron, for the page."""

    what: str
    where: str
    why: str


LIVE_STATE = (
    LiveState(
        "`AttnBackend.mtraining`",
        "`backend.py`, on registration",
        "A member of the enum, so that `--attention-backend mtraining` parses. Always there.",
    ),
    LiveState(
        "`te_general_gemm` in `moe_utils`",
        "`missing_names.py`, on registration",
        "None, in Megatron-Core 0.16 without Transformer Engine: its routers of experts ask for this name, "
        "which only Transformer Engine defines there. Later versions define it so.",
    ),
    LiveState(
        "`args.mtraining_*`",
        "`arguments.py`, in `validate_args`",
        "The settings, defaults filled in, as plain values: arguments are pickled into checkpoints, which "
        "must load without this package. `mtraining_price_reached` in a checkpoint is the state of a "
        "target recall (`mtraining_further_prices_reached`: of those of layers with settings of their own), "
        "`mtraining_price_histories` what led to these prices, "
        "`mtraining_schedule_span` what a schedule is over, and `mtraining_balance_reached` that of the "
        "estimates of density. "
        "`mtraining_rope_scaling_factor` and `mtraining_rotary_seq_len_interpolation_factor`, set when a "
        "model is built, say that it has the value of the option of that name.",
    ),
    LiveState(
        "`args.create_attention_mask_in_dataloader`, `args.reset_position_ids`",
        "`arguments.py`, in `validate_args`",
        "Set to False (attention is causal by itself), and with `--reset-attention-mask` to True (documents "
        "begin where position ids restart). Both are logged.",
    ),
    LiveState(
        "`config.mtraining`",
        "set by a user of megatron-core on a `TransformerConfig`",
        "The settings of a model, or of a layer, that do not come from a command line.",
    ),
    LiveState(
        "`core_attention` of `SelfAttentionSubmodules`",
        "`layer_spec.py`, in `GPTModel.__init__`",
        "`MTrainingAttention`, in a copy of the spec: specs are shared between models.",
    ),
    LiveState(
        "class of `model.rotary_pos_emb`",
        "`rotary_embedding.py`, in `GPTModel.__init__`",
        "Becomes `StripedRotaryEmbedding` or `StripedYarnRotaryEmbedding`, on that instance alone, with its "
        "settings in `mtraining_*` attributes. Exchanging the class keeps copies and pickles intact.",
    ),
    LiveState(
        "class of `model.output_layer`",
        "`output_layer.py`, in `GPTModel.__init__`",
        "Becomes `ChunkedOutputLayer` (chunk in `mtraining_chunk`), on that instance alone, unless all "
        "logits are needed. Its `__name__` stays `ColumnParallelLinear`, which Megatron-FSDP looks for.",
    ),
    LiveState(
        "`mtraining_borders` of the model, its decoder and the layers of multi-token prediction",
        "`borders.py`, in `GPTModel.__init__`",
        "Over which ranks hidden states change their layout, and to which; None without context parallelism.",
    ),
    LiveState(
        "`mtraining_borders` of gated delta nets and Mamba layers",
        "`recurrent.py`, in the constructors of models",
        "In which order they get tokens; None without context parallelism.",
    ),
    LiveState(
        "hooks before and after the transformer layers of multi-token prediction",
        "`mtp.py`, in `GPTModel.__init__`",
        "Change the layout of hidden states, as around the decoder, and hand on documents.",
    ),
    LiveState(
        "`mtraining_checked` on an `attention_mask`",
        "`inputs.py`, in core attention",
        "That it hides what attention does not see by itself; compared once for all layers.",
    ),
    LiveState(
        "a context variable during a checkpointed call",
        "`recompute.py`, in `checkpoint`",
        "The queue of attention results that a first pass fills and its second pass empties. It belongs to "
        "the call, so that pipeline schedules can run second passes in any order.",
    ),
)


def register() -> None:
    """Add attention backend ``mtraining`` to the Megatron that is installed.

    Idempotent; before or after a training script's imports. Without Megatron-LM
    (``megatron.training``), the functions of megatron-core alone are replaced.

    Raises:
        ImportError: megatron-core is not importable.
        ConfigError: it is too old, or has moved something that would be replaced.
    """
    version = importlib.import_module("megatron.core").__version__
    check_version(version)
    try:
        from .backend import add_member

        changes = live_changes()
    except ImportError as error:
        if not (error.name or "").startswith("megatron.core"):
            raise
        raise _moved(f"what the plug-in imports ({error})", version) from None
    add_member()
    define_missing_names()
    if not _has_training():
        changes = [row for row in changes if not row.owner.startswith("megatron.training.")]
    changes = [row for row in changes if is_from(row.since)]
    # Find all of them first: nothing is replaced if one is missing.
    for change, owner in [(change, find_owner(change, version)) for change in changes]:
        wrap(owner, change.name, change.wrapper)


def check_version(version: str) -> None:
    """Raise :class:`ConfigError` if Megatron-Core ``version`` is older than :data:`OLDEST`."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"Megatron-Core is {version}, but megatron-mtraining needs {oldest} or later: use a "
            "newer megatron-core or Megatron-LM checkout"
        )


def _has_training() -> bool:
    """Whether Megatron-LM is importable, and not megatron-core alone or without what Megatron-LM needs:
    no script can use it then either."""
    modules = ("megatron.training.arguments", "megatron.training.training")
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        moved = isinstance(error, ModuleNotFoundError) and error.name in modules
        return moved  # which find_owner says then
    return True


def find_owner(change: LiveChange, version: str):
    """The module or class that holds what ``change`` replaces.

    Raises:
        ConfigError: this Megatron does not have it there; names it and the version.
    """
    path, _, class_name = change.owner.partition(":")
    symbol = f"{change.owner.replace(':', '.')}.{change.name}"
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise
        raise _moved(f"{symbol}, which megatron-mtraining replaces", version) from None
    if class_name:
        owner = getattr(owner, class_name, None)
    if owner is None or not callable(getattr(owner, change.name, None)):
        raise _moved(f"{symbol}, which megatron-mtraining replaces", version)
    return owner


def _moved(what: str, version: str) -> ConfigError:
    return ConfigError(
        f"Megatron-Core {version} does not have {what}: use a Megatron version that README.md lists as "
        "supported, or a newer megatron-mtraining"
    )
