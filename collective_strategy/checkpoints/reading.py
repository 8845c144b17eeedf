"""An opened checkpoint: any slice of any of its tensors, read from the files that hold a part of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.layout import Coordinates, Whole
from collective_strategy.checkpoints.manifest import RANDOM, Manifest, file_name
from collective_strategy.checkpoints.optimizers import FOLLOWS
from collective_strategy.checkpoints.storage import current_save
from collective_strategy.sharing.pieces import Place, copy_overlap


class SavedCheckpoint:
    """The checkpoint at ``path``, complete and of a version that this release reads. Reads what is asked for only.

    Raises:
        CheckpointError: see `current_save` and `Manifest.read`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._folder = current_save(path)
        self.manifest = Manifest.read(self._folder)
        self._files: dict[str, Any] = {}

    def weight(self, name: str, whole: Whole, place: Place) -> Tensor:
        """A slice of a weight."""
        return self._assembled(name, whole, place, lambda rank: self._file(rank, "weights").get(name))

    def following(self, optimizer: int, name: str, key: str, whole: Whole, place: Place) -> Tensor:
        """The same slice of an optimizer's tensor that follows the weight."""

        def piece(rank: int) -> Tensor | None:
            found: Tensor | None = self._file(rank, "optimizers")[optimizer].get(name, {}).get(key)
            return found

        return self._assembled(f"{key} of {name} in optimizer {optimizer}", whole, place, piece)

    def state(self, at: Coordinates, weights_only: bool | None = None) -> dict[str, Any]:
        """What the rank at a position wrote beside tensors."""
        rank = self.manifest.writers[at]
        name = file_name(rank, "state")
        if name not in self._files:
            self._files[name] = self._folder.read(name, weights_only)
        state: dict[str, Any] = self._files[name]
        return state

    def shell(self, optimizer: int, at: Coordinates) -> Any:
        """What that rank's optimizer held beside the tensors that follow weights."""
        return self.state(at)["optimizers"][optimizer]

    def random(self) -> list[Any]:
        """The states of the random number generators by rank."""
        states: list[Any] = self._folder.read(RANDOM)
        return states

    def close(self) -> None:
        """Lets go of the files."""
        self._files.clear()

    def _assembled(self, what: str, whole: Whole, place: Place, read: Any) -> Tensor:
        result: Tensor | None = None
        copied = 0
        for piece in whole.pieces:
            if not any(True for _ in piece.place.overlaps(place)) and result is not None:
                continue
            tensor = read(self.manifest.writers[piece.writer])
            if tensor is None:
                raise CheckpointError(
                    f"{self.path} lacks the piece of {what} that rank {self.manifest.writers[piece.writer]} held:"
                    " it had none there. Resume on the mesh it was saved on."
                )
            if tuple(tensor.shape) != piece.place.shape:
                raise CheckpointError(
                    f"{self.path} has a piece of {what} of shape {tuple(tensor.shape)} where the manifest says"
                    f" {piece.place.shape}: it was damaged or changed. Take another checkpoint."
                )
            if result is None:
                result = torch.empty(place.shape, dtype=tensor.dtype)
            copied += copy_overlap(tensor, piece.place, result, place)
        if result is None or copied != result.numel():
            raise CheckpointError(
                f"{self.path} does not cover {what}: {copied} elements of a slice of shape {place.shape} are there. The"
                " manifest was damaged or changed; take another checkpoint."
            )
        return result

    def _file(self, rank: int, kind: str) -> Any:
        name = file_name(rank, kind)
        if name not in self._files:
            if name not in self.manifest.files:
                raise CheckpointError(f"{self.path} has no {name}: it was saved with weights only.")
            self._files[name] = self._folder.read(name)
        return self._files[name]


def filled(values: Mapping[str, Any], read: Any) -> dict[str, Any]:
    """A parameter's optimizer state with the tensors that follow it put back."""
    return {key: read(key) if isinstance(value, str) and value == FOLLOWS else value for key, value in values.items()}
