"""Do all ranks hold the same tensors? Compared by name, shape, dtype and ``requires_grad``."""

import hashlib
from collections.abc import Iterable, Sequence
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

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorEntry":
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


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
    if collective.world_size == 1:
        return
    digest = hashlib.sha256(repr(list(entries)).encode()).hexdigest()
    digests = collective.all_gather_object(digest)
    if all(other == digests[0] for other in digests):
        return
    per_rank = collective.all_gather_object(list(entries))
    for position, other in enumerate(per_rank):
        if digests[position] != digests[0]:
            difference = _first_difference(collective.ranks, per_rank[0], position, other, what)
            raise CollectiveMismatchError(
                f"The ranks hold different models: {difference}."
                f" Every rank must build the same {what}s in the same order, because rank r's n-th one is reduced"
                " with the n-th one of all others. Build the model the same way on every rank (the same files,"
                " options and branches), or share the weights of one rank before training."
            )


def _first_difference(
    ranks: Sequence[int], first: Iterable[TensorEntry], position: int, other: Iterable[TensorEntry], what: str
) -> str:
    first, other = list(first), list(other)
    names_first, names_other = {entry.name for entry in first}, {entry.name for entry in other}
    rank_first, rank_other = ranks[0], ranks[position]
    for mine, theirs in zip_longest(first, other):
        if mine == theirs:
            continue
        if theirs is not None and theirs.name not in names_first:
            return f"rank {rank_other} has {what} {theirs.name} {theirs.shape} that rank {rank_first} lacks"
        if mine is not None and mine.name not in names_other:
            return f"rank {rank_first} has {what} {mine.name} {mine.shape} that rank {rank_other} lacks"
        if mine is None or theirs is None:
            continue  # the lists have different lengths, so one of them has a name that the other lacks
        if mine.name != theirs.name:
            return f"rank {rank_first} has {what} {mine.name} where rank {rank_other} has {theirs.name}"
        for aspect in ("shape", "dtype", "requires_grad"):
            ours, others = getattr(mine, aspect), getattr(theirs, aspect)
            if ours != others:
                return f"{what} {mine.name} has {aspect} {ours} on rank {rank_first} and {others} on rank {rank_other}"
    return f"rank {rank_first} and rank {rank_other} name their {what}s differently"
