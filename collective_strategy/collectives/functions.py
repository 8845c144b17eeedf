"""Functions made from a collective's operations. Their gradients follow from those of the operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from collective_strategy.collectives import autograd
from collective_strategy.collectives.arguments import chunk_sizes, dim_argument
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.operations import SpmdType
from collective_strategy.collectives.type_hook import same_type


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """``x`` as it is; backward multiplies the gradient by ``factor``. Nothing is sent.

    Example:
        >>> y = collective.all_gather(scale_grad(x, 1 / collective.world_size))  # backward averages instead of summing
    """
    result: Tensor = _ScaleGrad.apply(x, factor)
    return result


def redistribute(
    x: Tensor,
    collective: Collective,
    source: SpmdType,
    destination: SpmdType,
    *,
    dim: int = 0,
    to_dim: int | None = None,
    sizes: Sequence[int] | None = None,
    to_sizes: Sequence[int] | None = None,
) -> Tensor:
    """A plain tensor of one type from a plain tensor of another, with the gradient that both types imply.

    Naming both types is what decides the gradient: a DTensor placement alone does not (its Replicate is *invariant*
    unless ``grad_placements`` says otherwise). All ranks call it.

    Args:
        x: Plain tensor on each rank.
        collective: The axis over which the types are meant.
        source, destination: ``"replicate"`` (equal values, gradients are contributions), ``"invariant"`` (equal values,
            gradients are equal and whole), ``"varying"`` (this rank's piece along ``dim``), ``"partial"`` (the value is
            the sum over the ranks).
        dim: The dim along which varying pieces are cut.
        to_dim: For varying to varying: the dim along which the result is cut; ``x`` is cut along ``dim``.
        sizes: Lengths of the pieces along ``dim``, one per rank, equal on all ranks; equal pieces if not given.
        to_sizes: The same along ``to_dim``.

    Raises:
        ValueError: no such conversion, with the reason.
    """
    pair = (source, destination)
    if pair == ("varying", "varying") and to_dim is not None:
        return _recut(x, collective, dim, sizes, to_dim, to_sizes)
    if to_dim is not None or to_sizes is not None:
        raise ValueError(f"redistribute: to_dim and to_sizes belong to varying to varying, not to {' to '.join(pair)}.")
    if pair not in _CONVERSIONS:
        raise ValueError(
            f"redistribute from {source!r} to {destination!r} is refused: "
            f"{_REFUSED.get(pair, 'there is no such pair')}. "
            f"Possible: {', '.join(f'{a} to {b}' for a, b in _CONVERSIONS)}, varying to varying with to_dim."
        )
    return _CONVERSIONS[pair](x, collective, dim, sizes)


def _recut(
    x: Tensor,
    collective: Collective,
    dim: int,
    sizes: Sequence[int] | None,
    to_dim: int,
    to_sizes: Sequence[int] | None,
) -> Tensor:
    along, onto = dim_argument("dim", dim, x, "x"), dim_argument("to_dim", to_dim, x, "x")
    if along == onto:
        raise ValueError(f"redistribute: dim={dim} and to_dim={to_dim} are the same dim, along which x is cut already.")
    sent = chunk_sizes(collective, to_sizes, x, onto, "x")
    received = list(sizes) if sizes is not None else [x.shape[along]] * collective.world_size
    return collective.all_to_all(x, split_dim=onto, concat_dim=along, sizes=(sent, received))


def _between_zeros(x: Tensor, collective: Collective, dim: int, sizes: Sequence[int] | None) -> Tensor:
    at = dim_argument("dim", dim, x, "x")
    n = collective.world_size
    lengths = tuple(sizes) if sizes is not None else (x.shape[at],) * n
    return autograd.in_zeros(collective, x, at, lengths)


def _reduced_chunk(x: Tensor, collective: Collective, dim: int, sizes: Sequence[int] | None) -> Tensor:
    at = dim_argument("dim", dim, x, "x")
    return collective.reduce_scatter(x, "sum", at, sizes=list(chunk_sizes(collective, sizes, x, at, "x")))


_CONVERSIONS: dict[tuple[str, str], Callable[[Tensor, Collective, int, Sequence[int] | None], Tensor]] = {
    ("partial", "replicate"): lambda x, c, dim, sizes: c.all_reduce(x, to="replicate"),
    ("partial", "invariant"): lambda x, c, dim, sizes: c.all_reduce(x, to="invariant"),
    ("partial", "varying"): _reduced_chunk,
    ("invariant", "replicate"): lambda x, c, dim, sizes: c.replicate(x),
    ("invariant", "varying"): lambda x, c, dim, sizes: c.shard(x, dim, sizes=sizes, of="invariant"),
    ("replicate", "varying"): lambda x, c, dim, sizes: c.shard(x, dim, sizes=sizes, of="replicate"),
    ("replicate", "partial"): lambda x, c, dim, sizes: autograd.kept_by_first(c, x),
    ("varying", "replicate"): lambda x, c, dim, sizes: c.all_gather(x, dim, sizes=sizes, to="replicate"),
    ("varying", "invariant"): lambda x, c, dim, sizes: c.all_gather(x, dim, sizes=sizes, to="invariant"),
    ("varying", "partial"): _between_zeros,
}
_REFUSED = {
    (
        "replicate",
        "invariant",
    ): "the gradient of an invariant result is whole on each rank, that of a replicate input is a "
    "contribution, so it would be counted once per rank; reduce a partial value to 'invariant' instead",
    ("invariant", "partial"): "go over 'replicate'",
}


class _ScaleGrad(torch.autograd.Function):
    spmd_typecheck = staticmethod(same_type)
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


# The names that Megatron, PhysicsNeMo and makani use for the four tensor-parallel pairs.


def copy_to_parallel_region(x: Tensor, collective: Collective) -> Tensor:
    """Identity; backward sums: ``collective.replicate(x)``, Megatron's f."""
    return collective.replicate(x)


def reduce_from_parallel_region(x: Tensor, collective: Collective) -> Tensor:
    """Sum; backward is the identity: ``collective.all_reduce(x, to="invariant")``, Megatron's g."""
    return collective.all_reduce(x, to="invariant")


def scatter_to_parallel_region(x: Tensor, collective: Collective, dim: int = -1) -> Tensor:
    """Own chunk; backward gathers: ``collective.shard(x, dim)``."""
    return collective.shard(x, dim)


def gather_from_parallel_region(x: Tensor, collective: Collective, dim: int = -1) -> Tensor:
    """All chunks; backward takes the own one: ``collective.all_gather(x, dim, to="invariant")``."""
    return collective.all_gather(x, dim, to="invariant")
