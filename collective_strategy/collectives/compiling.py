"""Where torch.compile meets collectives: a call waits for other ranks, so it runs between compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Method = TypeVar("Method", bound=Callable)

REASON = "collectives wait for other ranks and run between compiled graphs, so fullgraph=True is not possible"


def outside_graphs(method: Method) -> Method:
    """The method, which torch.compile calls as it is and does not look into."""
    disabled: Method = torch.compiler.disable(method, reason=REASON)
    return disabled
