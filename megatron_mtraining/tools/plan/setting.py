# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A training setting, checked and complete: what tensor sizes are computed from."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from ...config import ConfigError, MTrainingConfig
from ...config import option as mtraining_option
from ...errors import short
from ...megatron.arguments import fill_in, refuse
from ...megatron.checks import inner_group_size
from ...megatron.loss_options import DEFAULT_CHUNK, why_not
from ...megatron.options import config_from_args
from .options import DTYPE_BYTES, FLOATS, WHOLE_NUMBERS, changed, option

LARGEST_NUMBER = 10**12
LARGEST = {"num_layers": 10**6, "pipeline_model_parallel_size": 10**4}
"""Of whole numbers: what is larger is a mistake, and overflows or takes for ever."""
FRACTIONS = ("hidden_dropout", "attention_dropout", "rotary_percent")
"""Numbers from 0 to 1."""


@dataclass(frozen=True)
class Setting:
    """Names are Megatron's; sizes are of the whole model unless they say otherwise.

    Attributes:
        tp, pp, cp, dp: ranks of each kind of parallelism.
        tokens: of a microbatch on a context-parallel rank.
        microbatches: of a step, on a data-parallel rank.
        ffn: width of an MLP after its activation function.
        q_width, kv_width: heads, or query groups, times the head dimension.
        vocab: padded, of all tensor-parallel ranks.
        element: bytes of a parameter and of an activation.
        mtraining: settings of the backend, or None with another.
        inner: context-parallel ranks whose keys are gathered at once.
        kv_heads: of a rank. A query group that several ranks share is on each of them.
        loss_chunk: tokens whose logits are held at once; 0 with Megatron's own loss.
        recompute: None, or "uniform" or "block": how all of a layer is recomputed, ``recompute_layers`` at
            once or in all. Recomputing attention alone (selective) keeps what no recomputation keeps.
    """

    args: argparse.Namespace
    world: int
    tp: int
    pp: int
    cp: int
    dp: int
    tokens: int
    microbatches: int
    ffn: int
    head_dim: int
    groups: int
    vocab: int
    element: int
    mtraining: MTrainingConfig | None
    inner: int
    loss_chunk: int
    recompute: str | None
    recompute_layers: int

    @property
    def q_width(self) -> int:
        return self.args.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.groups * self.head_dim

    @property
    def kv_heads(self) -> int:
        return max(self.groups // self.tp, 1)

    @property
    def gated(self) -> int:
        """Widths of an MLP before its activation function, in ``ffn``."""
        return 2 if self.args.swiglu else 1

    @property
    def outer(self) -> int:
        """Rounds of the ring."""
        return self.cp // self.inner

    @property
    def columns(self) -> int:
        """Columns per head that the index has room for."""
        return min(self.mtraining.policy.most_columns, self.args.seq_length)

    @property
    def tied(self) -> bool:
        return not self.args.untie_embeddings_and_output_weights

    @property
    def layers(self) -> int:
        """Of a pipeline stage."""
        return self.args.num_layers // self.pp


def setting_of(args: argparse.Namespace, world_size: int | None = None) -> Setting:
    """The setting that flags make.

    Args:
        args: of :func:`.options.read`; not changed.
        world_size: GPUs; None for as many as the flags' parallelism needs.

    Raises:
        ConfigError: flags that are missing, contradict each other or are not modelled.
    """
    args = changed(args)
    _check_given(args)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    world = world_size or args.world_size or tp * pp * cp
    if world % (tp * pp * cp):
        raise ConfigError(
            f"the world size is {world}, which is not a multiple of {tp * pp * cp} = tensor ({tp}) x "
            f"pipeline ({pp}) x context ({cp}) parallel sizes"
        )
    dp = world // (tp * pp * cp)
    if dp * cp % args.num_distributed_optimizer_instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances is {args.num_distributed_optimizer_instances}, which "
            f"does not divide the {dp * cp} data- and context-parallel ranks"
        )
    _check_divides(args)
    mtraining, inner, chunk = _backend(args)
    head_dim = args.kv_channels or _divided(args, "hidden_size", args.num_attention_heads)
    recompute, recompute_layers = _recompute(args)
    return Setting(
        args=args, world=world, tp=tp, pp=pp, cp=cp, dp=dp,
        tokens=args.seq_length // cp * args.micro_batch_size,
        microbatches=_microbatches(args, dp),
        ffn=args.ffn_hidden_size or default_ffn(args), head_dim=head_dim, groups=_groups(args),
        vocab=padded_vocab(args), element=2 if args.bf16 or args.fp16 else 4, mtraining=mtraining,
        inner=inner, loss_chunk=chunk, recompute=recompute, recompute_layers=recompute_layers,
    )  # fmt: skip


