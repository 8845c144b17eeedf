"""Containers of tensors: taking them apart in an order all ranks share, and putting results back in their place.

Dicts are matched by key, whatever the order of insertion; lists, tuples, named tuples, dataclasses (frozen ones too)
and every type registered with torch's pytree keep their type. Python numbers are leaves: int becomes int64, float
float64, bool bool, complex complex128, as 0-dim tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Rebuild = Callable[[Iterator[Any]], Any]

_OBJECT_METHODS = {
    "all_gather": "all_gather_object",
    "gather": "gather_object",
    "broadcast": "broadcast_object",
    "scatter": "scatter_object",
}


@dataclasses.dataclass
class Tree:
    """A container taken apart.

    Attributes:
        leaves: The tensors, in an order that is equal on ranks with equal structure.
        paths: Where each leaf lies, for messages: ``"x['a'][0]"``.
        python_numbers: Which leaves were Python numbers.
        structure: The container's shape as text, equal on ranks with equal structure.
    """

    leaves: list[Tensor]
    paths: list[str]
    python_numbers: list[bool]
    structure: str
    _rebuild: Rebuild

    @classmethod
    def of(cls, value: object, operation: str) -> Tree:
        """Takes ``value`` apart.

        Raises:
            TypeError: a leaf is neither a tensor nor a number; the message says where it lies and which method
                communicates objects.
        """
        tree = cls([], [], [], "", _next)
        tree.structure, tree._rebuild = tree._flatten(value, "x", operation)
        return tree

    def map(self, function: Callable[..., Any], settings: Sequence[tuple[Any, ...]] | None = None) -> Any:
        """The container with ``function(leaf, *settings_of_leaf)`` in the place of each leaf."""
        settings = settings or [()] * len(self.leaves)
        return self.rebuild([function(leaf, *own) for leaf, own in zip(self.leaves, settings, strict=True)])

    def named(self) -> Iterator[tuple[Tensor, str]]:
        """Each leaf with its path."""
        return zip(self.leaves, self.paths, strict=True)

    def rebuild(self, values: list[Any]) -> Any:
        """The container with ``values`` in the place of the leaves."""
        return self._rebuild(iter(values))

    def describe(self, shapes: bool = True) -> str:
        """Structure, dtypes and shapes as text; ``shapes=False`` tells the number of dims only."""
        leaves = ", ".join(describe_tensor(leaf, shapes) for leaf in self.leaves)
        return leaves if self.structure == "*" else f"{self.structure} with {leaves or 'no leaves'}"

    def _flatten(self, value: object, path: str, operation: str) -> tuple[str, Rebuild]:
        if isinstance(value, Tensor):
            return self._leaf(value, path, operation, python_number=False)
        if isinstance(value, numbers.Complex):  # not Number: a Decimal is one, and no dtype holds it
            return self._leaf(_number(value, path), path, operation, python_number=True)
        if isinstance(value, Mapping) and isinstance(value, dict):
            return self._flatten_dict(value, path, operation)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            make = type(value)
            return self._flatten_children(
                make.__name__,
                [(f".{name}", getattr(value, name)) for name in value._fields],
                path,
                operation,
                lambda children: make(*children),
            )
        if isinstance(value, list):
            return self._flatten_children(
                "list" if type(value) is list else type(value).__name__,
                [(f"[{index}]", child) for index, child in enumerate(value)],
                path,
                operation,
                lambda children: _refilled(value, children),
            )
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            kind = type(value)
            return self._flatten_children(
                kind.__name__,
                [(f"[{index}]", child) for index, child in enumerate(value)],
                path,
                operation,
                lambda children: kind(children),
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            return self._flatten_children(
                type(value).__name__,
                [(f".{name}", getattr(value, name)) for name in names],
                path,
                operation,
                lambda children: _replaced(value, names, children),
            )
        node = pytree.SUPPORTED_NODES.get(type(value))
        if node is not None:
            parts, context = node.flatten_fn(value)
            return self._flatten_children(
                f"{type(value).__name__}",
                [(f"<{index}>", child) for index, child in enumerate(parts)],
                path,
                operation,
                lambda children: node.unflatten_fn(children, context),
            )
        raise TypeError(_unsupported(value, path, operation))

    def _flatten_dict(self, value: dict[Any, Any], path: str, operation: str) -> tuple[str, Rebuild]:
        keys = sorted(value, key=lambda key: (type(key).__name__, repr(key)))

        def make(children: list[Any]) -> Any:
            result = copy.copy(value)  # keeps subclass, default factory and insertion order
            for key, child in zip(keys, children, strict=True):
                result[key] = child
            return result

        kind = "dict" if type(value) is dict else type(value).__name__
        return self._flatten_children(kind, [(f"[{key!r}]", value[key]) for key in keys], path, operation, make)

    def _flatten_children(
        self,
        kind: str,
        children: list[tuple[str, Any]],
        path: str,
        operation: str,
        make: Callable[[list[Any]], Any],
    ) -> tuple[str, Rebuild]:
        parts = [(step, *self._flatten(child, path + step, operation)) for step, child in children]
        structure = ", ".join(f"{step}: {text}" if kind not in ("list", "tuple") else text for step, text, _ in parts)
        rebuilds = [rebuild for _, _, rebuild in parts]
        return f"{kind}({structure})", lambda values: make([rebuild(values) for rebuild in rebuilds])

    def _leaf(self, tensor: Tensor, path: str, operation: str, *, python_number: bool) -> tuple[str, Rebuild]:
        refuse_layout(tensor, path, operation)
        self.leaves.append(tensor)
        self.paths.append(path)
        self.python_numbers.append(python_number)
        return "*", _next


def describe_tensor(tensor: Tensor, shapes: bool = True) -> str:
    """dtype and shape as text, ``float32[2, 3]``; without shapes ``float32, 2 dims``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}" if shapes else f"{dtype}, {tensor.ndim} dims"


