# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's own flags as a plan reads them.

Defaults and choices come from the importable Megatron-LM (put a checkout on PYTHONPATH), else from the
tables here, which are 0.19's. A flag is read, refused because it changes memory in a way that is not
modelled, or ignored and listed, as it is assumed not to change memory.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
from functools import cache
from unittest import mock

from ...config import ConfigError
from ...config.options import check_known
from ...errors import short
from ...megatron.backend import add_member
from ...megatron.balance.options import REFUSED
from ...megatron.checks import REFUSALS, check_settings, unset
from ...megatron.loss_options import NEED_LOGITS
from ...megatron.options import add_arguments
from ...megatron.rotary_options import OF_BOTH, SCALING

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}

WHOLE_NUMBERS = dict(
    num_layers=None, hidden_size=None, ffn_hidden_size=None, num_attention_heads=None,
    kv_channels=None, num_query_groups=1, max_position_embeddings=None, seq_length=None,
    vocab_size=None, padded_vocab_size=None, make_vocab_size_divisible_by=128,
    micro_batch_size=None, global_batch_size=None, recompute_num_layers=None,
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
    num_distributed_optimizer_instances=1, yarn_original_max_position_embeddings=None,
    rotary_seq_len_interpolation_factor=None,
)  # fmt: skip
SWITCHES = (
    "group_query_attention", "add_qkv_bias", "qk_layernorm", "swiglu", "squared_relu",
    "untie_embeddings_and_output_weights", "sequence_parallel", "use_distributed_optimizer", "bf16",
    "fp16", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "cross_entropy_loss_fusion",
    "use_precision_aware_optimizer", "distribute_saved_activations", "recompute_activations",
    "reset_attention_mask", "reset_position_ids", "dataloader_inter_document_masking",
    "overlap_moe_expert_parallel_comm", "use_rope_scaling",
)  # fmt: skip
"""Some change no memory, and are read as a run with attention backend mtraining checks them; so are
:data:`FLOATS`."""
FLOATS = dict(
    hidden_dropout=0.1, attention_dropout=0.1, rotary_scaling_factor=1.0, rotary_percent=1.0,
    yarn_beta_fast=None, yarn_beta_slow=None, mscale=1.0, mscale_all_dim=0.0,
)  # fmt: skip
TURNED_OFF = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--no-rope-fusion": "apply_rope_fusion",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "--no-position-embedding": "add_position_embedding",
    "--no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader",
}
TEXTS = dict(
    normalization=("LayerNorm", ("LayerNorm", "RMSNorm")),
    position_embedding_type=(
        "learned_absolute",
        ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    ),
    transformer_impl=(
        "transformer_engine",
        ("local", "transformer_engine", "inference_optimized"),
    ),
    attention_backend=("auto", ("flash", "fused", "unfused", "local", "auto", "mtraining")),
    recompute_granularity=(None, ("full", "selective")),
    recompute_method=(None, ("uniform", "block")),
    cross_entropy_fusion_impl=("native", ("native", "te")),
    optimizer=("adam", None),
    main_grads_dtype=("fp32", ("fp32", "bf16")),
    main_params_dtype=("fp32", ("fp32", "fp16")),
    exp_avg_dtype=("fp32", ("fp32", "fp16", "bf16", "fp8")),
    exp_avg_sq_dtype=("fp32", ("fp32", "fp16", "bf16", "fp8")),
)