def _check_given(args) -> None:
    needed = "num_layers hidden_size num_attention_heads seq_length micro_batch_size".split()
    if args.position_embedding_type == "learned_absolute" and args.add_position_embedding:
        needed.append("max_position_embeddings")
    for name in needed:
        if getattr(args, name) is None:
            raise ConfigError(f"{option(name)} is not given: the plan needs it")
    if args.vocab_size is None and args.padded_vocab_size is None:
        raise ConfigError(
            "--vocab-size is not given: mtraining plan reads no tokenizer, so give its vocabulary size"
        )
    for name in WHOLE_NUMBERS:
        value, most = getattr(args, name), LARGEST.get(name, LARGEST_NUMBER)
        if value is not None and not 1 <= value <= most:
            limit = "positive" if value < 1 else f"at most {most}"
            raise ConfigError(f"{option(name)} is {short(value)}: it must be {limit}")
    for name in FLOATS:
        value = getattr(args, name)
        if value is None:
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{option(name)} is {value}: it must be a finite number")
        if name in FRACTIONS and not 0 <= value <= 1:
            raise ConfigError(f"{option(name)} is {value:g}: it must be from 0 to 1")
    if args.padded_vocab_size and args.padded_vocab_size < (args.vocab_size or 0):
        raise ConfigError(
            f"--padded-vocab-size is {args.padded_vocab_size}, less than --vocab-size "
            f"({args.vocab_size}): use that or more"
        )
    if (args.max_position_embeddings or args.seq_length) < args.seq_length:
        raise ConfigError(
            f"--max-position-embeddings is {args.max_position_embeddings}, less than --seq-length "
            f"({args.seq_length}): Megatron refuses that"
        )
    if args.swiglu and args.squared_relu:
        raise ConfigError("--swiglu and --squared-relu are both given: leave one of them out")
    if args.fp16 and args.bf16:
        raise ConfigError("--fp16 and --bf16 are both given: leave one of them out")
    if args.optimizer != "adam":
        raise ConfigError(f"mtraining plan models only Adam; got --optimizer {args.optimizer}")
    if args.use_precision_aware_optimizer and not args.use_distributed_optimizer:
        raise ConfigError("--use-precision-aware-optimizer needs --use-distributed-optimizer")
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False  # as Megatron does
    if args.sequence_parallel and args.distribute_saved_activations:
        raise ConfigError(
            "--distribute-saved-activations and --sequence-parallel are both given, which Megatron refuses: "
            "leave the first of them out"
        )


def _divided(args, name: str, by: int, why: str = "--num-attention-heads") -> int:
    value = getattr(args, name)
    if value % by:
        raise ConfigError(f"{option(name)} is {value}, which is not a multiple of {why} ({by})")
    return value // by


def _check_divides(args) -> None:
    tp = args.tensor_model_parallel_size
    why = "--tensor-model-parallel-size"
    _divided(
        args, "num_layers", args.pipeline_model_parallel_size, "--pipeline-model-parallel-size"
    )
    _divided(args, "num_attention_heads", tp, why)
    if args.ffn_hidden_size:
        _divided(args, "ffn_hidden_size", tp, why)
    if args.group_query_attention:
        _divided(args, "num_attention_heads", args.num_query_groups, "--num-query-groups")
        _check_groups(args)
    cp = args.context_parallel_size
    if args.attention_backend != "mtraining" and cp > 1 and args.seq_length % (2 * cp):
        raise ConfigError(
            f"--seq-length is {args.seq_length}, which is not a multiple of {2 * cp} = 2 x "
            f"--context-parallel-size ({cp})"
        )
    if args.sequence_parallel and args.seq_length // cp % tp:
        raise ConfigError(
            f"--seq-length / --context-parallel-size is {args.seq_length // cp}, which is not a multiple of "
            f"{why} ({tp}), as --sequence-parallel needs"
        )


