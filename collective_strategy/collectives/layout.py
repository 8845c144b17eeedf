"""How the ranks are laid out over named axes: arithmetic only, nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

NO_DEFAULT = "<not given>"


@dataclass(frozen=True)
class Partition:
    """A full partition of ranks ``0 .. world_size - 1`` into groups, of which this rank is in ``members``."""

    members: tuple[int, ...]
    layout: MeshLayout | None = None
    axes: tuple[str, ...] = ()
    explicit: tuple[tuple[int, ...], ...] = ()

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups, for backends that need the full partition. Its cost grows with the number of ranks."""
        if self.layout is None:
            return self.explicit
        groups: list[tuple[int, ...]] = []
        placed: set[int] = set()
        for rank in range(self.layout.world_size):
            if rank not in placed:
                groups.append(self.layout.members(self.axes, rank))
                placed.update(groups[-1])
        return tuple(groups)


@dataclass(frozen=True)
class MeshLayout:
    """Named axes over the ranks, row-major: the last axis varies fastest.

    Args:
        axes: Size by name, in order.
        unions: Name to the axes it joins.
        data_axis: The axis over which the batch is split, None if there is none.
    """

    axes: dict[str, int]
    unions: dict[str, tuple[str, ...]]
    data_axis: str | None

    @classmethod
    def check(cls, mesh: Mapping[str, int], unions: Mapping[str, Sequence[str]] | None, data_axis: object) -> None:
        """Refuses a layout that is wrong whatever the number of ranks.

        Raises:
            TypeError, ValueError: naming the axis and what is wrong with it.
        """
        if not isinstance(mesh, Mapping) or not mesh:
            raise TypeError(f"mesh must map axis names to sizes, for example {{'data': -1, 'model': 2}}, got {mesh!r}.")
        for name, size in mesh.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"mesh axis names are strings, got {name!r}.")
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise ValueError(f"mesh axis {name!r} has size {size!r}; sizes are positive, one may be -1 (inferred).")
        if list(mesh.values()).count(-1) > 1:
            raise ValueError(f"mesh {dict(mesh)}: only one axis may be -1.")
        for name, joined in (unions or {}).items():
            unknown = [axis for axis in joined if axis not in mesh]
            if name in mesh:
                raise ValueError(f"union {name!r} has the name of an axis.")
            if isinstance(joined, str) or unknown or len(set(joined)) != len(joined) or not joined:
                raise ValueError(f"union {name!r} joins {joined!r}; it must list axes out of {list(mesh)}, each once.")
        if data_axis == NO_DEFAULT:
            if "data" not in mesh:
                raise ValueError(
                    f"mesh {dict(mesh)} has no axis named 'data'. Say which axis splits the batch with "
                    f"data_axis='name', or "
                    "data_axis=None if no axis does (every rank then sees the same batches)."
                )
        elif data_axis is not None and data_axis not in mesh and data_axis not in (unions or {}):
            raise ValueError(f"data_axis={data_axis!r} is neither an axis of the mesh {list(mesh)} nor a union.")

    @classmethod
    def resolve(
        cls, mesh: Mapping[str, int], unions: Mapping[str, Sequence[str]] | None, data_axis: object, world_size: int
    ) -> MeshLayout:
        """Infers the -1 and checks the sizes against the number of ranks.

        Raises:
            ValueError: the sizes do not multiply to ``world_size``.
        """
        cls.check(mesh, unions, data_axis)
        known = prod(size for size in mesh.values() if size != -1)
        if -1 in mesh.values():
            if world_size % known:
                raise ValueError(f"mesh {dict(mesh)}: {world_size} ranks cannot be divided by {known}.")
        elif known != world_size:
            raise ValueError(f"mesh {dict(mesh)} needs {known} ranks, but there are {world_size}.")
        axes = {name: world_size // known if size == -1 else size for name, size in mesh.items()}
        axis = "data" if data_axis == NO_DEFAULT else data_axis
        assert axis is None or isinstance(axis, str)
        return cls(axes, {name: tuple(joined) for name, joined in (unions or {}).items()}, axis)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank on each axis."""
        result = {}
        for name, size in reversed(self.axes.items()):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.axes}

    def members(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Global ranks that differ from ``rank`` only on ``axes``, in mesh order; cost grows with their number."""
        strides, stride = {}, 1
        for name, size in reversed(self.axes.items()):
            strides[name], stride = stride, stride * size
        here = self.coordinates(rank)
        ranks = [rank - sum(here[name] * strides[name] for name in axes)]
        for name in self.axes:
            if name in axes:
                ranks = [base + index * strides[name] for base in ranks for index in range(self.axes[name])]
        return tuple(sorted(ranks))

    def partition(self, axes: Sequence[str], rank: int) -> Partition:
        """The groups along ``axes``."""
        return Partition(self.members(axes, rank), self, tuple(axes))
