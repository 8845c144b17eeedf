"""Which tensors must be equal over which axes: parameters, buffers, optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collective_strategy.gradients.inventory import Communicators
from collective_strategy.gradients.replicas import write_values
from collective_strategy.sharing.roles import UnmarkedPolicy


@dataclass(frozen=True)
class Replica:
    """One tensor of this rank, and the axes over which it is a copy.

    Attributes:
        name: Qualified name; of an optimizer state ``"optimizer 0: decoder.weight.exp_avg"``.
        kind: ``"parameter"``, ``"buffer"`` or ``"optimizer state"``.
        tensor: The values. A number of an optimizer is a tensor made from it.
        axes: In mesh order, those with more than one rank; never empty.
        write: Puts other values in its place.
    """

    name: str
    kind: str
    tensor: Tensor
    axes: tuple[str, ...]
    write: Callable[[Tensor], None]


def replicas_of(
    module: nn.Module,
    communicators: Communicators,
    unmarked: UnmarkedPolicy = "private",
    *,
    buffers: bool = True,
    optimizers: Iterable[Optimizer] = (),
) -> list[Replica]:
    """What of this rank's state has copies on other ranks. Local.

    Raises:
        ValueError: a parameter has no shape yet (a lazy module), or a mark is wrong.
    """
    roles = communicators.roles(module, unmarked)
    axes = {name: communicators.replicated(role) for name, role in roles.items()}
    found: list[Replica] = []
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name} has no shape yet (a lazy module), so there is nothing to compare. Run one forward "
                "with a dummy batch on every rank before."
            )
        names[id(parameter)] = name
        found.append(Replica(name, "parameter", parameter, axes[name], _copies_into(parameter)))
    if buffers:
        buffer_roles = communicators.roles(module, unmarked, buffers=True)
        for name, buffer in module.named_buffers():
            where = communicators.replicated(buffer_roles[name])
            found.append(Replica(name, "buffer", buffer, where, _copies_into(buffer)))
    for number, optimizer in enumerate(optimizers):
        found.extend(_optimizer_replicas(number, optimizer, names, axes, communicators.replicated_data))
    return [replica for replica in found if replica.axes]


def _optimizer_replicas(
    number: int,
    optimizer: Optimizer,
    names: dict[int, str],
    axes: dict[str, tuple[str, ...]],
    data: tuple[str, ...],
) -> Iterator[Replica]:
    """States of a parameter's shape and numbers follow the parameter; what else there is is equal over data ranks."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            name = f"optimizer {number}: {key} of group {index}"
            if isinstance(value, Tensor):  # a learning rate may be one
                yield Replica(name, "optimizer state", value, data, _copies_into(value))
            elif _is_number(value):
                yield Replica(name, "optimizer state", _as_tensor(value), data, _sets(group, key))
        for place, parameter in enumerate(group["params"]):
            owner = names.get(id(parameter), f"parameter {place} of group {index}")
            state = optimizer.state.get(parameter, {})
            for key, value in sorted(state.items()):
                name = f"optimizer {number}: {owner}.{key}"
                if isinstance(value, (list, tuple)):  # LBFGS keeps vectors of all weights together
                    for i, item in enumerate(value):
                        if isinstance(item, Tensor):
                            yield Replica(f"{name}[{i}]", "optimizer state", item, data, _copies_into(item))
                elif isinstance(value, Tensor):
                    follows = value.shape == parameter.shape or value.dim() == 0
                    where = axes.get(owner, data) if follows else data
                    yield Replica(name, "optimizer state", value, where, _copies_into(value))
                elif _is_number(value):
                    where = axes.get(owner, data)
                    yield Replica(name, "optimizer state", _as_tensor(value), where, _sets(state, key))


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and not (isinstance(value, int) and abs(value) >= 1 << 63)


def _as_tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _copies_into(tensor: Tensor) -> Callable[[Tensor], None]:
    def write(value: Tensor) -> None:
        with torch.no_grad():
            write_values(tensor, value)

    return write


def _sets(mapping: Any, key: str) -> Callable[[Tensor], None]:
    def write(value: Tensor) -> None:
        mapping[key] = value.item()

    return write
