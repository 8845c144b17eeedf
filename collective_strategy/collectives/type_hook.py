"""What the type checker of the package spmd_types is told about the differentiable pairs. It stays optional.

Its checker (`spmd_types.checker.typecheck`) finds the static method ``spmd_typecheck`` of an autograd Function by name.
The types are those of `OPERATIONS`; nothing is imported before somebody has entered the checker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from collective_strategy.collectives.operations import OPERATIONS, SpmdType

GRADIENT_TYPE: dict[SpmdType, SpmdType] = {
    "replicate": "partial",
    "partial": "replicate",
    "invariant": "invariant",
    "varying": "varying",
}
"""The type of the gradient of a value of a type."""


def is_checked() -> bool:
    """Whether the calling code runs under the checker."""
    spmd_types = sys.modules.get("spmd_types")
    return spmd_types is not None and spmd_types.is_type_checking()


def unchecked() -> AbstractContextManager[None]:
    """A region whose calls are none of the checker's business, because a hook has said what they mean."""
    return sys.modules["spmd_types"].no_typecheck() if is_checked() else nullcontext()


Types = tuple[SpmdType, SpmdType]
"""Of the input and of the output."""


def types_of(name: str) -> Types:
    """The types of an operation: ``"all_gather(to='replicate')"``, ``"permute"``."""
    operation, _, argument = name.partition("(")
    choice = argument.split("'")[1] if argument else ""
    row = next(pair for row in OPERATIONS if row.name == operation for word, pair in row.pairs if word == choice)
    return row.source, row.destination


def types_of_gradient(name: str) -> Types:
    """The types of the gradient of an operation."""
    source, destination = types_of(name)
    return GRADIENT_TYPE[destination], GRADIENT_TYPE[source]


def type_hook(types: Types) -> Callable[..., None]:
    """The hook of a Function ``f(x, collective, ...)`` of these types."""
    source, destination = types

    def spmd_typecheck(outputs: Tensor, *, x: Tensor, collective: Any) -> None:
        import spmd_types as spmd

        letter = {"replicate": spmd.R, "invariant": spmd.I, "varying": spmd.V, "partial": spmd.P}
        axis = spmd.MeshAxis.of(*_size_and_stride(collective.ranks))
        if source == "partial" and spmd.maybe_get_axis_local_type(x, axis) is spmd.V:
            spmd.rules.ignore(x)  # varying values may be read as the parts of a sum; x itself stays varying
        else:
            spmd.assert_type(x, {axis: letter[source]})
        spmd.assert_local_type_like(outputs, x, {axis: letter[destination]})

    return spmd_typecheck


def same_type(outputs: Tensor, *, x: Tensor) -> None:
    """The hook of a Function that nothing is sent by."""
    import spmd_types as spmd

    spmd.rules.ignore(x)
    spmd.assert_local_type_like(outputs, x)


def _size_and_stride(ranks: tuple[int, ...]) -> tuple[int, int]:
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if ranks != tuple(range(ranks[0], ranks[0] + stride * len(ranks), stride)):
        raise NotImplementedError(f"the type checker needs ranks at equal distances, got {list(ranks)}.")
    return len(ranks), stride
