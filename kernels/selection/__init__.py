# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What choosing a pattern takes: statistics of sampled rows, masses, selections, lists."""

from __future__ import annotations

from torch import Tensor

from ..common.dispatch import uses_triton
from ..limits import MAX_BLOCKS
from . import reference as reference_choice
from . import reference_blocks, reference_masses


def lse_parts(sample, key: Tensor) -> Tensor:
    """Log-sum-exp of each sampled row's scores over this rank's keys, in parts.

    Args:
        sample: a :class:`~megatron_mtraining.pattern.estimate.Sample`.

    Returns:
        float32 ``[parts, b, h, R]``, natural logarithms, for :func:`merge_lse`; -inf where a part has
        no key that the row sees.
    """
    if not uses_triton(key):
        return reference_choice.lse_parts(sample, key)
    from .lse import lse_parts as launch

    return launch(sample, key)


def merge_lse(parts: Tensor) -> Tensor:
    """Log-sum-exp over the first dimension: float32 ``[parts, ...]`` to ``[...]``."""
    if not uses_triton(parts):
        return reference_choice.merge_lse(parts)
    from .lse import merge_lse as launch

    return launch(parts)


def diagonal_mass(
    sample, key: Tensor, lse: Tensor, sink: int, columns: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Attention mass by token distance, over this rank's keys, beyond the rows' window and outside
    columns.

    Args:
        lse, sink: as for :func:`row_masses`; sinks are columns always. Held-out rows do not count.
        columns: the columns' masses of :func:`row_masses`, and the cut (of all ranks) that columns were
            taken at, as :func:`select_largest` gives it; None if there are none beside sinks.

    Returns:
        int32 ``[b, h, N]`` by ``row - key``, in fixed point: a probability of 1 is the largest number,
        up to 8 bits, that as many rows as there are can add up to. Ranks' results add up exactly.
    """
    if not uses_triton(key):
        return reference_choice.diagonal_mass(sample, key, lse, sink, columns)
    from .diagonal_mass import diagonal_mass as launch

    return launch(sample, key, lse, sink, columns)


def row_masses(
    sample, key: Tensor, lse: Tensor, sink: int, per_cost: bool
) -> tuple[Tensor, Tensor]:
    """Attention mass of sampled rows by column and by block distance, over this rank's keys.

    Args:
        sample: ``sample.num_selection_rows`` of the rows of each stratum count, the others are held out.
            ``sample.drop_max_stratum``: the largest share of a single stratum in a column is left out.
        lse: the rows' log-sum-exp over all ranks, float32 ``[b, h, R]``.
        sink: so many first columns of the sequence come before all others.
        per_cost: divide a column's mass by the number of query blocks that see it beyond their window.

    Returns:
        int32 ``[b, h, s]``: the bits, in float32, of each column's mass beyond the rows' window, which order
        like it; 2^31 - 1 for sinks. int32 ``[2, b, h, NB]``, in fixed point: mass by block distance. First
        that of the rows that count, each token distance's shared out between the two block distances
        that it crosses; then that of held-out rows (of all if none are), just where they see it. Ranks'
        results add up exactly.
    """
    if not uses_triton(key):
        return reference_masses.row_masses(sample, key, lse, sink, per_cost)
    from .masses import row_masses as launch

    return launch(sample, key, lse, sink, per_cost)


def candidate_slashes(
    sample,
    keys: Tensor,
    positions: Tensor,
    values: Tensor,
    least: float,
    lse: Tensor,
    num_blocks: int,
) -> Tensor:
    """Mass by block distance that lies in some columns: what the first of :func:`row_masses` has of those
    that are worth enough.

    Args:
        keys: ``[b, h, K, d]``, contiguous, in the key's dtype.
        positions: int32 ``[b, h, K]``, where in the sequence they are; N for none.
        values: int32 ``[b, h, K]``, their masses as :func:`row_masses` gives them, of which ``least``, above
            0, or more is enough.

    Returns:
        int32 ``[b, h, NB]``, in the same fixed point, rounded for each column.
    """
    operands = (sample, keys, positions, values, least, lse, num_blocks)
    if not uses_triton(keys):
        return reference_masses.candidate_slashes(*operands)
    from .threshold import candidate_slashes as launch

    return launch(*operands)


def price_slashes(
    total: Tensor,
    inside: Tensor,
    price: Tensor,
    usual_price: float,
    near: int,
    unit: float,
    one: int,
    spread: bool,
    costs=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slashes at a price: block distances whose mass, over their cost, is at or above it.

    Args:
        total, inside: int32 ``[b, h, NB]``: mass by block distance, and what of it columns have.
        price: float32 ``[h]``.
        usual_price: another one, the same in all runs, by which columns are judged.
        near: so many first distances are kept whatever they cost.
        unit: cost of a pair of blocks, in units of a row's whole attention.
        one: the integer that stands for such a unit.
        spread: whether the rows are spread over the sequence. The last rows see all distances: their mass at
            one that few rows see is to count as few.
        costs: a :class:`~megatron_mtraining.documents.Costs`, of packed documents.

    Returns:
        ``[b, h, NB]`` each: uint8, whether a distance is kept, and whether it would be at the usual price;
        int32, how many up to it would not; float32, mass over cost.
    """
    operands = (total, inside, price, usual_price, near, unit, one, spread, costs)
    if not uses_triton(total):
        return reference_masses.price_slashes(*operands)
    from .threshold import price_slashes as launch

    return launch(*operands)


def price_columns(
    sample,
    keys: Tensor,
    positions: Tensor,
    lse: Tensor,
    member: Tensor,
    usual: Tensor,
    outside: Tensor,
    price: Tensor,
    sink: int,
    unit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns at a price: candidates whose mass outside of usual slashes, over their cost there, is at or
    above it.

    Args:
        keys, positions: as for :func:`candidate_slashes`.
        member, usual, outside: as :func:`price_slashes` gives them.
        price: float32 ``[h]``.
        sink: so many first columns of the sequence are kept whatever they cost.
        unit: cost of a column in a query block, in units of a row's whole attention.

    Returns:
        int32 ``[b, h, K]``: the positions, N for what is not kept; float32 ``[b, h, K]``: mass over cost;
        float32 ``[b, h, K]``: mass outside of the slashes that are kept, from held-out rows, or from all if
        none are held out.
    """
    operands = (sample, keys, positions, lse, member, usual, outside, price, sink, unit)
    if not uses_triton(keys):
        return reference_masses.price_columns(*operands)
    from .threshold import price_columns as launch

    return launch(*operands)


def held_columns(sample, keys: Tensor, positions: Tensor, lse: Tensor, member: Tensor) -> Tensor:
    """The last of :func:`price_columns`, of columns that are chosen already."""
    operands = (sample, keys, positions, lse, member)
    if not uses_triton(keys):
        return reference_masses.held_columns(*operands)
    from .threshold import held_columns as launch

    return launch(*operands)


def recall_of(
    masses: Tensor,
    member: Tensor,
    columns: Tensor,
    held: Tensor,
    seq_length: int,
    one: int,
    rows: int,
) -> Tensor:
    """The share of attention that slashes and columns keep: float32 ``[b, h]``.

    Args:
        masses: int32 ``[b, h, NB]``, by block distance, the second of :func:`row_masses`, of all ranks.
        member: uint8 ``[b, h, NB]``, the slashes that are kept.
        columns, held: int32 and float32 ``[b, h, K]``, as :func:`price_columns` gives them.
        one, rows: the integer that stands for a row's attention, and the number of rows.
    """
    operands = (masses, member, columns, held, seq_length, one, rows)
    if not uses_triton(masses):
        return reference_masses.recall_of(*operands)
    from .threshold import recall_of as launch

    return launch(*operands)


def select_largest(
    values: Tensor,
    count: int,
    none: int,
    rank: int = 0,
    world: int = 1,
    inner: int = 1,
    block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of positive values along the last dimension, ties to the lower position.

    Args:
        values: int32 ``[b, h, L]``, contiguous, 0 or more; those of 0 are never taken.
        count: 1 to L.
        none: stands for the position of nothing, where fewer than ``count`` are positive.
        rank, world, inner, block_size: the striped layout that gives positions; the default is 0, 1, ...

    Returns:
        int32 ``[2, b, h, count]``, values and positions in no particular order (0 and ``none`` where
        there are no more); int32 ``[2, b, h]``, a value and a position: exactly what is larger than the
        value, or is equal to it at that position or before, is taken. Where nothing is
        taken it is (0, -1).
    """
    if not uses_triton(values):
        return reference_choice.select_largest(values, count, none, rank, world, inner, block_size)
    from .topk import select_largest as launch

    return launch(values, count, none, rank, world, inner, block_size)


def merge_selections(offers: Tensor, count: int, none: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of several selections, as :func:`select_largest` of what they were from.

    Args:
        offers: int32 ``[ranks, 2, b, h, offered]``, contiguous, with different positions.
    """
    if not uses_triton(offers):
        return reference_choice.merge_selections(offers, count, none)
    from .topk import merge_selections as launch

    return launch(offers, count, none)


def index_lists(
    distances: Tensor | None,
    diagonals: Tensor | None,
    near: int,
    columns: Tensor,
    seq_length: int,
    block_size: int,
    world: int,
    inner: int,
) -> tuple[Tensor, ...]:
    """The seven tensors of a :class:`~megatron_mtraining.pattern.index.VerticalSlashIndex`.

    Args:
        distances: bool ``[b, h, NB]``, block distances kept; None to make them from the next two.
        diagonals: int ``[b, h, K]``, token distances, whose block distances are kept; N or more is
            none. Not read if ``distances`` are given.
        near: so many first block distances are kept. Not read if ``distances`` are given.
        columns: int ``[b, h, C]``, token positions, each once; N or more is none.
        inner: ranks whose keys are attended to in one round.

    Returns:
        member, round_list, round_ptr, rank_list, rank_ptr, columns, column_ptr. Lists are 0 past their
        counts.

    Raises:
        ValueError: ranks of a round have more than :data:`~..limits.MAX_BLOCKS` blocks.
    """
    if seq_length > MAX_BLOCKS * block_size * (world // inner):
        raise ValueError(
            f"{seq_length} tokens in {world // inner} rounds of {inner} context-parallel ranks are more "
            f"than {MAX_BLOCKS} blocks of {block_size} in each: use more rounds, of fewer ranks"
        )
    arguments = (distances, diagonals, near, columns, seq_length, block_size, world, inner)
    if not uses_triton(columns):
        return reference_choice.index_lists(*arguments)
    from .vertical_slash_index import index_lists as launch

    return launch(*arguments)


def block_counts(
    blocks: Tensor, member: Tensor, world: int, inner: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The prefix counts of a :class:`~megatron_mtraining.pattern.block_index.BlockListIndex`.

    Args:
        blocks: bool or uint8 ``[b, h, nb, NB]``, by own query block and global key block.
        member: uint8 ``[b, h, NB]``, by block distance, 0 in. Query blocks see what either has.
        world, inner, rank: the striped layout, and whose query blocks these are.

    Returns:
        round_ptr, rank_ptr; int ``[b, h]``: how many pairs are in ``blocks`` alone.
    """
    if not uses_triton(blocks):
        return reference_blocks.block_counts(blocks, member, world, inner, rank)
    from .block_list_index import block_counts as launch

    return launch(blocks, member, world, inner, rank)


def block_lists(
    blocks: Tensor,
    member: Tensor,
    world: int,
    inner: int,
    rank: int,
    round_ptr: Tensor,
    rank_ptr: Tensor,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """The lists that go with the prefix counts of :func:`block_counts`, round_list and rank_list: int16
    ``[capacity]``. Entries from ``capacity`` on are left out: the caller sees to it that there are none."""
    arguments = (blocks, member, world, inner, rank, round_ptr, rank_ptr, capacity)
    if not uses_triton(blocks):
        return reference_blocks.block_lists(*arguments)
    from .block_list_index import block_lists as launch

    return launch(*arguments)


def strided_lse(
    query: Tensor,
    keys: Tensor,
    stride: int,
    block_size: int,
    first_block: int,
    rank: int,
    inner: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of whole strides, scored along antidiagonals, as logarithms by key block.

    Args:
        query: ``[s', b, h, d]``, whole own blocks of ``rank``, from local block ``first_block`` on.
        keys: ``[W, s, b, hk, d]``, of all ranks, whole blocks.
        stride: so many tokens a row; divides the block size.
        rank, inner: the striped layout, and whose queries these are.

    Returns:
        logarithms to base 2 of the sums of exp(score): ``[b, h, s' / stride, NB]`` over each block's keys,
        -inf for later blocks; ``[b, h, s' / stride]`` over all. float32, or float64 on CPU. A row's are the
        same bits with any number of ranks.
    """
    arguments = (query, keys, stride, block_size, first_block, rank, inner, softmax_scale)
    if not uses_triton(query):
        return reference_blocks.strided_lse(*arguments)
    from .antidiagonal import strided_lse as launch

    return launch(*arguments)


def take_blocks(
    values: Tensor,
    share: bool,
    wanted: int,
    first_block: int,
    window: int,
    sink: int,
    rank: int,
    world: int,
    inner: int,
) -> Tensor:
    """The best key blocks of each query block, ties going to the earlier: beside those that are always taken.

    Args:
        values: int32 ``[b, h, count, NB]``, by own query block, from local block ``first_block`` on, and key
            block. Those of 0 or less are not taken; with ``share``, a row's add up to less than 2^31.
        share: whether ``wanted`` is a share of the sum of a row's causal values, which those that are always
            taken count in, and 2^30 is all of it; or a number of blocks, which they do not.
        window, sink: so many blocks before a query's own, and so many first ones, are always taken, as is its
            own.
        rank, world, inner: the striped layout, and whose query blocks these are.

    Returns:
        uint8 ``[b, h, count, NB]``: the fewest blocks that are enough, nothing later than the query block.
    """
    arguments = (values, share, wanted, first_block, window, sink, rank, world, inner)
    if not uses_triton(values):
        return reference_blocks.take_blocks(*arguments)
    from .block_topk import take_blocks as launch

    return launch(*arguments)
