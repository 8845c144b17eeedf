"""Optimizer states: tensors of a parameter's shape follow the parameter, the rest belongs to its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.sharing.marks import original_path

FOLLOWS = "collective_strategy.follows_parameter"
"""Stands in a shell for a tensor that is kept with the parameters' pieces."""

Following = dict[str, dict[str, Tensor]]


def parameter_names(optimizer: Any, names: Mapping[int, str]) -> list[str | None]:
    """The parameters' names in the order in which the optimizer's state dict counts them; None for a foreign one.

    Args:
        optimizer: An optimizer, or a wrapper with ``param_groups``.
        names: Names by ``id`` of the parameter.
    """
    return [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]


def split(
    state: Any, names: Sequence[str | None], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], Following]:
    """Takes the tensors that follow their parameters out of an optimizer's state dict.

    Args:
        state: What ``optimizer.state_dict()`` gave.
        names: The parameters' names in its order.
        shapes: Shapes by name of this rank's parameters.

    Returns:
        The shell, with marks where tensors were taken, and the tensors by parameter name and key.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return {"whole": state}, {}
    shell: dict[str, Any] = {"names": list(names), "rest": {k: v for k, v in state.items() if k != "state"}}
    following: Following = {}
    shell["state"] = {}
    for index, values in state["state"].items():
        name = names[index] if isinstance(index, int) and index < len(names) else None
        if not isinstance(values, Mapping) or name is None:
            shell["state"][index] = values
            continue
        kept = {}
        for key, value in values.items():
            if isinstance(value, Tensor) and tuple(value.shape) == shapes.get(name):
                following.setdefault(name, {})[key] = value
                kept[key] = FOLLOWS
            else:
                kept[key] = value
        shell["state"][index] = kept
    return shell, following


def is_replicated(value: Any) -> bool:
    """Whether a value that does not follow its parameter may be taken for every piece of it: a number."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, NaN to NaN, through containers."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def names_by_id(module: torch.nn.Module) -> dict[int, str]:
    """First names of the module's parameters."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def plain(optimizer: Any) -> Optimizer:
    """The optimizer that Lightning's wrapper holds."""
    inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner


def refuse_other_parameters(saved: Sequence[str | None], optimizer: Any, module: torch.nn.Module, number: int) -> None:
    """Optimizers know parameters by their place in a list only, so the same weights must be in the same places.

    Raises:
        CheckpointError: naming the first place where the optimizer has another weight.
    """
    here = parameter_names(plain(optimizer), names_by_id(module))
    for place, (one, other) in enumerate(zip_longest(saved, here, fillvalue="nothing")):
        if one is not None and other is not None and original_path(one) != original_path(other):
            raise CheckpointError(
                f"optimizer {number} has {other} at place {place}, where the checkpoint has the state of {one}. Give"
                " the optimizer the same parameters in the same order as when the checkpoint was saved."
            )
