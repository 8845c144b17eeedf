"""``manifest.json``: which tensors a checkpoint has, how they are cut, and which file holds which piece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.folders import Folder
from collective_strategy.checkpoints.layout import Coordinates, Piece, Whole
from collective_strategy.sharing.pieces import Place

MANIFEST = "manifest.json"
KINDS = ("weights", "optimizers", "state")
RANDOM = "random.pt"


def file_name(rank: int, kind: str) -> str:
    """The file that a rank writes: ``"weights"``, ``"optimizers"`` (tensors) or ``"state"`` (all else)."""
    return f"rank-{rank}.{kind}.pt"


@dataclass
class Manifest:
    """The table of contents of one save.

    Attributes:
        mesh: The mesh it was saved on, sizes by axis; empty without one.
        data_axes: Those of its axes over which everything is equal.
        model_axes: The other axes that had more than one rank.
        writers: Global rank by position on ``model_axes``.
        weights: The wholes by name.
        aliases: Second names of tied weights.
        optimizers: How many there are; None in a checkpoint of weights only.
        files: Sizes in bytes by name.
        versions: What wrote it, for people.
    """

    world_size: int
    mesh: dict[str, int]
    data_axes: list[str]
    model_axes: dict[str, int]
    writers: dict[Coordinates, int]
    weights: dict[str, list[Whole]]
    aliases: dict[str, str]
    optimizers: int | None
    files: dict[str, int]
    versions: dict[str, str] = field(default_factory=dict)

    def dumps(self) -> str:
        """The text of the file, one line per tensor."""
        head: dict[str, Any] = {
            "written_by": self.versions,
            "world_size": self.world_size,
            "mesh": list(self.mesh.items()),
            "data_axes": self.data_axes,
            "model_axes": list(self.model_axes.items()),
            "writers": [[list(at), rank] for at, rank in self.writers.items()],
            "optimizers": self.optimizers,
            "aliases": self.aliases,
            "files": self.files,
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        tensors = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps([_encoded(whole) for whole in wholes])}"
            for name, wholes in self.weights.items()
        )
        lines.append(f' "weights": {{\n{tensors}\n }}' if tensors else ' "weights": {}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """The manifest of a save, whose files are all there.

        Raises:
            CheckpointError: it cannot be read, or files are missing or cut off.
        """
        text = folder.read_text(MANIFEST)
        if text is None:
            raise CheckpointError(
                f"{folder.path} has no {MANIFEST}. Every rank must see the whole checkpoint directory: copy all of it,"
                " or put it on a file system that all machines share."
            )
        try:
            raw = json.loads(text)
            manifest = cls(
                raw["world_size"],
                dict(raw["mesh"]),
                raw["data_axes"],
                dict(raw["model_axes"]),
                {tuple(at): rank for at, rank in raw["writers"]},
                {name: [_decoded(whole) for whole in wholes] for name, wholes in raw["weights"].items()},
                raw["aliases"],
                raw["optimizers"],
                raw["files"],
                raw["written_by"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder.path}/{MANIFEST} cannot be read ({type(error).__name__}: {error}); it was damaged or changed."
                " Take another checkpoint."
            ) from error
        for name, size in manifest.files.items():
            found = folder.size(name)
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise CheckpointError(
                    f"{folder.path}/{name} {state}. Every rank must see the whole checkpoint directory: copy all of it,"
                    " or put it on a file system that all machines share."
                )
        return manifest


def _encoded(whole: Whole) -> dict[str, Any]:
    pieces = [
        [list(piece.writer), [[dim, [list(run) for run in runs]] for dim, runs in piece.place.spans.items()]]
        for piece in whole.pieces
    ]
    result: dict[str, Any] = {"dtype": whole.dtype, "shape": list(whole.shape), "pieces": pieces}
    if whole.private:
        result["private"] = dict(whole.private)
    if whole.copies:
        result["copies"] = True
    return result


def _decoded(raw: Mapping[str, Any]) -> Whole:
    shape = tuple(raw["shape"])
    pieces = tuple(
        Piece(tuple(at), Place(shape, {dim: tuple((start, length) for start, length in runs) for dim, runs in spans}))
        for at, spans in raw["pieces"]
    )
    return Whole(raw["dtype"], shape, raw.get("private", {}), pieces, raw.get("copies", False))