NOT_MODELLED = (
    "--num-experts", "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--fp8-format",
    "--fp4-format", "--fp8-param-gather", "--fp4-param-gather", "--use-megatron-fsdp",
    "--use-torch-fsdp2", "--optimizer-cpu-offload", "--cpu-offloading-num-layers",
    "--fine-grained-activation-offloading", "--offload-modules", "--activation-offload-fraction",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split", "--tp-comm-overlap", "--delay-wgrad-compute",
    "--defer-embedding-wgrad-compute", "--fp32-residual-connection", "--attention-output-gate",
    "--quick-geglu", "--glu-linear-offset", "--use-te-activation-func", "--checkpoint-activations",
    "--tensor-parallel-num-weight-shards", "--overlap-param-gather-with-optimizer-step",
    "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json", "--spec",
    "--yaml-cfg", "--use-nccl-ub", "--apply-residual-connection-post-layernorm",
    "--output-logit-dtype", "--label-smoothing", "--fp16-lm-cross-entropy",
    "--encoder-num-layers", "--decoder-num-layers", "--encoder-seq-length",
    "--use-rotary-position-embeddings", "--config-logger-dir", "--fp8-output-proj", "--logits-load-dir",
    "--export-kd-teacher-load", "--linear-attention-freq",
)  # fmt: skip
"""Flags that change memory in a way that is not modelled."""
UNLESS_OFF = (
    "cuda_graph_impl", "experimental_attention_variant", "hybrid_layer_pattern", "is_hybrid_model",
    "mtp_num_layers",
)  # fmt: skip
"""The same, with a value that is neither 0 nor none."""
CHECKED = (
    *(refusal.name for refusal in (*REFUSALS, *NEED_LOGITS)), *REFUSED, *OF_BOTH, *SCALING, *UNLESS_OFF,
    "cuda_graph_modules", "cuda_graph_scope",
    "dataloader_type", "mock_data", "object_storage_cache_path", "calculate_per_token_loss",
)  # fmt: skip
"""What a run with attention backend mtraining checks beside the flags in the tables above. No Megatron-LM has
all of them."""


MOST_PROCESSES = 10**4
"""Of torchrun on a node."""


def option(name: str) -> str:
    """Megatron's flag for an attribute of its arguments."""
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(message)


@cache
def flags_of_megatron() -> dict[str, argparse.Action]:
    """Each flag of the Megatron-LM that is importable; none without one."""
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError:  # megatron-core alone
        return {}
    add_member()
    # A default is read from it, which need not be a number here.
    with mock.patch.dict(os.environ):
        os.environ.pop("WORLD_SIZE", None)
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {flag: action for action in parser._actions for flag in action.option_strings}


def parser_of_megatron(installed: bool = True) -> argparse.ArgumentParser:
    """A parser of the flags that a plan reads, ``--mtraining-*`` among them.

    Args:
        installed: whether defaults and choices are those of the Megatron-LM that is importable, if one is.

    It raises :class:`ConfigError` instead of ending the process.
    """
    parser = _Parser(prog="mtraining plan memory", add_help=False, allow_abbrev=False)
    for name, default in WHOLE_NUMBERS.items():
        parser.add_argument(option(name), type=int, default=default)
    for name in SWITCHES:
        parser.add_argument(option(name), action="store_true")
    for flag, name in TURNED_OFF.items():
        parser.add_argument(flag, dest=name, action="store_false")
    for name, (default, choices) in TEXTS.items():
        parser.add_argument(option(name), default=default, choices=choices)
    for name, default in FLOATS.items():
        parser.add_argument(option(name), type=float, default=default)
    # None if neither is given, as the first one's default counts.
    name = "yarn-correction-range-round-to-int"
    parser.add_argument(f"--{name}", action="store_true", default=None)
    parser.add_argument(f"--no-{name}", action="store_false", dest=name.replace("-", "_"))
    parser.add_argument("--recompute-modules", nargs="*", default=None)
    parser.add_argument("--hierarchical-context-parallel-sizes", nargs="+", type=int, default=None)
    parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    of_megatron = flags_of_megatron() if installed else {}
    for action in parser._actions:
        theirs = of_megatron.get(action.option_strings[0])
        if theirs is not None:
            action.default = getattr(theirs.default, "name", theirs.default)
            if theirs.choices:
                action.choices = [getattr(choice, "name", choice) for choice in theirs.choices]
    return add_arguments(parser)


