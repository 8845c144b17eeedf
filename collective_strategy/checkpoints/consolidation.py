"""One ordinary state dict out of a checkpoint of several model ranks, in one process that starts no ranks."""

from __future__ import annotations

import os
from typing import Any

from collective_strategy.checkpoints.layout import ModelAxes
from collective_strategy.checkpoints.loading import Loading
from collective_strategy.checkpoints.reading import SavedCheckpoint
from collective_strategy.checkpoints.saving import OPTIMIZERS, WEIGHTS
from collective_strategy.checkpoints.storage import write_file


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    optimizers: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """The state dict of the whole model, which the same model built in one process loads. Needs no ranks.

    Args:
        path: A checkpoint directory.
        out: A file to write, an ordinary checkpoint with all that the directory has (the caller's keys are those of the
            first model rank): for `torch.load`, ``load_from_checkpoint`` and ``ckpt_path`` of any strategy.
        optimizers: Whether ``out`` gets the optimizer states.
        weights_only: For `torch.load` of what is not a weight.

    Raises:
        CheckpointError: a weight is private to its model rank, so that there is no whole; it is named. Or an
            optimizer's state cannot be joined; ``optimizers=False`` leaves them out.

    Example:
        >>> model.load_state_dict(consolidate("run/last.ckpt"))
    """
    saved = SavedCheckpoint(path)
    loading = Loading(saved, {}, {}, ModelAxes.one(), strict=True, weights_only=weights_only)
    try:
        weights = loading.weights()
        if out is not None:
            checkpoint = {**loading.rest(), WEIGHTS: weights}
            if optimizers and saved.manifest.optimizers is not None:
                checkpoint[OPTIMIZERS] = [loading.optimizer(k) for k in range(saved.manifest.optimizers)]
            write_file(checkpoint, os.fspath(out))
        return weights
    finally:
        saved.close()
