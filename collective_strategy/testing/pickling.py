"""Pickles functions of any kind, closures too, without losing the files that they come from; tensors are the host's."""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
from torch import Tensor

from collective_strategy.collectives.host import host_copy

_reduce_code: Callable[[CodeType], tuple[Any, ...]] = cloudpickle.Pickler.dispatch_table[CodeType]


def dumps(value: Any) -> bytes:
    """The value's bytes; ``cloudpickle.loads`` reads them."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _with_file_name(make: Callable[..., CodeType], arguments: tuple[Any, ...], name: str) -> CodeType:
    return make(*arguments).replace(co_filename=name)


def _reduce_code_with_file_name(code: CodeType) -> tuple[Any, ...]:
    # cloudpickle replaces the name, so that equal functions have equal bytes. Here the name matters: tracebacks and
    # stacks of other processes point to it.
    make, arguments = _reduce_code(code)[:2]
    return _with_file_name, (make, arguments, code.co_filename)


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    # another process need not have the device
    if tensor.device.type not in ("cpu", "meta"):
        tensor = host_copy(tensor).requires_grad_(tensor.requires_grad)
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return reduced


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code_with_file_name, Tensor: _reduce_tensor}, cloudpickle.Pickler.dispatch_table
    )
