"""One process: the general rules at world size 1, without any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from collective_strategy.collectives.capabilities import Capabilities
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.environment import LaunchEnvironment
from collective_strategy.collectives.errors import EnvironmentConfigError
from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.collectives.layout import Partition
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.side_channel import SideChannel


class _Everything(frozenset):
    """A set that holds whatever is asked for."""

    def __contains__(self, item: object) -> bool:
        return True


class SingleProcessCollective(Collective):
    """A collective of one rank. Shapes, dtypes and errors are those of any backend with one rank."""

    backend_name: ClassVar[str] = "single"
    _CAPABILITIES = Capabilities(
        movement_dtypes=_Everything(),
        reduction_dtypes={op: _Everything() for op in ReduceOp},
        primitives=frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier"}),
        asynchronous=False,
    )

    @property
    def capabilities(self) -> Capabilities:
        return self._CAPABILITIES

    def _open(self, environment: LaunchEnvironment, settings: str) -> SideChannel | None:
        if environment.world_size != 1:
            raise EnvironmentConfigError(
                f"the launcher ({environment.source}) started {environment.world_size} processes, but the "
                f"one-process collective "
                "was asked for; each would work alone. Use 'torch', or start one process."
            )
        return None

    def _close(self) -> None:
        pass

    def _new_group(self, ranks: tuple[int, ...], partition: Partition, scope: str) -> Any:
        return None

    def _barrier(self) -> Handle:
        return CompletedHandle(_nothing())

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        return CompletedHandle(x)

    def _broadcast(self, x: Tensor, src: int) -> Handle:
        return CompletedHandle(x)

    def _all_gather(self, x: Tensor) -> Handle:
        return CompletedHandle(x.clone().unsqueeze(0))

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        return CompletedHandle(x[0])

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        return CompletedHandle(x.clone())


def _nothing() -> Tensor:
    return torch.empty(0)
