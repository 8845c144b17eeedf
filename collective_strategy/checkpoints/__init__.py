"""Checkpoints of a model that several ranks hold together: torch only, no Trainer.

May import :mod:`collective_strategy.collectives`, :mod:`collective_strategy.sharing` and
:mod:`collective_strategy.gradients`. Under the Trainer the strategy calls these functions.
"""

from collective_strategy.checkpoints.consolidation import consolidate
from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.loading import load_checkpoint
from collective_strategy.checkpoints.saving import save_checkpoint
from collective_strategy.checkpoints.storage import is_checkpoint, remove_checkpoint

__all__ = [
    "CheckpointError",
    "consolidate",
    "is_checkpoint",
    "load_checkpoint",
    "remove_checkpoint",
    "save_checkpoint",
]
