"""Writing a checkpoint of all model ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.folders import folder
from collective_strategy.checkpoints.layout import (
    Coordinates,
    Entry,
    ModelAxes,
    Whole,
    describe,
    entry_of,
    gather_over_model,
    put_together,
)
from collective_strategy.checkpoints.manifest import MANIFEST, RANDOM, Manifest, file_name
from collective_strategy.checkpoints.optimizers import Following, names_by_id, parameter_names, plain, split
from collective_strategy.checkpoints.random_state import random_states
from collective_strategy.checkpoints.storage import Saving
from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.host import host_copy
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.sharing.roles import UnmarkedPolicy

T = TypeVar("T")
WEIGHTS, OPTIMIZERS, PARAMETERS = "state_dict", "optimizer_states", "optimizer_parameters"


def save_checkpoint(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    collective: Collective,
    *,
    optimizers: Sequence[Any] = (),
    unmarked: UnmarkedPolicy = "private",
) -> None:
    """Saves what all ranks hold as one checkpoint, a directory that is complete or not there. Called by all ranks.

    As `torch.save` of a dict, over a mesh. What is equal over the data axis, or shared over a model axis, is written
    once, by the first rank that holds it. Of sharded weights the pieces are written, with their place in the whole.
    Tensors of the optimizers with a parameter's shape are kept like the parameter. Everything else in ``checkpoint`` is
    written by each model rank. The states of the random number generators of all ranks are added.

    Nothing is written before all ranks have agreed that all can, and the checkpoint that was at ``path`` stays what it
    is until the new one is complete on the disk.

    Args:
        path: Where; rank 0's counts. A URL that fsspec knows is possible.
        checkpoint: A dict. ``"state_dict"`` holds this rank's `Module.state_dict`, ``"optimizer_states"`` the list of
            its `Optimizer.state_dict`; the other keys are the caller's. The same keys on all ranks.
        module: The module whose marks say what is shared and what is sharded.
        collective: All ranks.
        optimizers: Those whose states ``checkpoint`` has, in the same order.
        unmarked: What a weight without a mark is on the model axes.

    Raises:
        CheckpointError: on all ranks; nothing has changed at ``path``. It says which rank failed and why: a mark that
            contradicts the tensors, a disk that is full, a file that is in the way.

    Example:
        >>> state = {"state_dict": model.state_dict(), "optimizer_states": [adam.state_dict()], "epoch": 3}
        >>> save_checkpoint("run/last.ckpt", state, model, collective, optimizers=[adam])
    """
    # named, so that a time-out says what it is that not all ranks do
    collective.barrier("save_checkpoint")
    where: str = collective.broadcast_object(os.fspath(path))
    communicators = Communicators(collective)
    axes = ModelAxes.of(collective, communicators)
    what = f"Saving the checkpoint {where}"

    content = together(collective, what, lambda: prepare(checkpoint, module, optimizers, communicators, unmarked, axes))
    gathered = gather_over_model(collective, axes, (content.entries, content.following_keys))
    random = collective.gather_object(random_states(collective), dst=0)

    def begin() -> Saving | None:
        content.wholes = put_together({at: entries for at, (entries, _) in gathered.items()}, axes)
        _refuse_lost_states({at: keys for at, (_, keys) in gathered.items()}, content)
        if collective.rank != 0:
            return None
        saving = Saving(where)
        saving.begin()
        return saving

    saving = together(collective, what, begin)
    try:
        place: str = collective.broadcast_object(saving.place if saving is not None else None)
        written = together(collective, what, lambda: _write(content, place, axes, collective.rank))
        sizes = collective.gather_object(written, dst=0)

        def commit() -> None:
            if saving is None:
                return
            assert random is not None
            assert sizes is not None
            files = {name: size for each in sizes for name, size in each.items()}
            _finish(saving, content, files, random, collective, communicators, axes)

        together(collective, what, commit)
    except BaseException:
        if saving is not None:
            saving.give_up()
        raise


def together(collective: Collective, what: str, action: Callable[[], T]) -> T:
    """Runs ``action``, which communicates nothing, on every rank, and returns what it gave here if it worked on all.

    Raises:
        CheckpointError: on all ranks, when it failed on some.
    """
    value: T
    problem: str | None = None
    cause: Exception | None = None
    try:
        value = action()
    except Exception as error:
        cause = error
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    failed: dict[str, list[int]] = {}
    for rank, text in enumerate(collective.all_gather_object(problem)):
        if text is not None:
            failed.setdefault(text, []).append(collective.ranks[rank])
    if failed:
        told = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in failed.items())
        raise CheckpointError(f"{what} failed; what was there before is unchanged. {told}") from cause
    return value


@dataclass
class Content:
    """What this rank contributes."""

    entries: dict[str, Entry]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    objects: dict[str, Any]
    shells: list[Any] | None
    following: list[Following]
    rest: dict[str, Any]
    wholes: dict[str, list[Whole]] = field(default_factory=dict)

    @property
    def following_keys(self) -> list[dict[str, tuple[str, ...]]]:
        """Which tensors follow which parameter, by optimizer."""
        return [{name: tuple(sorted(values)) for name, values in each.items()} for each in self.following]


def prepare(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    optimizers: Sequence[Any],
    communicators: Communicators,
    unmarked: UnmarkedPolicy,
    axes: ModelAxes,
) -> Content:
    """Sorts a checkpoint dict into what can be put together over the ranks and what cannot. Local."""
    known = describe(module, communicators, unmarked, axes)
    first_names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    everywhere = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first = {name: first_names[id(tensor)] for name, tensor in everywhere}
    content = Content({}, {}, {}, {}, None, [], {k: v for k, v in checkpoint.items() if k not in (WEIGHTS, OPTIMIZERS)})
    for name, value in checkpoint.get(WEIGHTS, {}).items():
        if not isinstance(value, Tensor):
            content.objects[name] = value
            continue
        if hasattr(value, "placements"):
            raise CheckpointError(
                f"{name} is a DTensor, which knows its pieces by itself. Save models of DTensors with"
                " torch.distributed.checkpoint."
            )
        entry = known.get(name)
        if entry is None or entry.shape != tuple(value.shape):  # a hook has put it there, or changed it
            entry = entry_of(name, value, None, axes)
        twin = content.tensors.get(first.get(name, name))
        if twin is not None and twin is not value and _same_memory(twin, value):
            content.aliases[name] = first[name]
            continue
        content.tensors[name] = value
        dtype = str(value.dtype).removeprefix("torch.")
        content.entries[name] = Entry(entry.shape, dtype, entry.kinds, entry.cuts)
    if OPTIMIZERS in checkpoint:
        states = checkpoint[OPTIMIZERS]
        if len(states) != len(optimizers):
            raise CheckpointError(
                f"The checkpoint has the states of {len(states)} optimizers, but {len(optimizers)} optimizers were"
                " given. Give those whose states they are, in the same order."
            )
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        content.shells = []
        for state, optimizer in zip(states, optimizers, strict=True):
            shell, following = split(state, parameter_names(plain(optimizer), names_by_id(module)), shapes)
            content.shells.append(shell)
            content.following.append(following)
    return content


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.device == other.device
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _refuse_lost_states(keys: Mapping[Coordinates, Sequence[Mapping[str, tuple[str, ...]]]], content: Content) -> None:
    """A shared weight's optimizer tensors are written by its first rank, which must have them if others do."""
    for at, by_optimizer in keys.items():
        for k, following in enumerate(by_optimizer):
            for name, own in following.items():
                writer = next((p.writer for whole in content.wholes.get(name, ()) for p in whole.pieces), at)
                entry = content.entries.get(name)
                shared = entry is not None and bool(entry.kinds) and all(kind == "shared" for _, kind in entry.kinds)
                there = keys[writer][k].get(name) if k < len(keys[writer]) else None
                if shared and there != own:
                    raise CheckpointError(
                        f"optimizer {k} holds {list(own)} for the shared weight {name} on one model rank and"
                        f" {list(there or ())} on another, so its copies do not train alike. Give all model ranks the"
                        " same optimizers."
                    )


