"""``python -m collective_strategy.checkpoints show PATH`` and ``... consolidate PATH OUT``."""

from __future__ import annotations

import argparse
import sys

from collective_strategy.checkpoints.consolidation import consolidate
from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.reading import SavedCheckpoint


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m collective_strategy.checkpoints", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what a checkpoint directory holds")
    show.add_argument("path")
    join = commands.add_parser("consolidate", help="write one ordinary checkpoint file")
    join.add_argument("path")
    join.add_argument("out")
    join.add_argument("--no-optimizers", action="store_true", help="leave the optimizer states out")
    join.add_argument(
        "--trusted",
        action="store_true",
        help="read objects of any class, which runs code from the checkpoint (torch.load with weights_only=False)",
    )
    given = parser.parse_args(arguments)
    try:
        if given.command == "show":
            print(described(SavedCheckpoint(given.path)))
        else:
            consolidate(
                given.path,
                given.out,
                optimizers=not given.no_optimizers,
                weights_only=False if given.trusted else None,
            )
            print(f"wrote {given.out}")
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def described(saved: SavedCheckpoint) -> str:
    """The mesh, and a line per tensor: name, dtype, shape and which rank holds what."""
    manifest = saved.manifest
    lines = [
        f"{saved.path}: {manifest.world_size} ranks, mesh {manifest.mesh or 'none'},"
        f" {manifest.optimizers or 0} optimizers"
    ]
    for name, wholes in manifest.weights.items():
        for whole in wholes:
            where = "".join(f" {axis}={k}" for axis, k in whole.private.items())
            pieces = ", ".join(f"rank {manifest.writers[p.writer]} {list(p.place.shape)}" for p in whole.pieces)
            lines.append(f"  {name}{where}  {whole.dtype} {list(whole.shape)}  {pieces}")
    lines += [f"  {alias}  is {name}" for alias, name in manifest.aliases.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
