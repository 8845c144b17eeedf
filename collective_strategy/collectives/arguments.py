"""Checks of arguments, made before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collective_strategy.collectives.operations import ReduceOp

if TYPE_CHECKING:
    from collective_strategy.collectives.base import CollectiveBase
    from collective_strategy.collectives.trees import Tree


def rank_argument(collective: CollectiveBase, name: str, value: object) -> int:
    """A rank within the collective.

    Raises:
        TypeError, ValueError: it is no whole number or outside the collective.
    """
    n = collective.world_size
    if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a rank of the collective {collective.name!r} (0..{n - 1}), got {value!r}.")
    rank = operator.index(value)
    if not 0 <= rank < n:
        raise ValueError(
            f"{name}={rank} is not a rank of the collective {collective.name!r}, which has ranks 0..{n - 1} "
            f"(global ranks {shorten(collective.ranks)}). {name} counts within the collective."
        )
    return int(rank)


def dim_argument(name: str, value: object, tensor: Tensor, path: str) -> int:
    """A dim of ``tensor``, made non-negative."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if tensor.ndim == 0:
        raise ValueError(f"{name}={value}: {path} has no dims; all_gather(dim=None) stacks such tensors.")
    if not -tensor.ndim <= value < tensor.ndim:
        raise ValueError(f"{name}={value} is outside the {tensor.ndim} dims of {path} with shape {list(tensor.shape)}.")
    return value % tensor.ndim


def width_argument(width: object) -> tuple[int, int]:
    """Borders from the rank before and the rank after: one width for both, or a pair."""
    widths = width if isinstance(width, (tuple, list)) else (width, width)
    if len(widths) != 2 or any(isinstance(entry, bool) or not hasattr(entry, "__index__") for entry in widths):
        raise TypeError(f"halo_exchange: width must be a whole number or a pair of them, got {width!r}.")
    before, after = (operator.index(entry) for entry in widths)
    if min(before, after) < 0:
        raise ValueError(f"halo_exchange: widths must be >= 0, got {width!r}.")
    return before, after


def sizes_argument(collective: CollectiveBase, sizes: object, name: str = "sizes") -> tuple[int, ...]:
    """One length per rank."""
    if isinstance(sizes, Tensor) or not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise TypeError(f"{name} must list one length per rank (whole numbers), got {sizes!r}.")
    if any(isinstance(size, bool) or not hasattr(size, "__index__") or operator.index(size) < 0 for size in sizes):
        raise ValueError(f"{name} must list lengths >= 0, got {list(sizes)}.")
    if len(sizes) != collective.world_size:
        raise ValueError(
            f"{name} lists {len(sizes)} lengths, but {collective.name!r} has {collective.world_size} ranks."
        )
    return tuple(operator.index(size) for size in sizes)


def chunk_sizes(collective: CollectiveBase, sizes: object, tensor: Tensor, dim: int, path: str) -> tuple[int, ...]:
    """How ``tensor`` is cut along ``dim``: ``sizes``, or equal chunks."""
    length, n = tensor.shape[dim], collective.world_size
    if sizes is None:
        if length % n:
            raise ValueError(
                f"{path} has {length} entries along dim {dim}, which {n} ranks cannot share equally. Give "
                f"sizes=[...], one "
                "length per rank, the same list on all ranks."
            )
        return (length // n,) * n
    result = sizes_argument(collective, sizes)
    if sum(result) != length:
        raise ValueError(f"sizes {list(result)} sum to {sum(result)}, but {path} has {length} entries along dim {dim}.")
    return result


def pairs_argument(collective: CollectiveBase, pairs: object) -> tuple[tuple[int, int], ...]:
    """(source, target) pairs in which no rank sends or receives twice."""
    try:
        result = tuple((a, b) for a, b in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(f"pairs must list (source, target) ranks, got {pairs!r}.") from None
    checked = tuple((rank_argument(collective, "source", a), rank_argument(collective, "target", b)) for a, b in result)
    for index, role in enumerate(("sends", "receives")):
        ranks = [pair[index] for pair in checked]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            raise ValueError(f"pairs {list(checked)}: rank {twice[0]} {role} twice; a permutation has each rank once.")
    return checked


def destination(collective: CollectiveBase, to: object, tree: Tree, operation: str) -> str:
    """Resolves ``to``: the given word, or the default of the data axis.

    Raises:
        ValueError: an unknown word; or none on an axis without a default, for a tensor that requires grad.
    """
    if to not in (None, "replicate", "invariant"):
        raise ValueError(f"{operation}: to={to!r} is not one of 'replicate', 'invariant'.")
    if to is not None:
        return str(to)
    if collective._default_to is None and needs_grad(tree):
        raise ValueError(
            f"{operation} over {collective.name!r} of a tensor that requires grad needs to=. If each rank goes on to "
            "something of its own with the result (other samples, other weights), say to='replicate': the ranks' "
            "gradients are summed. If all ranks repeat the same computation on it, say to='invariant': each already "
            "has the whole gradient. Only on the data axis 'replicate' is the default. For a result without gradient "
            "give x.detach()."
        )
    return collective._default_to or "replicate"


def refuse_grad(tree: Tree, operation: str, instead: str) -> None:
    """Refuses tensors that require grad where there is no gradient."""
    if needs_grad(tree):
        raise ValueError(f"{operation} has no gradient, but the tensor requires grad. {instead}, or give x.detach().")


def refuse_op_without_gradient(tree: Tree, op: ReduceOp, operation: str) -> None:
    """Only sum and mean are linear."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN) and needs_grad(tree):
        raise ValueError(
            f"{operation}(op={op.value!r}) of a tensor that requires grad is refused: only 'sum' and 'mean' have a "
            "gradient that is right on every rank. Give x.detach(), or gather the tensors and reduce them here."
        )


def needs_grad(tree: Tree) -> bool:
    """Whether a result must be differentiable."""
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tree.leaves)


def shorten(values: Sequence[int]) -> str:
    """A long list for a message."""
    values = list(values)
    return str(values) if len(values) <= 8 else f"[{values[0]}, {values[1]}, ..., {values[-1]}] ({len(values)} of them)"