def read(words: list[str], installed: bool = True) -> tuple[argparse.Namespace, list[str]]:
    """Megatron's arguments, and the flags that are ignored.

    Args:
        words: of a command line, with or without what stands before the script's own flags (``torchrun
            ... pretrain_gpt.py``). ``--nproc-per-node`` and ``--nnodes`` before it make ``world_size``, the
            first of them ``host_gpus``.
        installed: of :func:`parser_of_megatron`.

    Raises:
        ConfigError: a flag that is refused, or that has a wrong value.
    """
    script = [i for i, word in enumerate(words) if word.endswith(".py")]
    before, words = (words[: script[0]], words[script[0] + 1 :]) if script else ([], words)
    for word in words:
        if "$" in word:
            raise ConfigError(f"{word} is a variable of a shell: give its value")
    args, rest = parser_of_megatron(installed).parse_known_args(words)
    given = _given(rest)
    for name in CHECKED:
        if option(name) in given:
            setattr(args, name, _value(given[option(name)]))
    refusals = {refusal.given(command_line=True): refusal for refusal in REFUSALS}
    ours = args.attention_backend == "mtraining"
    checked = {name: getattr(args, name) for name in CHECKED if option(name) in given}
    for flag in given:
        if flag.startswith("--mtraining-"):  # a parser knows those that there are
            check_known(flag.removeprefix("--mtraining-").replace("-", "_"))
        refusal, value = refusals.get(flag), checked.get(flag[2:].replace("-", "_"))
        if refusal and ours:
            # As a run does it, and before the plan asks for what the flag may stand for.
            check_settings(argparse.Namespace(**checked), True)
        changes = flag in NOT_MODELLED
        if flag in map(option, UNLESS_OFF):
            if unset(value) or value == "none":
                continue
            changes = True
        elif refusal:
            if ours or refusal.works(value):
                continue
            changes = True
        if changes:
            raise ConfigError(
                f"mtraining plan does not model {flag}, which changes memory: leave it out"
            )
        if flag.startswith(("--moe-", "--mamba-", "--mtp-")):
            raise ConfigError(f"mtraining plan models only dense GPT models; got {flag}")
    stray = _values_of_nothing(rest)
    if stray:
        raise ConfigError(f"{stray} is the value of no flag")
    args.world_size, args.host_gpus = _processes(before)
    # With the backend they choose Megatron's own loss.
    loss = {refusal.given(command_line=True) for refusal in NEED_LOGITS} if ours else ()
    return args, [flag for flag in given if flag not in loss]


def _given(rest: list[str]) -> dict[str, list[str]]:
    """The words behind each flag."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in rest:
        if word.startswith("--"):
            flag, assigned, value = word.partition("=")
            values = found[flag] = [value] if assigned else []
        else:
            values.append(word)
    return found


def _value(words: list[str]) -> bool | int | float | str | list:
    """What Megatron's parser makes of the words behind a flag."""
    values = [_number(word) for word in words]
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _number(word: str) -> int | float | str | tuple[int, ...]:
    def pair(word: str) -> tuple[int, ...]:  # --window-size
        left, right = word.strip("()").split(",")
        return int(left), int(right)

    for kind in (int, float, pair):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def _values_of_nothing(rest: list[str]) -> str | None:
    """A word before all flags: behind a flag it may be the value of one that is ignored."""
    return rest[0] if rest and not rest[0].startswith("-") else None


def _processes(before: list[str]) -> tuple[int | None, int | None]:
    """torchrun's number of processes, and of those on a host; None of what it does not say."""
    launcher = _Parser(add_help=False, allow_abbrev=False)
    launcher.add_argument("--nproc-per-node", "--nproc_per_node", type=int)
    launcher.add_argument("--nnodes", default="1")
    known, _ = launcher.parse_known_args(before)
    if known.nproc_per_node is None:
        return None, None
    if not 1 <= known.nproc_per_node <= MOST_PROCESSES:
        raise ConfigError(
            f"--nproc-per-node is {short(known.nproc_per_node)}: use 1 to {MOST_PROCESSES}"
        )
    if not re.fullmatch("[1-9][0-9]{0,8}", known.nnodes):
        raise ConfigError(f"--nnodes is {known.nnodes}: give one number of nodes")
    return known.nproc_per_node * int(known.nnodes), known.nproc_per_node


def changed(args: argparse.Namespace, **values) -> argparse.Namespace:
    """A copy with other values."""
    args = copy.deepcopy(args)
    for name, value in values.items():
        setattr(args, name, value)
    return args
