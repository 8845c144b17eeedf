"""What every rank of a model holds of which tensor, and where each piece lies in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from torch import Tensor, nn

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.sharing.pieces import Place, spans_of_pieces
from collective_strategy.sharing.roles import Role, UnmarkedPolicy

Coordinates = tuple[int, ...]
"""A position on the model axes that have more than one rank, in mesh order."""

Kind = Literal["shared", "sharded", "private", "copies"]


@dataclass(frozen=True)
class Cut:
    """One mark's cut: along ``dim``, over ``axes`` taken together in mesh order."""

    axes: tuple[str, ...]
    dim: int
    parts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Entry:
    """What one rank holds under a name: sent to the other ranks of the model."""

    shape: tuple[int, ...]
    dtype: str
    kinds: tuple[tuple[str, Kind], ...]
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of a whole and the position of the rank that writes it."""

    writer: Coordinates
    place: Place


@dataclass(frozen=True)
class Whole:
    """A tensor of the model, put together from pieces.

    Attributes:
        private: Positions on the axes on which other ranks hold other tensors under this name.
        copies: Whether those other tensors are meant to be equal (a number that cannot be cut).
    """

    dtype: str
    shape: tuple[int, ...]
    private: Mapping[str, int]
    pieces: tuple[Piece, ...]
    copies: bool = False


@dataclass
class ModelAxes:
    """The model axes that have more than one rank, and this rank's place among them."""

    sizes: dict[str, int]
    here: Coordinates
    writers: dict[Coordinates, int] = field(default_factory=dict)
    is_writer: bool = True

    @classmethod
    def one(cls) -> ModelAxes:
        """Those of a model that one rank holds."""
        return cls({}, (), {(): 0})

    @classmethod
    def of(cls, collective: Collective, communicators: Communicators) -> ModelAxes:
        """Of a collective that is set up. Local."""
        mesh = collective.mesh
        if mesh is None:
            return cls({}, (), {(): 0}, collective.rank == 0)
        sizes = {axis: size for axis, size in communicators.sizes.items() if axis in communicators.model_axes}
        sizes = {axis: size for axis, size in sizes.items() if size > 1}

        def position(rank: int) -> Coordinates:
            place = mesh.coordinates(rank)
            return tuple(place[axis] for axis in sizes)

        writers = {position(rank): rank for rank in mesh.members(tuple(sizes), 0)}
        return cls(sizes, position(collective.rank), writers, collective.rank in writers.values())


def gather_over_model(collective: Collective, axes: ModelAxes, value: Any) -> dict[Coordinates, Any]:
    """Every model rank's value by position; the data rank is this rank's own. Called by all ranks."""
    gathered: dict[Coordinates, Any] = {(): value}
    for axis in reversed(axes.sizes):
        lists = collective[axis].all_gather_object(gathered)
        gathered = {(k, *rest): found for k, part in enumerate(lists) for rest, found in part.items()}
    return gathered


def describe(
    module: nn.Module, communicators: Communicators, unmarked: UnmarkedPolicy, axes: ModelAxes
) -> dict[str, Entry]:
    """The entries of a module's parameters and buffers, tied ones under each of their names. Local.

    Raises:
        CheckpointError: a mark cannot mean what it says.
    """
    entries: dict[str, Entry] = {}
    for named, buffers in ((module.named_parameters, False), (module.named_buffers, True)):
        roles = communicators.roles(module, unmarked, buffers=buffers)
        first: dict[int, str] = {}
        for name, tensor in named(remove_duplicate=False):
            known = first.setdefault(id(tensor), name)
            entries[name] = entry_of(name, tensor, roles[known], axes)
    return entries


def entry_of(name: str, tensor: Tensor, role: Role | None, axes: ModelAxes) -> Entry:
    """One tensor's entry; without a role it is private to its model rank."""
    kinds: list[tuple[str, Kind]] = []
    cut_over: dict[tuple[int, tuple[int, ...] | None, tuple[str, ...]], list[str]] = {}
    for axis in axes.sizes:
        mark = role.mark(axis) if role is not None else None
        kind: Kind = "private" if mark is None else mark.kind
        if mark is not None and mark.kind == "sharded":
            if tensor.dim() == 0:
                kind = "copies"  # such as the counter of a norm whose channels are cut
            else:
                assert mark.dim is not None
                if not -tensor.dim() <= mark.dim < tensor.dim():
                    raise CheckpointError(
                        f"{name} of shape {tuple(tensor.shape)} is marked {mark.describe()}, but has no dim {mark.dim}."
                        " Correct the mark."
                    )
                cut_over.setdefault((mark.dim % tensor.dim(), mark.parts, mark.axes), []).append(axis)
        kinds.append((axis, kind))
    cuts = tuple(Cut(tuple(over), dim, parts) for (dim, parts, _), over in cut_over.items())
    if len({cut.dim for cut in cuts}) < len(cuts):
        raise CheckpointError(
            f"{name} is cut along one dim by two marks, {' and '.join(str(cut) for cut in cuts)}, which does not say"
            " which cut comes first. Mark it once, over a union of the axes."
        )
    return Entry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(kinds), cuts)


