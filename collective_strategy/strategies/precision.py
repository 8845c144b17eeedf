"""Gradient clipping and loss scaling through the reducer, where ranks hold different weights."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from collective_strategy.gradients.reducer import GradientReducer


class PrecisionConnection:
    """Lets Lightning's precision plugin see the whole model's norm, and all ranks' non-finite gradients.

    Lightning clips and scales with what this process holds. Over the data axis that is right, because gradients are
    equal there; over a model axis each rank would take another factor, and skip another step. The plugin's methods are
    replaced on the instance, so that the Trainer's settings and ``self.clip_gradients`` both come here.
    """

    def __init__(self, plugin: Any, reducer: GradientReducer) -> None:
        self._plugin = plugin
        self._reducer = reducer
        self._scaler = getattr(plugin, "scaler", None)
        if not reducer.holds_pieces:
            return
        plugin.clip_grad_by_norm = self._clip
        if self._scaler is not None:
            self._unscale = self._scaler.unscale_
            self._scaler.unscale_ = self._unscale_and_share

    def close(self) -> None:
        """Gives the plugin its own methods back."""
        self._plugin.__dict__.pop("clip_grad_by_norm", None)
        if self._scaler is not None:
            self._scaler.__dict__.pop("unscale_", None)

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        if clip_val > 0:
            self._reducer.clip_grad_norm_(clip_val, list(self._plugin.main_params(optimizer)))

    def _unscale_and_share(self, optimizer: Optimizer) -> None:
        self._unscale(optimizer)
        self._reducer.share_found_inf(self._scaler, optimizer)
