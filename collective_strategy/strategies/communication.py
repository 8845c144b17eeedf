"""What Lightning asks a strategy to communicate, and what happens to it after an error."""

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from collective_strategy.collectives.collective import Collective
from collective_strategy.strategies.names import LightningNames

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object

log = logging.getLogger("collective_strategy")


class CommunicationBehaviour(_ParallelStrategy):
    """Decisions, objects and barriers concern all ranks; values of samples concern the data axis.

    After an exception on this rank nothing is communicated any more: another rank is perhaps in some other
    operation, and the user's exception must come out first. Lightning's own calls then return this rank's value.
    """

    names: ClassVar[LightningNames]
    collective: Collective
    _stopped: str | None = None
    _told: bool = False

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The reduction over the data axis on every rank; the mean of integers is floating.

        Args:
            tensor: left unchanged; what is not a tensor is returned as it is.
            group: another collective or the name of an axis, instead of the data axis.
            reduce_op: ``"mean"`` (``"avg"``), ``"sum"``, ``"max"``, ``"min"``, ``"prod"`` or a
                ``torch.distributed.ReduceOp``.
        """
        if not isinstance(tensor, Tensor) or not self._can_communicate("reduce"):
            return tensor
        return self._group(group).reduce(tensor.detach(), operation_name(reduce_op))

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``(world_size of the data axis, *tensor.shape)``, with one rank too.

        Args:
            tensor: of one shape on all ranks. For other shapes use ``self.collective.data.all_gather(x, ragged=True)``.
            group: as in :meth:`reduce`. Lightning's default, the world group of torch.distributed, means the data axis.
            sync_grads: differentiable; backward sums the gradients of all ranks' copies.
        """
        gathered: Tensor = self._group(group).all_gather(tensor if sync_grads else tensor.detach())
        return gathered

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object on every rank of the world; before set-up, as with DDP, the own one."""
        return self.collective.broadcast_object(obj, src) if self._can_communicate("broadcast") else obj

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks of the world; ``name`` appears when one is missing. Before set-up it returns at once."""
        if self._can_communicate(f"barrier {name!r}"):
            self.collective.barrier(name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or with ``all=False`` any rank of the world decided True."""
        if not self._can_communicate("reduce_boolean_decision"):
            return bool(decision)
        return self.collective.all(bool(decision)) if all else self.collective.any(bool(decision))

    def stop_communicating(self, reason: str) -> None:
        """The error path: marks the collective unusable on this rank. Local, idempotent."""
        if self._stopped is None:
            self._stopped = reason
            if self.collective.is_set_up:
                self.collective.abort(reason)

    def _can_communicate(self, what: str) -> bool:
        module = self.lightning_module
        trainer = module.__dict__.get("_trainer") if module is not None else None
        interrupted = trainer is not None and trainer.state.status == self.names.TrainerStatus.INTERRUPTED
        if interrupted and self._stopped is None:
            self.stop_communicating("an exception was raised on this rank")
        if self._stopped is not None:
            if not self._told and self.collective.world_size > 1:
                self._told = True
                log.warning(
                    "%s (and what follows) is skipped on rank %d, because %s; the others may not take part.",
                    what,
                    self.global_rank,
                    self._stopped,
                )
            return False
        return self.collective.is_set_up

    def _group(self, group: Any) -> Collective:
        if isinstance(group, Collective):
            return group
        if isinstance(group, str):
            return self.collective[group]
        if group is None or group is _torch_world():
            return self.collective.data
        raise TypeError(
            f"group={group!r} is not a group of this strategy. Give one of its collectives, such as"
            " self.collective['model'], or the name of an axis; without a group it is the data axis."
        )


def operation_name(op: Any) -> str:
    """Lightning's and torch's spellings of a reduction in ours.

    Raises:
        ValueError: an unknown spelling; the collective lists the known ones.
    """
    if op is None:
        return "mean"
    if isinstance(op, str):
        return {"avg": "mean", "product": "prod"}.get(op.lower(), op.lower())
    if torch.distributed.is_available():
        ops = torch.distributed.ReduceOp
        for native, name in (
            (ops.SUM, "sum"),
            (ops.AVG, "mean"),
            (ops.MAX, "max"),
            (ops.MIN, "min"),
            (ops.PRODUCT, "prod"),
        ):
            if op == native:
                return name
    return str(op)


def _torch_world() -> Any:
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None
