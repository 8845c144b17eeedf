"""Collectives and a Lightning strategy: one interface, several backends, gradients that are right."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collective_strategy._registration import register_with_lightning

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collective_strategy.checkpoints import CheckpointError as CheckpointError
    from collective_strategy.checkpoints import consolidate as consolidate
    from collective_strategy.checkpoints import load_checkpoint as load_checkpoint
    from collective_strategy.checkpoints import save_checkpoint as save_checkpoint
    from collective_strategy.collectives import Collective as Collective
    from collective_strategy.collectives import SingleProcessCollective as SingleProcessCollective
    from collective_strategy.collectives import TorchDistributedCollective as TorchDistributedCollective
    from collective_strategy.collectives import redistribute as redistribute
    from collective_strategy.collectives import scale_grad as scale_grad
    from collective_strategy.collectives import seed_ranks as seed_ranks
    from collective_strategy.gradients import GradientReducer as GradientReducer
    from collective_strategy.inspection import audit as audit
    from collective_strategy.inspection import explain as explain
    from collective_strategy.inspection import verify as verify
    from collective_strategy.sharing import SharedModule as SharedModule
    from collective_strategy.sharing import private as private
    from collective_strategy.sharing import sharded as sharded
    from collective_strategy.sharing import shared as shared
    from collective_strategy.sharing import unmark as unmark
    from collective_strategy.standalone import init as init
    from collective_strategy.strategies import AuditSharing as AuditSharing
    from collective_strategy.strategies import CollectiveModule as CollectiveModule
    from collective_strategy.strategies import CollectiveStrategy as CollectiveStrategy
    from collective_strategy.strategies import ExplainSharing as ExplainSharing
    from collective_strategy.strategies import VerifyReplicas as VerifyReplicas

# Loaded on first use, so that collectives work without Lightning.
_PLACES = {
    "CheckpointError": "collective_strategy.checkpoints",
    "consolidate": "collective_strategy.checkpoints",
    "load_checkpoint": "collective_strategy.checkpoints",
    "save_checkpoint": "collective_strategy.checkpoints",
    "Collective": "collective_strategy.collectives",
    "SingleProcessCollective": "collective_strategy.collectives",
    "TorchDistributedCollective": "collective_strategy.collectives",
    "GradientReducer": "collective_strategy.gradients",
    "SharedModule": "collective_strategy.sharing",
    "audit": "collective_strategy.inspection",
    "explain": "collective_strategy.inspection",
    "init": "collective_strategy.standalone",
    "private": "collective_strategy.sharing",
    "sharded": "collective_strategy.sharing",
    "shared": "collective_strategy.sharing",
    "unmark": "collective_strategy.sharing",
    "AuditSharing": "collective_strategy.strategies",
    "CollectiveModule": "collective_strategy.strategies",
    "CollectiveStrategy": "collective_strategy.strategies",
    "ExplainSharing": "collective_strategy.strategies",
    "VerifyReplicas": "collective_strategy.strategies",
    "verify": "collective_strategy.inspection",
    "redistribute": "collective_strategy.collectives",
    "scale_grad": "collective_strategy.collectives",
    "seed_ranks": "collective_strategy.collectives",
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_lightning()