def refuse_layout(tensor: Tensor, path: str, operation: str) -> None:
    """Refuses tensors that have no ordinary memory to send."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{operation}: {path} has layout {tensor.layout}. Collectives take strided tensors: call .to_dense() "
            "first, or communicate its indices and values."
        )
    if tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"{operation}: {path} is a nested or quantized tensor. Communicate its parts one by one.")
    if tensor.device.type == "meta":
        raise TypeError(f"{operation}: {path} is on the meta device and has no values to send.")


def _next(values: Iterator[Any]) -> Any:
    return next(values)


def _number(value: object, path: str) -> Tensor:
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool)
    if isinstance(value, numbers.Integral):
        if not -(2**63) <= int(value) < 2**63:
            raise ValueError(f"{path} is {value}, which does not fit into int64. Communicate it as an object.")
        return torch.tensor(int(value), dtype=torch.int64)
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64)
    assert isinstance(value, numbers.Complex)
    return torch.tensor(complex(value), dtype=torch.complex128)


def _refilled(value: list[Any], children: list[Any]) -> list[Any]:
    if type(value) is list:
        return children
    result = copy.copy(value)
    result[:] = children
    return result


def _replaced(value: Any, names: list[str], children: list[Any]) -> Any:
    result = copy.copy(value)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(result, name, child)  # frozen dataclasses refuse the ordinary assignment
    return result


def _unsupported(value: object, path: str, operation: str) -> str:
    method = _OBJECT_METHODS.get(operation)
    hint = (
        f"Use {method}() for strings, None and other objects"
        if method
        else "Only tensors and numbers can be reduced or exchanged"
    )
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if hasattr(value, "__array__"):
        hint = f"Convert it to a tensor, for example by torch.as_tensor({path})"
    leave = "" if path == "x" else ", or leave it out of the container"
    return (
        f"{operation}: {path} is {shown} of type {type(value).__name__}, which is neither a tensor, a number nor a "
        f"known container, so every rank would keep its own value. {hint}{leave}."
    )
