"""A collective without a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from collective_strategy.collectives.checks import CheckMode
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.environment import read_environment
from collective_strategy.collectives.layout import NO_DEFAULT
from collective_strategy.collectives.registry import automatic_backend, collective_class


def init(
    backend: str = "auto",
    *,
    mesh: Mapping[str, int] | None = None,
    unions: Mapping[str, Sequence[str]] | None = None,
    data_axis: str | None = NO_DEFAULT,
    timeout: timedelta | float | None = None,
    check: CheckMode = "auto",
    device: torch.device | str | None = None,
    **backend_options: Any,
) -> Collective:
    """Sets up a collective from the launcher's environment variables. Every process calls it.

    Args:
        backend: A name out of `available_collectives()`, or ``"auto"``: the one that COLLECTIVE_STRATEGY_BACKEND names,
            else Horovod under Horovod's launchers, else torch.
        mesh, unions, data_axis, timeout, check, device: See `Collective`.
        **backend_options: For the backend's constructor; for ``"torch"``: ``backend="gloo"``.

    Returns:
        The collective of all processes, set up; a context manager that tears it down. Without a launcher it is the
        one-process collective.

    Raises:
        ValueError: unknown backend, wrong mesh, or contradictory environment variables.
        RendezvousError: the processes did not find each other.

    Example:
        >>> with collective_strategy.init(mesh={"data": -1}) as collective:
        ...     total = collective.all_reduce(1)
    """
    backend = automatic_backend() if backend == "auto" else backend
    if backend in ("torch", "horovod") and read_environment().source == "single":
        backend, backend_options = "single", {}
    chosen = collective_class(backend)
    collective = chosen(
        mesh=mesh, unions=unions, data_axis=data_axis, timeout=timeout, check=check, device=device, **backend_options
    )
    return collective.setup()
