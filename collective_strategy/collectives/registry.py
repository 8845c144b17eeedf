"""Collectives by name: built in, registered, or published by another package."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.horovod_environment import is_horovod_job
from collective_strategy.collectives.xla_runtime import is_tpu_host

ENTRY_POINT_GROUP = "collective_strategy.collectives"
BACKEND_VARIABLE = "COLLECTIVE_STRATEGY_BACKEND"


def _torch() -> type[Collective]:
    from collective_strategy.collectives.torch_distributed import TorchDistributedCollective

    return TorchDistributedCollective


def _single() -> type[Collective]:
    from collective_strategy.collectives.single import SingleProcessCollective

    return SingleProcessCollective


def _horovod() -> type[Collective]:
    from collective_strategy.collectives.horovod import HorovodCollective
    from collective_strategy.collectives.horovod_runtime import require_horovod

    require_horovod()
    return HorovodCollective


def _xla() -> type[Collective]:
    from collective_strategy.collectives.xla import XLACollective

    return XLACollective


_registry: dict[str, Callable[[], type[Collective]]] = {
    "torch": _torch,
    "single": _single,
    "horovod": _horovod,
    "xla": _xla,
}


def register_collective(name: str, collective: type[Collective], *, overwrite: bool = False) -> None:
    """Makes a backend known by name.

    Args:
        name: Lower-case.
        collective: A concrete subclass of `Collective`.
        overwrite: Replace a known one.

    Raises:
        TypeError, ValueError: no such class, or the name is taken.
    """
    if not (isinstance(collective, type) and issubclass(collective, Collective)):
        raise TypeError(f"{collective!r} is not a subclass of Collective.")
    if name != name.lower() or not name:
        raise ValueError(f"backend names are lower-case, got {name!r}.")
    if name in available_collectives() and not overwrite:
        raise ValueError(f"the backend {name!r} is registered already; give overwrite=True to replace it.")
    _registry[name] = lambda: collective


def available_collectives() -> list[str]:
    """Known names, sorted; entry points of the group ``collective_strategy.collectives`` included."""
    return sorted({*_registry, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def automatic_backend() -> str:
    """The backend that ``"auto"`` means here.

    The one that the environment variable COLLECTIVE_STRATEGY_BACKEND names; else ``"horovod"`` under Horovod's
    launchers; else ``"xla"`` where torch_xla finds TPU chips; else ``"torch"``.
    """
    named = os.environ.get(BACKEND_VARIABLE)
    if named:
        return named
    return "horovod" if is_horovod_job(os.environ) else "xla" if is_tpu_host() else "torch"


def collective_class(name: str) -> type[Collective]:
    """The class of a name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
        ImportError: the backend's library is not installed.
    """
    if name in _registry:
        return _registry[name]()
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            loaded = point.load()
            if not (isinstance(loaded, type) and issubclass(loaded, Collective)):
                raise TypeError(
                    f"the entry point {point.value!r} for backend {name!r} is not a subclass of Collective."
                )
            return loaded
    raise ValueError(f"unknown backend {name!r}; known: {', '.join(available_collectives())}.")


def create_collective(name: str, **settings: Any) -> Collective:
    """A collective of the named backend, not set up. ``settings`` go to its constructor."""
    return collective_class(name)(**settings)
