"""Gradient reduction over a collective: torch only, no Trainer.

A plain PyTorch loop uses :class:`GradientReducer` as the strategy does; it may import
:mod:`collective_strategy.collectives` and nothing above.
"""

from collective_strategy.gradients.fingerprint import agree, parameter_entries
from collective_strategy.gradients.reducer import GradientReducer

__all__ = ["GradientReducer", "agree", "parameter_entries"]