def _write(content: Content, place: str, axes: ModelAxes, rank: int) -> dict[str, int]:
    """Writes this rank's files; their sizes by name."""
    if not axes.is_writer:
        return {}
    target = folder(place)
    target.make()
    own = {
        name
        for name, wholes in content.wholes.items()
        if any(piece.writer == axes.here for whole in wholes for piece in whole.pieces)
    }
    data: dict[str, Any] = {"weights": {name: _saved(content.tensors[name]) for name in own if name in content.tensors}}
    if content.shells is not None:
        data["optimizers"] = [
            {
                name: {key: _saved(value) for key, value in values.items()}
                for name, values in each.items()
                if name in own or name not in content.wholes
            }
            for each in content.following
        ]
    rest = {"checkpoint": content.rest, "objects": content.objects, "optimizers": content.shells}
    data["state"] = _pytree.tree_map_only(Tensor, _saved, rest)
    return {file_name(rank, kind): target.write(file_name(rank, kind), value) for kind, value in data.items()}


def _saved(tensor: Tensor) -> Tensor:
    """On the CPU; alone in its memory, because torch.save writes all of the memory that a tensor looks at."""
    if tensor.device.type != "cpu":
        return host_copy(tensor)
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _finish(
    saving: Saving,
    content: Content,
    files: dict[str, int],
    random: Sequence[Any],
    collective: Collective,
    communicators: Communicators,
    axes: ModelAxes,
) -> None:
    """What rank 0 adds when all have written, and the step that makes the save count."""
    place = folder(saving.place)
    for name, size in files.items():
        if place.size(name) != size:
            raise CheckpointError(
                f"rank 0 does not see the file {name} of {size} bytes in {saving.place}. All ranks must write to one"
                " file system that they share."
            )
    files[RANDOM] = place.write(RANDOM, list(random))
    mesh = collective.mesh
    manifest = Manifest(
        world_size=collective.world_size,
        mesh={} if mesh is None else dict(mesh.axes),
        data_axes=list(communicators.data_axes),
        model_axes=axes.sizes,
        writers=axes.writers,
        weights=content.wholes,
        aliases=content.aliases,
        optimizers=None if content.shells is None else len(content.shells),
        files=files,
        versions={"collective_strategy": _version(), "torch": str(torch.__version__)},
    )
    place.write_text(MANIFEST, manifest.dumps())
    saving.commit()


def _version() -> str:
    import collective_strategy

    return collective_strategy.__version__
