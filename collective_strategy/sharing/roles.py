"""Roles: marks resolved for every parameter of a module, on the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor, nn

from collective_strategy.sharing.marks import ALL_AXES, ATTRIBUTE, Mark, marks_of, original_path

UnmarkedPolicy = Literal["private", "shared", "error"]


@dataclass(frozen=True)
class Role:
    """What one tensor is, axis by axis (the data axis left out, over which all are replicas).

    Attributes:
        name: Qualified name.
        by_axis: The mark that decided, by axis. An axis without one: unmarked, private.
        where: The module that carries the deciding marks, for messages.
    """

    name: str
    by_axis: tuple[tuple[str, Mark], ...]
    where: str = ""

    def mark(self, axis: str) -> Mark | None:
        """The mark that decides over ``axis``."""
        return dict(self.by_axis).get(axis)

    @property
    def replicated_over(self) -> tuple[str, ...]:
        """Axes over which all ranks hold the same values."""
        return tuple(axis for axis, mark in self.by_axis if mark.kind == "shared")

    @property
    def reduced_over(self) -> tuple[str, ...]:
        """Axes over which the gradient is reduced."""
        return tuple(axis for axis, mark in self.by_axis if mark.kind == "shared" and mark.grad != "none")

    @property
    def averaged_over(self) -> tuple[str, ...]:
        """Axes over which the reduction is a mean."""
        return tuple(axis for axis, mark in self.by_axis if mark.kind == "shared" and mark.grad == "mean")

    def describe(self) -> str:
        """One word or two per axis, for tables and fingerprints."""
        if not self.by_axis:
            return "private"
        return ", ".join(f"{axis}: {mark.describe()}" for axis, mark in self.by_axis)


def resolve_roles(
    root: nn.Module,
    axes: Sequence[str],
    unmarked: UnmarkedPolicy = "private",
    *,
    buffers: bool = False,
    unions: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Role]:
    """The role of every parameter (or buffer) by qualified name; a tied one appears once, under its first name.

    Args:
        root: The module.
        axes: The mesh's axes but the data axis.
        unmarked: What a weight without a mark is on those axes.
        buffers: Resolve buffers instead of parameters; marks that match no buffer are right then.
        unions: Names of several axes together, which marks may use.

    Raises:
        ValueError: a mark names an axis that is not in the mesh, or finds no parameter or buffer; two marks of one
            module contradict each other; a tied weight has two roles; a weight is unmarked under ``unmarked="error"``.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    _refuse_unknown_axes(modules, axes, unions)
    found: dict[tuple[str, Mark], bool] = {
        (path, m): False for path, module in modules.items() for m in marks_of(module)
    }
    roles: dict[str, Role] = {}
    first: dict[int, str] = {}
    for name, tensor in _named(root, buffers):
        decided, where = _decide(modules, name, axes, unions, found)
        role = Role(name, tuple(decided.items()), where)
        if id(tensor) in first:
            _refuse_two_roles(roles[first[id(tensor)]], role)
            continue
        first[id(tensor)] = name
        if axes and not decided and unmarked != "private" and not buffers:
            if unmarked == "error":
                raise ValueError(
                    f"parameter {name} has no mark, and unmarked='error' was asked for. Mark its module with "
                    f"shared(), sharded() "
                    f"or private(); axes: {', '.join(axes)}."
                )
            role = Role(name, tuple((axis, Mark("shared", (axis,), "sum")) for axis in axes), "unmarked='shared'")
        roles[name] = role
    lost = [(path, mark) for (path, mark), hit in found.items() if not hit and _is_lost(modules[path], mark)]
    if lost and not buffers:
        path, mark = lost[0]
        raise ValueError(
            f"{path or 'the root module'} ({type(modules[path]).__name__}) is marked {mark.describe()} for "
            f"{list(mark.include)}, but no parameter of it matches. It has "
            f"{[name for name, _ in modules[path].named_parameters()][:8]}. Correct the name, or unmark() the module."
        )
    return roles


def _named(root: nn.Module, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    return root.named_buffers(remove_duplicate=False) if buffers else root.named_parameters(remove_duplicate=False)


def _decide(
    modules: Mapping[str, nn.Module],
    name: str,
    axes: Sequence[str],
    unions: Mapping[str, Sequence[str]],
    found: dict[tuple[str, Mark], bool],
) -> tuple[dict[str, Mark], str]:
    """Walks from the root to the owner: an inner mark wins over an outer one, axis by axis."""
    decided: dict[str, Mark] = {}
    where = ""
    steps = name.split(".")
    for depth in range(len(steps)):
        path, relative = ".".join(steps[:depth]), ".".join(steps[depth:])
        module = modules.get(path)
        here: dict[str, Mark] = {}
        for mark in marks_of(module) if module is not None else ():
            if not mark.matches(relative):
                continue
            found[path, mark] = True
            single = [axis for named in mark.axes for axis in unions.get(named, (named,))]
            for axis in axes if mark.axes == (ALL_AXES,) else single:
                if axis in here and here[axis] != mark:
                    raise ValueError(
                        f"parameter {name} has two marks on {path or 'the root module'}: {here[axis].describe()} and "
                        f"{mark.describe()}. Keep one."
                    )
                here[axis] = mark
        if here:
            where = original_path(path) or type(modules[""]).__name__
            decided.update(here)
    return {axis: decided[axis] for axis in axes if axis in decided}, where


def _is_lost(module: nn.Module, mark: Mark) -> bool:
    """Whether a mark that found no parameter means nothing at all."""
    if any(mark.matches(name) for name, _ in module.named_buffers()):
        return False
    own = mark in module.__dict__.get(ATTRIBUTE, ())
    return own or any(True for _ in module.parameters())  # a decorated class may have no weights, as options say


def _refuse_unknown_axes(
    modules: Mapping[str, nn.Module], axes: Sequence[str], unions: Mapping[str, Sequence[str]]
) -> None:
    for path, module in modules.items():
        for mark in marks_of(module):
            unknown = [axis for axis in mark.axes if axis != ALL_AXES and axis not in axes and axis not in unions]
            if unknown:
                raise ValueError(
                    f"{path or 'the root module'} ({type(module).__name__}) is marked {mark.describe()}, but the mesh "
                    f"has no model axis {unknown[0]!r}: its axes beside the data axis are {list(axes) or 'none'}. "
                    f"Correct the name (over the data axis all weights are equal and averaged without a mark), or give "
                    f"the mesh this axis; size 1 runs the model on one device."
                )


def _refuse_two_roles(one: Role, other: Role) -> None:
    if one.by_axis != other.by_axis:
        raise ValueError(
            f"the tied weight {one.name} = {other.name} has two roles: {one.describe()} (on "
            f"{one.where or 'no mark'}) and "
            f"{other.describe()} (on {other.where or 'no mark'}). Mark both places alike."
        )
