"""Pickles functions of any kind, closures too, without losing the files that they come from."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

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


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code_with_file_name}, cloudpickle.Pickler.dispatch_table
    )
