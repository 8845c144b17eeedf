"""A call between its arguments and its result, and the region in which it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from collective_strategy.collectives.checks import Verify


@dataclass
class Plan:
    """A call whose arguments were accepted: what it says to the other ranks, and how it is carried out."""

    run: Callable[[], Any]
    call: str
    details: str = ""
    verify: Verify | None = None
    nbytes: int = 0


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A region without autocast, which would change dtypes on the way (and refuses to join float64 tensors)."""
    kinds = (kind for kind in {"cpu", device.type} if torch.amp.is_autocast_available(kind))
    active = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    if not active:
        return nullcontext()
    stack = ExitStack()
    for kind in active:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
