"""A name for the graph that torch_xla has recorded, so that no other graph's program is run in its place.

torch_xla finds the program of a graph by a hash in which equal nodes are one: ``norm(a) + norm(b)`` beside ``norm(c)``
has the hash of ``norm(a)`` beside ``norm(b) + norm(c)``, if the three have one shape. The second then gets the first
one's values, without a word (https://github.com/pytorch/xla/issues/8353). What the hash lacks is which node each
operation uses. That is recorded here, and put into the graph as a constant, which is hashed.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collective_strategy.collectives.xla_runtime import import_xla

_XLA = torch._C.DispatchKey.XLA
_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ZeroTensor
)
Operation = tuple[str, list[int], list[int]]  # a name, and numbers of tensors that it uses and makes
_MARK = "_recorded_as"


class _Mark:
    """The number of a tensor's value, kept in the tensor: gone with it, or with that value.

    A weak reference to the tensor itself would be unsafe: torch may free it in another thread at that moment.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class GraphRecorder(TorchDispatchMode):
    """Records which tensors each operation on XLA's tensors uses, from one cut of the graph to the next.

    Active for the device of the thread that enters it, there and in backward passes. What operations do beside that,
    such as shapes and settings, is in torch_xla's hash already; numbers that a graph takes as data are in neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device = import_xla()[0].device()
        self._known: dict[Any, tuple[str, bool]] = {}
        self._paused = False
        self.forget()

    def __enter__(self) -> GraphRecorder:
        _recorders[self._device] = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        del _recorders[self._device]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = kwargs.get("device") if kwargs else None
        if device is not None and device.type == "xla" and not _on_xla(args):
            with _as_above():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        made = _on_xla(result)
        if not made or self._paused:
            return result
        given = _on_xla(args)
        if kwargs:
            given += _on_xla(tuple(kwargs.values()))
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = (func._schema.name, func._schema.is_mutable)
        name, changes = known
        self.record(name, given, made, given if changes else ())
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing meanwhile."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def record(self, name: str, given: Iterable[Tensor], made: Iterable[Tensor], changed: Iterable[Tensor]) -> None:
        """An operation that used, made and overwrote these."""
        if self._paused:
            return
        inputs = [self._number(tensor) for tensor in given]
        outputs = [self._new_number(tensor) for tensor in (*made, *changed)]
        self._operations.append((name, inputs, outputs))

    def forget(self) -> None:
        """What comes belongs to another graph."""
        self._operations: list[Operation] = []
        self._marks: list[weakref.ref[_Mark]] = []

    def tag(self) -> Tensor | None:
        """A constant that tells the recorded graph from others; None if nothing of it is needed any more.

        It belongs to the graph as long as it is held. Ranks with the same graph get the same one.
        """
        text = self._canonical()
        if not text:
            return None
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return torch.arange(value, value + 1, device=self._device)

    def _canonical(self) -> str:
        """The operations on which living tensors depend, the tensors numbered in order of appearance."""
        needed = {number for number, mark in enumerate(self._marks) if mark() is not None}
        results, kept = set(needed), []
        for operation in reversed(self._operations):
            if not needed.isdisjoint(operation[2]):
                needed.update(operation[1])
                kept.append(operation)
        names: dict[int, int] = {}
        lines = []
        for name, inputs, outputs in reversed(kept):
            used = [names.setdefault(number, len(names)) for number in inputs]
            made = [(names.setdefault(number, len(names)), number in results) for number in outputs]
            lines.append(f"{name}{used}{made}")
        return "\n".join(lines)

    def _number(self, tensor: Tensor) -> int:
        mark: _Mark | None = tensor.__dict__.get(_MARK)
        if mark is None or mark.number >= len(self._marks) or self._marks[mark.number]() is not mark:
            return self._new_number(tensor)
        return mark.number

    def _new_number(self, tensor: Tensor) -> int:
        mark = _Mark(len(self._marks))
        tensor.__dict__[_MARK] = mark
        self._marks.append(weakref.ref(mark))
        return mark.number


# By device and not by thread: autograd runs the backward of a rank in a thread that belongs to the device.
_recorders: dict[torch.device, GraphRecorder] = {}


def active_recorder() -> GraphRecorder | None:
    """That of the calling thread's device."""
    return _recorders.get(import_xla()[0].device()) if _recorders else None


@contextmanager
def own_program(cut: Callable[[], None]) -> Iterator[None]:
    """What is traced within becomes one program, which is taken for no other.

    Args:
        cut: Ends a graph.
    """
    if active_recorder() is not None:  # all programs are
        yield
        return
    cut()
    with GraphRecorder() as recorder:
        yield
        tag = recorder.tag()
    cut()
    del tag


def as_torch_xla_sees_it() -> AbstractContextManager[None]:
    """The graph traced within gets no name: one that communicates, of a kind that torch_xla takes for no other.

    Ranks need the same program for it, though functionalization may make views again on some of them only.
    """
    recorder = active_recorder()
    return nullcontext() if recorder is None else recorder.paused()


def inner(value: Any) -> list[Tensor]:
    """The tensors in an argument or result of torch_xla's own functions, as the recorder sees them."""
    return [
        torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor
        for tensor in _on_xla(value)
    ]


@contextmanager
def _as_above() -> Iterator[None]:
    """Calls what a mode stands below too: what comes onto the device is wrapped there, for functionalization."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _ABOVE):
        yield


def _on_xla(value: Any) -> list[Tensor]:
    """The tensors on XLA's devices in an argument or result."""
    if isinstance(value, Tensor):
        # and not value.device, which asks the modes above
        return [value] if torch._C._dispatch_keys(value).has(_XLA) else []
    found = []
    if isinstance(value, (list, tuple)):
        for part in value:
            found += _on_xla(part)
    return found
