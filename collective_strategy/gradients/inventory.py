"""The parameters of a module, the way each one's gradient takes, and the agreement of all ranks on both."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.fingerprint import TensorEntry, agree_in_groups
from collective_strategy.sharing.roles import Role, UnmarkedPolicy, resolve_roles


@dataclass(frozen=True)
class Route:
    """Where a gradient is reduced: over the data axis and the axes it is shared over, in one all-reduce.

    ``axes`` in mesh order; ``scale`` multiplies the sum: one over the ranks that are averaged. ``averages``: all ranks
    of the group are, so that reducing a second time changes nothing.
    """

    axes: tuple[str, ...]
    scale: float
    averages: bool


class Communicators:
    """The engine's own groups, apart from those of the user's calls, made once per set of axes.

    Making one is an act of all ranks, so all ranks ask for the same ones in the same order.
    """

    def __init__(self, collective: Collective) -> None:
        self.world = collective
        mesh = collective.mesh
        data = collective.data_axis
        self.sizes: dict[str, int] = {"data": collective.world_size} if mesh is None else dict(mesh.axes)
        if mesh is None:
            self.data_axes: tuple[str, ...] = ("data",)
        else:
            self.data_axes = () if data is None else mesh.unions.get(data, (data,))
        self.model_axes = tuple(axis for axis in self.sizes if axis not in self.data_axes)
        unions = {} if mesh is None else mesh.unions
        self.model_unions = {name: axes for name, axes in unions.items() if set(axes) <= set(self.model_axes)}
        self._made: dict[tuple[str, ...], Collective] = {}
        self._shares: dict[tuple[str, ...], bool] = {}
        self._small: dict[tuple[tuple[str, ...], int], Tensor] = {}

    def size(self, axes: Sequence[str]) -> int:
        """Number of ranks of the group over ``axes``."""
        result = 1
        for axis in axes:
            result *= self.sizes[axis]
        return result

    def over(self, axes: tuple[str, ...]) -> Collective:
        """The group over ``axes``."""
        if axes not in self._made:
            self._made[axes] = self.world.duplicate(None if self.world.mesh is None else axes)
            self._shares[axes] = self._made[axes].share_memory()
        return self._made[axes]

    def summed(self, axes: tuple[str, ...], values: Tensor) -> Tensor:
        """A few values, in memory in which they are best summed over ``axes``; until the next ones of this number."""
        if not self._shares[axes]:
            return values
        key = axes, values.numel()
        if key not in self._small:
            self._small[key] = self.over(axes).shared_empty(values.numel(), values.dtype, values.device)
        return self._small[key].copy_(values)

    def roles(
        self, module: nn.Module, unmarked: UnmarkedPolicy = "private", *, buffers: bool = False
    ) -> dict[str, Role]:
        """What the module's parameters (or buffers) are on the model axes."""
        return resolve_roles(module, self.model_axes, unmarked, buffers=buffers, unions=self.model_unions)

    def members(self, axes: tuple[str, ...], rank: int | None = None) -> tuple[int, ...]:
        """The ranks of the group over ``axes`` that this rank, or ``rank``, is in."""
        mesh = self.world.mesh
        if mesh is None:
            return tuple(range(self.world.world_size))
        return mesh.members(axes, self.world.rank if rank is None else rank)

    @property
    def replicated_data(self) -> tuple[str, ...]:
        """The data axes that have more than one rank."""
        return self._wide(self.data_axes)

    def prepare(self, needed: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Makes the groups that any rank needs. Called by all ranks; returns their axes, equal on all ranks."""
        needed = {axes for axes in needed | {self.everybody} if axes}
        if self.model_axes:  # the ranks may hold different weights
            needed = {tuple(axes) for rank in self.world.all_gather_object(sorted(needed)) for axes in rank}
        for axes in sorted(needed):
            self.over(axes)
        return sorted(needed)

    @property
    def everybody(self) -> tuple[str, ...]:
        """The axes of the group of all ranks."""
        return self._wide(self.sizes)

    def replicated(self, role: Role) -> tuple[str, ...]:
        """The axes over which a tensor of this role is equal."""
        return self._wide({*self.data_axes, *role.replicated_over})

    def varying(self, role: Role) -> tuple[str, ...]:
        """The model axes over which a tensor of this role is another piece on each rank."""
        return self._wide(set(self.model_axes) - set(role.replicated_over))

    def _wide(self, chosen: Container[str]) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.sizes.items() if axis in chosen and size > 1)

    def route(self, role: Role) -> Route | None:
        """The way of a gradient with this role; None where nothing is sent."""
        axes = self._wide({*self.data_axes, *role.reduced_over})
        averaged = {*self.data_axes, *role.averaged_over}
        scale = 1.0 / self.size([axis for axis in self.sizes if axis in averaged])
        return Route(axes, scale, averaged.issuperset(axes)) if axes else None


class Inventory:
    """Names, parameters, roles and routes, in registration order; a tied parameter appears once.

    Args:
        module: The module.
        communicators: The engine's groups.
        unmarked: What a parameter without a mark is over the model axes.
    """

    def __init__(self, module: nn.Module, communicators: Communicators, unmarked: UnmarkedPolicy) -> None:
        roles = communicators.roles(module, unmarked)
        named = [(name, parameter) for name, parameter in module.named_parameters() if name in roles]
        for name, parameter in named:
            if nn.parameter.is_lazy(parameter):
                raise ValueError(
                    f"parameter {name} has no shape yet (a lazy module), so the ranks cannot start equal. Run one "
                    "forward with a dummy batch on every rank before."
                )
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.roles = [roles[name] for name in self.names]
        self.routes = [communicators.route(role) for role in self.roles]
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self.routed = [i for i, route in enumerate(self.routes) if route is not None]
        self.signature = _signature(self.parameters)
        self._tables, self._entries = _tree(module)
        self._accumulators: dict[int, Any] = {}

    def will_be_used(self, index: int) -> bool:
        """Inside a backward: whether the pass that runs now accumulates a gradient of this parameter."""
        if index not in self._accumulators:
            with torch.enable_grad():
                parameter = self.parameters[index]
                function = parameter.view_as(parameter).grad_fn
            assert function is not None
            # torch keeps one accumulator per parameter alive as long as somebody holds it
            self._accumulators[index] = function.next_functions[0][0]
        answer: bool = torch._C._will_engine_execute_node(self._accumulators[index])
        return answer

    def averages(self, index: int) -> bool:
        """Whether reducing a gradient again changes nothing."""
        route = self.routes[index]
        return route is None or route.averages

    def is_stale(self, module: nn.Module) -> bool:
        """Whether a parameter was added, removed, replaced, reshaped, converted or moved since."""
        now = list(itertools.chain.from_iterable(map(dict.values, self._tables)))
        if len(now) == len(self._entries) and not any(map(operator.is_not, now, self._entries)):
            return _looks(self.parameters) != self.signature[1:]
        self._tables, self._entries = _tree(module)
        return _signature(list(module.parameters())) != self.signature

    def mask(self) -> tuple[bool, ...]:
        """Which parameters are trainable now."""
        return tuple([parameter.requires_grad for parameter in self.parameters])  # a list is quicker

    def prepare(self, communicators: Communicators) -> list[tuple[str, ...]]:
        """Makes all groups that reductions, norms and broadcasts of these parameters need. Called by all ranks."""
        needed = set(self.by_group)
        for role in self.roles:
            needed |= {communicators.replicated(role), communicators.varying(role)}
        return communicators.prepare(needed)

    @cached_property
    def by_group(self) -> Mapping[tuple[str, ...], list[int]]:
        """The routed parameters by the axes of their group."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for i in self.routed:
            route = self.routes[i]
            assert route is not None
            groups.setdefault(route.axes, []).append(i)
        return groups

    def agree(self, communicators: Communicators) -> bool:
        """Compares the inventories over the ranks of every group. Called by all ranks.

        Returns:
            Whether all ranks of the world have the same sequence of routes and sizes, so that the groups' operations
            may be interleaved; otherwise they go out group by group.

        Raises:
            CollectiveMismatchError: on all ranks, naming the first parameter that differs and the ranks.
        """
        data = communicators.replicated_data
        groups: dict[tuple[str, ...], list[TensorEntry]] = {}
        for i, parameter in enumerate(self.parameters):
            route = self.routes[i]
            axes = route.axes if route is not None else data
            if axes:
                entry = TensorEntry.of(self.names[i], parameter, self.roles[i].describe())
                groups.setdefault(axes, []).append(entry)
        if data:
            groups.setdefault(data, [])
        sequence = [
            (route and route.axes, tuple(p.shape)) for route, p in zip(self.routes, self.parameters, strict=True)
        ]
        layout = hashlib.sha256(repr(sequence).encode()).hexdigest()
        by_members = {communicators.members(axes): entries for axes, entries in groups.items()}
        return agree_in_groups(communicators.world, by_members, layout)


def _signature(parameters: Sequence[nn.Parameter]) -> list[list[Any]]:
    return [list(map(id, parameters)), *_looks(parameters)]


def _looks(parameters: Sequence[nn.Parameter]) -> list[list[Any]]:
    return [
        [parameter.shape for parameter in parameters],
        [parameter.dtype for parameter in parameters],
        [parameter.device for parameter in parameters],
    ]


def _tree(module: nn.Module) -> tuple[list[dict[str, Any]], list[Any]]:
    """The tables in which modules keep submodules and parameters, and what is in them: quicker to look through."""
    tables: list[dict[str, Any]] = [t for part in module.modules() for t in (part._modules, part._parameters)]
    return tables, [entry for table in tables for entry in table.values()]
