"""torchmetrics reduce over the data axis, through the collective."""

from typing import Any

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective


class MetricConnection:
    """Gives every ``torchmetrics.Metric`` of a module the data axis to reduce over, and takes it back.

    torchmetrics talks to ``torch.distributed``'s world by itself, which is wrong with model-parallel ranks (they would
    be counted several times) and empty on other backends. A metric for which the user chose a function or a process
    group is left alone.
    """

    def __init__(self, module: nn.Module, collective: Collective) -> None:
        self._undo: list[tuple[Any, Any]] = []
        gather = DataAxisGather(collective)
        metrics: list[Any] = [part for part in module.modules() if _is_metric(part)]
        for metric in metrics:
            if metric.dist_sync_fn is not None or metric.process_group is not None:
                continue
            self._undo.append((metric, metric.distributed_available_fn))
            metric.dist_sync_fn = gather
            metric.distributed_available_fn = gather.is_available

    def close(self) -> None:
        """Restores what torchmetrics had. Local, idempotent."""
        for metric, available in self._undo:
            metric.dist_sync_fn = None
            metric.distributed_available_fn = available
        self._undo.clear()


class DataAxisGather:
    """``dist_sync_fn`` of torchmetrics: the tensors of all data ranks, which may differ in shape.

    Copies of a metric share it; a pickled one arrives without a live group.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        collective = self._collective
        shapes = collective.all_gather_object((tuple(tensor.shape), str(tensor.dtype)))
        if all(other == shapes[0] for other in shapes):
            return list(collective.all_gather(tensor.detach()))
        # a rank without data has torchmetrics' empty stand-in, of any dtype and shape (0,)
        filled = [(shape, dtype) for shape, dtype in shapes if torch.Size(shape).numel()]
        if filled and not tensor.numel():
            tensor = tensor.to(getattr(torch, filled[0][1].removeprefix("torch.")))
        sizes = [torch.Size(shape).numel() for shape, _ in shapes]
        pieces = collective.all_gather(tensor.detach().reshape(-1), ragged=True, sizes=sizes)
        rest = filled[0][0][1:] if filled else ()
        return [
            piece.reshape(shape if piece.numel() else (0, *rest))
            for piece, (shape, _) in zip(pieces, shapes, strict=True)
        ]

    def is_available(self) -> bool:
        return self._collective.is_set_up and self._collective.broken is None and self._collective.world_size > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataAxisGather":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unconnected, ()


def _unconnected() -> None:
    """What a pickled connection becomes: torchmetrics' default."""


def _is_metric(module: nn.Module) -> bool:
    try:
        from torchmetrics import Metric
    except ImportError:
        return False
    return isinstance(module, Metric)
