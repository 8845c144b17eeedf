"""Several XLA:CPU devices in one process, a thread for each: real collectives on any computer.

XLA:CPU has no processes that reach each other, but its devices within a process do. torch_xla was not written for
threads that compile at the same time, so six conditions hold here. Without the last one results can be wrong; without
any other one there is a deadlock or an abort:

1. Executions that wait inside a collective occupy a thread of XLA's pool each: it has more threads than devices.
2. Replicas that compile the same graph at the same time get two programs, which never meet: compiling is done by one
   thread at a time, and the others then find its program.
3. A thread waits for its own device before it takes that turn, and never while it has it.
4. No buffers are donated to a program: their release would wait for it, in that turn.
5. Each device has a tensor that lives: without one, torch_xla waits for device 0 instead.
6. Each graph is told apart from those that torch_xla takes for the same, see ``xla_programs``: the threads share its
   programs, and ranks that use layers in different orders would run each other's.

And reading a value compiles too, so the graph is cut before. On TPUs, with one process per chip, the first five are not
needed and nothing here runs.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from collective_strategy.collectives.errors import CollectiveStateError
from collective_strategy.collectives.xla_programs import GraphRecorder, active_recorder, inner
from collective_strategy.collectives.xla_runtime import TOKEN_VARIABLE, as_replica, import_xla

T = TypeVar("T")
DEVICES_VARIABLE = "CPU_NUM_DEVICES"
_COMMUNICATING = re.compile("_xla_.*(all_reduce|all_gather|reduce_scatter|all_to_all|permute|send|recv).*")
_CUTTING = "_xla_step_marker"
_COMPILING = (_CUTTING, "_xla_sync_multi", "_xla_warm_up_cache", "_xla_get_cpu_tensors")


def cpu_environment(devices: int) -> dict[str, str]:
    """The variables that must be set before torch_xla's runtime starts."""
    return {
        "PJRT_DEVICE": "CPU",
        DEVICES_VARIABLE: str(devices),
        "XLA_THREAD_POOL_SIZE": str(max(8, 4 * devices)),
        "XLA_ENABLE_PARAM_ALIASING": "0",
        TOKEN_VARIABLE: "1",
    }


def run_on_cpu_devices(devices: int, function: Callable[[int], T]) -> list[T]:
    """Calls ``function(rank)`` in one thread per XLA:CPU device of this process, at the same time.

    A thread that raises leaves the others waiting; XLA ends the process 15 s after one of them waits in a collective.

    Args:
        devices: How many; fixed for a process at its first use of XLA.
        function: Called in every thread.

    Returns:
        The results in rank order.

    Raises:
        CollectiveStateError: torch_xla's runtime runs with another number of devices already, or on another kind.
    """
    os.environ.update(cpu_environment(devices))
    torch_xla, _, runtime = import_xla()
    from torch_xla._internal import pjrt

    if runtime.device_type() != "CPU" or runtime.addressable_device_count() != devices:
        raise CollectiveStateError(
            f"{devices} XLA:CPU devices were asked for, but torch_xla's runtime runs on "
            f"{runtime.addressable_device_count()} {runtime.device_type()} device(s) in this process, which cannot be "
            "changed any more. Ask for them before anything uses XLA, or in a process of its own."
        )
    with _one_compiles_at_a_time(torch_xla):

        def in_thread() -> T:
            alive = torch.zeros(1).to(torch_xla.device())
            with as_replica(), GraphRecorder(), _CutBeforeReading(torch_xla):
                result = function(runtime.global_ordinal())
            del alive
            return result

        results: dict[int, T] = pjrt._run_thread_per_device(0, 1, in_thread, pjrt.initialize_multiprocess)
    return [results[rank] for rank in range(devices)]


@contextmanager
def _one_compiles_at_a_time(torch_xla: Any) -> Iterator[None]:
    extension = torch_xla._XLAC
    xla_model = import_xla()[1]
    wait = extension._xla_wait_device_ops
    communicating = [name for name in dir(extension) if _COMMUNICATING.fullmatch(name)]
    originals = {name: getattr(extension, name) for name in (*_COMPILING, *communicating)}
    turn = threading.RLock()

    def own_device() -> str:
        name: str = xla_model._xla_real_device(torch_xla.device())
        return name

    def wait_for_own(devices: Any = ()) -> None:
        wait(devices=[own_device()])  # without names it waits for the other threads' devices too

    def in_turn(original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_and_start(*args: Any, **settings: Any) -> Any:
            waits = settings.pop("wait", None)
            wait_for_own()
            recorder = active_recorder()
            tag = None if recorder is None else recorder.tag()
            with turn:
                result = original(*args, **settings, **({} if waits is None else {"wait": False}))
            del tag
            if recorder is not None:
                recorder.forget()
            if waits:
                wait_for_own()
            return result

        return compile_and_start

    def after_a_cut(original: Callable[..., Any]) -> Callable[..., Any]:
        """For functions that compile a part of the graph, in which there is no tag: nothing is left to compile."""

        def cut_first(*args: Any, **settings: Any) -> Any:
            torch_xla.sync()
            return original(*args, **settings)

        return cut_first

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **settings: Any) -> Any:
            recorder = active_recorder()
            given = inner(args)
            result = original(*args, **settings)
            if recorder is not None:
                recorder.record(original.__name__, given, inner(result), inner(args))
            return result

        return record

    for name, original in originals.items():
        changed = in_turn(original) if name in _COMPILING else recorded(original)
        setattr(extension, name, changed if name in (_CUTTING, *communicating) else after_a_cut(changed))
    extension._xla_wait_device_ops = wait_for_own
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(extension, name, original)
        extension._xla_wait_device_ops = wait


_READING = {
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "allclose", "unique",
        "__bool__", "__float__", "__int__", "__index__", "__complex__", "__repr__", "__str__", "__format__",
        "__contains__", "__array__", "__reduce_ex__", "__deepcopy__",
    )
    if hasattr(Tensor, name)
} | {torch.equal, torch.allclose, torch.nonzero, torch.is_nonzero, torch.unique, torch.masked_select}  # fmt: skip


class _CutBeforeReading(TorchFunctionMode):
    """Cuts the graph before a value is read, which would otherwise compile out of turn."""

    def __init__(self, torch_xla: Any) -> None:
        super().__init__()
        self._torch_xla = torch_xla

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = None
        if func in _READING:
            read = args[0] if args else None
        elif func is Tensor.copy_:
            read = args[1] if not _on_xla(args[0]) else None
        elif func is Tensor.to and any(_leaves_xla(value) for value in (*args[1:], *kwargs.values())):
            read = args[0]
        if _on_xla(read):
            self._torch_xla.sync()
        return func(*args, **kwargs)


def _on_xla(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "xla"


def _leaves_xla(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type != "xla"
    return isinstance(value, (str, torch.device)) and torch.device(value).type != "xla"
