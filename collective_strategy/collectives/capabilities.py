"""What a backend does by itself, and what the base class composes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from collective_strategy.collectives.operations import ReduceOp

PRIMITIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "send", "recv")


@dataclass(frozen=True)
class Capabilities:
    """The declaration of a backend.

    Args:
        device_types: Devices whose tensors the primitives take; tensors elsewhere travel over ``collective.device``
            and come back. ``None`` means every device.
        movement_dtypes: What broadcast, all_gather and all_to_all move as it is; other dtypes are moved as bytes.
        reduction_dtypes: Per operation what all_reduce reduces as it is; other dtypes are widened, and where that
            does not help, gathered and reduced on every rank.
        primitives: Names out of `PRIMITIVES` that the backend has of its own.
        timeout: ``"raises"`` where an operation that times out ends in an exception, ``"aborts"`` where the runtime
            can only end the process.
        asynchronous: Whether operations overlap with computation.
        compiles: Whether a program is compiled for every shape, so that host memory travels in lengths that are powers
            of two, and gradients are not packed but reduced by one operation on a list of them.
        packed_bytes: Up to how many bytes of gradients are best packed together: more of them means fewer operations,
            fewer a shorter wait for the last one.
    """

    movement_dtypes: frozenset[torch.dtype]
    reduction_dtypes: Mapping[ReduceOp, frozenset[torch.dtype]]
    device_types: frozenset[str] | None = None
    primitives: frozenset[str] = field(default=frozenset(PRIMITIVES))
    timeout: Literal["raises", "aborts"] = "raises"
    asynchronous: bool = True
    compiles: bool = False
    packed_bytes: int = 4 << 20

    @property
    def composed(self) -> frozenset[str]:
        """Primitives that the base class builds from others for this backend."""
        return frozenset(PRIMITIVES) - self.primitives

    def reduces(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether the backend reduces ``dtype`` with ``op`` as it is."""
        return dtype in self.reduction_dtypes.get(op, frozenset())
