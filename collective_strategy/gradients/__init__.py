"""Gradient reduction over a collective: torch only, no Trainer.

A plain PyTorch loop uses :class:`GradientReducer` as the strategy does; it may import
:mod:`collective_strategy.collectives` and :mod:`collective_strategy.sharing`, and nothing above.
"""

from collective_strategy.gradients.fingerprint import agree, parameter_entries
from collective_strategy.gradients.plan import BucketSizes
from collective_strategy.gradients.reducer import GradientReducer
from collective_strategy.gradients.replicas import broadcast_replicas

__all__ = ["BucketSizes", "GradientReducer", "agree", "broadcast_replicas", "parameter_entries"]
