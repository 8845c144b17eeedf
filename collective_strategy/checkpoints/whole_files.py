"""An ordinary checkpoint, of a model in one piece, cut for the ranks of a mesh."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.layout import ModelAxes, describe, gather_over_model, own_place, put_together
from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.sharing.pieces import Place, copy_overlap
from collective_strategy.sharing.roles import UnmarkedPolicy

log = logging.getLogger("collective_strategy")


class WholeCheckpoint:
    """Cuts tensors of the whole model into what this rank holds. Made by all ranks together; cutting is local.

    Args:
        what: What is being read, for messages.
        module, collective, unmarked: As for `load_checkpoint`.
        strict: Refuse weights that are private to a model rank, which a checkpoint in one piece does not know.
    """

    def __init__(
        self, what: str, module: nn.Module, collective: Collective, unmarked: UnmarkedPolicy, strict: bool = True
    ) -> None:
        communicators = Communicators(collective)
        self._axes = ModelAxes.of(collective, communicators)
        self._entries = describe(module, communicators, unmarked, self._axes)
        self._wanted = put_together(gather_over_model(collective, self._axes, self._entries), self._axes)
        self._what, self._strict = what, strict

    def state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A module's."""
        result: dict[str, Any] = {}
        for name, value in state.items():
            entry = self._entries.get(name)
            if isinstance(value, Tensor) and entry is not None:
                if any(kind == "private" for _, kind in entry.kinds):
                    if self._strict:
                        raise CheckpointError(
                            f"{name} is private to each of the {len(self._axes.writers)} model ranks, but {self._what}"
                            " was saved in one piece and has one value of it. Mark it shared() or sharded(dim=...), or"
                            " set strict_loading=False to start without it."
                        )
                    log.warning("%s of %s is left out: it is private to each model rank.", name, self._what)
                    continue
                value = self._cut(name, value)
            result[name] = value
        return result

    def optimizer_state(self, state: Any, names: Sequence[str | None]) -> Any:
        """An optimizer's; ``names`` are those of its parameters in its order."""
        if not isinstance(state, Mapping) or "state" not in state:
            return state
        cut: dict[Any, Any] = {}
        for index, values in state["state"].items():
            name = names[index] if isinstance(index, int) and index < len(names) else None
            if name is None or name not in self._entries or not isinstance(values, Mapping):
                cut[index] = values
                continue
            cut[index] = {key: self._cut_following(name, key, value) for key, value in values.items()}
        return {**state, "state": cut}

    def _cut_following(self, name: str, key: str, value: Any) -> Any:
        place = self._place(name)
        if isinstance(value, Tensor) and tuple(value.shape) == place.whole:
            return self._cut(name, value)
        if not place.spans or not isinstance(value, (Tensor, list, dict)):
            return value
        if isinstance(value, Tensor) and value.numel() == 1:
            return value
        raise CheckpointError(
            f"{key} of {name} in {self._what} is neither a number nor a tensor of the weight's shape, so nobody knows"
            f" how to cut it for {len(self._axes.writers)} model ranks. Load the weights only."
        )

    def _place(self, name: str) -> Place:
        place = own_place(self._entries[name], self._wanted[name], self._axes)
        assert place is not None
        return place

    def _cut(self, name: str, value: Tensor) -> Tensor:
        place = self._place(name)
        if not place.spans:
            return value
        if tuple(value.shape) != place.whole:
            held = " It may be one rank's piece." if tuple(value.shape) == place.shape else ""
            raise CheckpointError(
                f"{name} has the shape {tuple(value.shape)} in {self._what}, but the pieces of"
                f" {len(self._axes.writers)} model ranks make {place.whole}.{held} Give a checkpoint of the whole"
                " model, or one that several model ranks saved."
            )
        result = torch.empty(place.shape, dtype=value.dtype)
        copy_overlap(value, Place(place.whole), result, place)
        return result
