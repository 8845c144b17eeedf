"""Do all ranks hold the same tensors? Compared by name, shape, dtype, ``requires_grad`` and role."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveMismatchError


@dataclass(frozen=True)
class TensorEntry:
    """What two ranks must agree on about one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    role: str = ""

    @classmethod
    def of(cls, name: str, tensor: Tensor, role: str = "") -> TensorEntry:
        """The entry of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), dtype, tensor.requires_grad, role)


def parameter_entries(module: nn.Module) -> list[TensorEntry]:
    """The module's parameters in registration order, each shared one once."""
    return [TensorEntry.of(name, parameter) for name, parameter in module.named_parameters()]


def buffer_entries(module: nn.Module) -> list[TensorEntry]:
    """The module's buffers in registration order, the non-persistent ones too."""
    return [TensorEntry.of(name, buffer) for name, buffer in module.named_buffers()]


def agree(collective: Collective, entries: Sequence[TensorEntry], what: str = "parameter") -> None:
    """Compares ``entries`` over the ranks of ``collective``.

    Called by every rank of the collective. Usually one short message per rank; the full lists travel only
    when they differ.

    Args:
        collective: who must agree.
        entries: this rank's tensors.
        what: how the error calls one of them, ``"parameter"`` or ``"buffer"``.

    Raises:
        CollectiveMismatchError: on every rank, with the same text, naming the first tensor that differs
            and the ranks.
    """
    agree_in_groups(collective, {tuple(range(collective.world_size)): entries}, "", what)


def agree_in_groups(
    collective: Collective,
    entries: Mapping[tuple[int, ...], Sequence[TensorEntry]],
    layout: str,
    what: str = "parameter",
) -> bool:
    """Compares, for each group of ranks of ``collective`` that this rank is in, its tensors over the group's ranks.

    Called by every rank of the collective; one short message per rank unless something differs.

    Args:
        collective: all ranks concerned.
        entries: this rank's tensors by group (ranks of ``collective``).
        layout: any text; whether it is equal on all ranks is the result.
        what: how the error calls a tensor.

    Raises:
        CollectiveMismatchError: on every rank, with the same text, naming the first tensor that differs and the ranks.
    """
    if collective.world_size == 1:
        return True
    digests = {group: hashlib.sha256(repr(list(own)).encode()).hexdigest() for group, own in entries.items()}
    gathered: list[tuple[dict[tuple[int, ...], str], str]] = collective.all_gather_object((digests, layout))
    pair = _first_difference_in(gathered)
    if pair is not None:
        group, one, other = pair
        per_rank: list[list[TensorEntry]] = collective.all_gather_object(list(entries.get(group, ())))
        difference = _first_difference(
            collective.ranks[one], per_rank[one], collective.ranks[other], per_rank[other], what
        )
        raise CollectiveMismatchError(
            f"The ranks hold different models: {difference}. Every rank of ranks {list(group)} must build the same "
            f"{what}s in the same order, because one's n-th is reduced with the n-th of the others. Build the model "
            "the same way on every rank (the same files, options, branches and marks), or share the weights of one "
            "rank before training."
        )
    return all(other == gathered[0][1] for _, other in gathered)


def _first_difference_in(
    gathered: Sequence[tuple[dict[tuple[int, ...], str], str]],
) -> tuple[tuple[int, ...], int, int] | None:
    for rank, (digests, _) in enumerate(gathered):
        for group, digest in digests.items():
            if rank != group[0] and gathered[group[0]][0].get(group) != digest:
                return group, group[0], rank
    for digests, _ in gathered:  # a group that one of its members does not have
        for group in digests:
            for member in group:
                if group not in gathered[member][0]:
                    return group, group[0] if group[0] != member else group[1], member
    return None


def _first_difference(
    rank_first: int, first: Sequence[TensorEntry], rank_other: int, other: Sequence[TensorEntry], what: str
) -> str:
    names_first, names_other = {entry.name for entry in first}, {entry.name for entry in other}
    for mine, theirs in zip_longest(first, other):
        if mine == theirs:
            continue
        if theirs is not None and theirs.name not in names_first:
            return f"rank {rank_other} has {what} {theirs.name} {theirs.shape} that rank {rank_first} lacks"
        if mine is not None and mine.name not in names_other:
            return f"rank {rank_first} has {what} {mine.name} {mine.shape} that rank {rank_other} lacks"
        if mine is None or theirs is None or mine.name != theirs.name:
            return f"rank {rank_first} and rank {rank_other} name their {what}s differently"
        for aspect in ("shape", "dtype", "requires_grad", "role"):
            ours, others = getattr(mine, aspect), getattr(theirs, aspect)
            if ours != others:
                return f"{what} {mine.name} has {aspect} {ours} on rank {rank_first} and {others} on rank {rank_other}"
    return f"rank {rank_first} and rank {rank_other} name their {what}s differently"