def _check_groups(args) -> None:
    """Raise :class:`ConfigError` unless tensor-parallel ranks can share query groups, as Megatron has it."""
    groups, tp = args.num_query_groups, args.tensor_model_parallel_size
    if groups % tp and tp % groups:
        raise ConfigError(
            f"--num-query-groups is {groups}, which is neither a multiple nor a divisor of "
            f"--tensor-model-parallel-size ({tp})"
        )
    heads = args.num_attention_heads
    width = (heads + 2 * groups) * (args.kv_channels or args.hidden_size // heads)
    if width % tp:
        raise ConfigError(
            f"--tensor-model-parallel-size is {tp}, which does not divide the {width} columns of queries, "
            f"keys and values of {heads} heads and {groups} query groups"
        )


def _groups(args) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def default_ffn(args) -> int:
    """Megatron's, where ``--ffn-hidden-size`` is left out."""
    if args.swiglu:
        return int((4 * args.hidden_size * 2 / 3) / 64) * 64
    return 4 * args.hidden_size


def padded_vocab(args) -> int:
    """``--vocab-size`` as Megatron pads it for tensor-parallel ranks. (Before 0.18 its NullTokenizer has
    one token more than ``--vocab-size``.)"""
    if args.padded_vocab_size:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil(args.vocab_size / multiple) * multiple


def _microbatches(args, dp: int) -> int:
    size = args.micro_batch_size * dp
    batch = args.global_batch_size or size
    if batch % size:
        raise ConfigError(
            f"--global-batch-size is {batch}, which is not a multiple of {size} = --micro-batch-size "
            f"({args.micro_batch_size}) x data-parallel size ({dp})"
        )
    return batch // size


def _backend(args) -> tuple[MTrainingConfig | None, int, int]:
    """Settings of the backend, size of the inner group, chunk of the loss."""
    refuse(args)
    fill_in(args)
    if args.attention_backend != "mtraining":
        if args.create_attention_mask_in_dataloader:
            raise ConfigError(
                "mtraining plan does not model the [sequence, sequence] mask of the data loader: add "
                "--no-create-attention-mask-in-dataloader"
            )
        if args.attention_backend in ("unfused", "local"):
            raise ConfigError(
                "mtraining plan does not model attention that materializes all scores; got "
                f"--attention-backend {args.attention_backend}: use mtraining, fused, flash or auto"
            )
        _check_own_loss(args)
        return None, 1, 0
    config = config_from_args(args)
    if config.policy.has_block_lists:
        raise ConfigError(
            f"{mtraining_option('policy')} is {config.policy.name}: the size of its block lists depends on "
            "the data, which mtraining plan does not see; use price or fixed"
        )
    inner = inner_group_size(args, args.context_parallel_size, config.gathered_ranks, True)
    chunk = config.loss_chunk
    if chunk is None:  # a chunk that is given has been refused with what needs all logits
        chunk = 0 if why_not(args, command_line=True) else DEFAULT_CHUNK
    if not chunk:
        _check_own_loss(args)
    return config, inner, chunk


def _check_own_loss(args) -> None:
    if args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl != "native":
        raise ConfigError(
            "mtraining plan models only --cross-entropy-fusion-impl native; got "
            f"{args.cross_entropy_fusion_impl}"
        )


def _recompute(args) -> tuple[str | None, int]:
    granularity = args.recompute_granularity
    if args.recompute_activations:
        granularity = "selective"
    if granularity == "full":
        if args.recompute_method is None:
            raise ConfigError("--recompute-granularity full needs --recompute-method")
        if args.recompute_num_layers is None:
            raise ConfigError("--recompute-granularity full needs --recompute-num-layers")
        layers = args.num_layers // args.pipeline_model_parallel_size
        return args.recompute_method, min(args.recompute_num_layers, layers)
    if granularity == "selective" and args.recompute_method is not None:
        raise ConfigError(
            f"--recompute-method is {args.recompute_method}, which Megatron refuses with selective "
            "recomputation: leave it out, or use --recompute-granularity full"
        )
    modules = args.recompute_modules or ["core_attn"]
    if granularity == "selective" and modules != ["core_attn"]:
        raise ConfigError(
            "mtraining plan models recomputation of core_attn or of whole layers; got --recompute-modules "
            f"{' '.join(modules)}"
        )
    if args.distribute_saved_activations:
        raise ConfigError("--distribute-saved-activations needs --recompute-granularity full")
    return None, 0


def gradient_bytes(args) -> int:
    """Bytes of a parameter's gradient in the buffer of data parallelism."""
    if not (args.bf16 or args.fp16) or args.accumulate_allreduce_grads_in_fp32:
        return 4
    if args.fp16:
        return 2
    lower = args.main_grads_dtype == "bf16" and args.use_precision_aware_optimizer
    return 2 if args.grad_reduce_in_bf16 or lower else 4


def optimizer_bytes(args) -> int:
    """Bytes of a parameter's optimizer state, before it is sharded over ranks."""
    if not (args.bf16 or args.fp16):
        return 8
    if not args.use_precision_aware_optimizer:
        return 12
    # The optimizer stores only those bits of the float32 parameter that the bf16 one lacks.
    main = 2 if args.bf16 else DTYPE_BYTES[args.main_params_dtype]
    return main + DTYPE_BYTES[args.exp_avg_dtype] + DTYPE_BYTES[args.exp_avg_sq_dtype]