def put_together(gathered: Mapping[Coordinates, Mapping[str, Entry]], axes: ModelAxes) -> dict[str, list[Whole]]:
    """The wholes by name; a private tensor has one for each model rank.

    Raises:
        CheckpointError: the ranks' marks or shapes contradict each other; it names the tensor and the ranks.
    """
    names = dict.fromkeys(name for entries in gathered.values() for name in entries)
    return {
        name: list(_wholes(name, {at: entries[name] for at, entries in gathered.items() if name in entries}, axes))
        for name in names
    }


def own_place(entry: Entry, wholes: Iterable[Whole], axes: ModelAxes) -> Place | None:
    """Which slice of the whole this rank holds."""
    kinds = dict(entry.kinds)
    at = tuple(0 if kinds[axis] == "shared" else k for axis, k in zip(axes.sizes, axes.here, strict=True))
    return next((piece.place for whole in wholes for piece in whole.pieces if piece.writer == at), None)


def _wholes(name: str, entries: Mapping[Coordinates, Entry], axes: ModelAxes) -> Iterable[Whole]:
    first_at, first = next(iter(entries.items()))
    for at, entry in entries.items():
        for aspect in ("kinds", "cuts", "dtype"):
            one, other = getattr(first, aspect), getattr(entry, aspect)
            if one != other and (aspect != "dtype" or _joined(first)):
                raise CheckpointError(
                    f"{name} has {aspect} {one} on {_rank(first_at, axes)} and {other} on {_rank(at, axes)}. Mark and"
                    " make it alike on all ranks."
                )
    names = list(axes.sizes)
    kinds = dict(first.kinds)
    own = [k for k, axis in enumerate(names) if kinds[axis] in ("private", "copies")]
    groups: dict[Coordinates, dict[Coordinates, Entry]] = {}
    for at, entry in entries.items():
        groups.setdefault(tuple(at[k] for k in own), {})[at] = entry
    for position, members in groups.items():
        private = {names[k]: value for k, value in zip(own, position, strict=True)}
        wanted = [(private[axis],) if axis in private else range(size) for axis, size in axes.sizes.items()]
        missing = [at for at in product(*wanted) if at not in members]
        if missing:
            raise CheckpointError(
                f"{name} is {_said(first)} and there on {_rank(next(iter(members)), axes)}, but missing on"
                f" {_rank(missing[0], axes)}. Build it on all ranks of the axis, or mark it private()."
            )
        copies = any(kinds[names[k]] == "copies" for k in own)
        yield _whole(name, members, axes, private, copies)


def _whole(
    name: str, members: Mapping[Coordinates, Entry], axes: ModelAxes, private: Mapping[str, int], copies: bool
) -> Whole:
    names = list(axes.sizes)
    first = next(iter(members.values()))
    spans: dict[int, tuple[Cut, list[tuple[tuple[int, int], ...]]]] = {}
    shape = list(first.shape)
    for cut in first.cuts:
        lengths: dict[int, int] = {}
        for at, entry in members.items():
            k = _position(cut, at, axes)
            length = entry.shape[cut.dim] if len(entry.shape) > cut.dim else -1
            if lengths.setdefault(k, length) != length:
                raise CheckpointError(
                    f"piece {k} of {name} is {lengths[k]} long along dim {cut.dim} on one rank and {length} on"
                    f" {_rank(at, axes)}. Build the pieces alike."
                )
        ordered = [lengths[k] for k in sorted(lengths)]
        try:
            spans[cut.dim] = cut, spans_of_pieces(ordered, cut.parts)
        except ValueError as error:
            raise CheckpointError(
                f"{name} is sharded over {'+'.join(cut.axes)} along dim {cut.dim}, but {error}. Correct parts=, or give"
                " the pieces these lengths."
            ) from None
        shape[cut.dim] = sum(ordered)
    pieces = []
    for at, entry in members.items():
        place = Place(tuple(shape), {dim: runs[_position(cut, at, axes)] for dim, (cut, runs) in spans.items()})
        if place.shape != entry.shape:
            raise CheckpointError(
                f"{name} is {_said(first)} and of shape {entry.shape} on {_rank(at, axes)}, which does not fit the"
                f" other ranks' {first.shape}: expected {place.shape}. Build it alike on all ranks, or mark"
                " it private()."
            )
        shared = [k for k, axis in enumerate(names) if dict(entry.kinds)[axis] == "shared"]
        if all(at[k] == 0 for k in shared):
            pieces.append(Piece(at, place))
    return Whole(first.dtype, tuple(shape), private, tuple(pieces), copies)


def _position(cut: Cut, at: Coordinates, axes: ModelAxes) -> int:
    """The place of a rank among the pieces of a cut."""
    place = dict(zip(axes.sizes, at, strict=True))
    result = 0
    for axis in cut.axes:
        result = result * axes.sizes[axis] + place[axis]
    return result


def _joined(entry: Entry) -> bool:
    return any(kind in ("shared", "sharded") for _, kind in entry.kinds)


def _said(entry: Entry) -> str:
    return ", ".join(f"{kind} over {axis}" for axis, kind in entry.kinds) or "the same everywhere"


def _rank(at: Coordinates, axes: ModelAxes) -> str:
    place = ", ".join(f"{axis} {k}" for axis, k in zip(axes.sizes, at, strict=True))
    return f"rank {axes.writers.get(at, '?')} ({place})" if place else "rank 0"
