"""Reading a checkpoint on a mesh: of every tensor what this rank holds here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.layout import (
    Coordinates,
    Entry,
    ModelAxes,
    Whole,
    describe,
    gather_over_model,
    own_place,
    put_together,
)
from collective_strategy.checkpoints.optimizers import FOLLOWS, is_replicated, same
from collective_strategy.checkpoints.random_state import RandomStates
from collective_strategy.checkpoints.reading import SavedCheckpoint, filled
from collective_strategy.checkpoints.saving import OPTIMIZERS, PARAMETERS, WEIGHTS
from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.sharing.pieces import Place
from collective_strategy.sharing.roles import UnmarkedPolicy

log = logging.getLogger("collective_strategy")


def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    collective: Collective,
    *,
    unmarked: UnmarkedPolicy = "private",
    optimizers: bool = True,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """The dict that `save_checkpoint` was given, with the tensors that this rank holds. Called by all ranks.

    The mesh may differ from the one it was saved on: other data sizes always, another size of a model axis where the
    weights are shared or sharded over it. Nothing is loaded into ``module``, which says by its marks and shapes what is
    wanted here.

    Args:
        path: A directory that `save_checkpoint` wrote.
        module, collective, unmarked: As when saving, for the mesh at hand.
        optimizers: Whether to read ``"optimizer_states"``.
        strict: Refuse tensors of the checkpoint that cannot be had on this mesh; otherwise they are left out.
        weights_only: For `torch.load` of what the caller added; tensors are always read with True.

    Returns:
        The caller's keys, ``"state_dict"``, ``"optimizer_states"`` and ``"optimizer_parameters"``: the names of the
        parameters that each state is of, in its order. On another model mesh the caller's keys are those of the first
        model rank.

    Raises:
        CheckpointError: there is none, it is not complete or of another version, or a tensor does not fit; it names
            the tensor, the meshes and what to do.

    Example:
        >>> state = load_checkpoint("run/last.ckpt", model, collective)
        >>> model.load_state_dict(state["state_dict"])
        >>> adam.load_state_dict(state["optimizer_states"][0])
    """
    path = os.fspath(collective.broadcast_object(os.fspath(path)))
    communicators = Communicators(collective)
    axes = ModelAxes.of(collective, communicators)
    entries = describe(module, communicators, unmarked, axes)
    wanted = put_together(gather_over_model(collective, axes, entries), axes)
    saved = SavedCheckpoint(path)
    loading = Loading(saved, entries, wanted, axes, strict, weights_only)
    try:
        result = loading.rest()
        result[WEIGHTS] = loading.weights()
        if optimizers and saved.manifest.optimizers is not None:
            result[OPTIMIZERS] = [loading.optimizer(k) for k in range(saved.manifest.optimizers)]
            result[PARAMETERS] = [loading.parameter_names(k) for k in range(saved.manifest.optimizers)]
        return result
    finally:
        saved.close()


def saved_random_states(path: str | os.PathLike[str], collective: Collective) -> RandomStates | None:
    """The states of this rank's random number generators, None where the mesh is another one. Local."""
    saved = SavedCheckpoint(path)
    mesh = [] if collective.mesh is None else list(collective.mesh.axes.items())
    if saved.manifest.world_size != collective.world_size or list(saved.manifest.mesh.items()) != mesh:
        return None
    states: RandomStates = saved.random()[collective.rank]
    return states


class Loading:
    """One checkpoint, one mesh, one rank."""

    def __init__(
        self,
        saved: SavedCheckpoint,
        entries: Mapping[str, Entry],
        wanted: Mapping[str, Sequence[Whole]],
        axes: ModelAxes,
        strict: bool,
        weights_only: bool | None,
    ) -> None:
        self.saved, self.manifest = saved, saved.manifest
        self.entries, self.wanted, self.axes = entries, wanted, axes
        self.strict, self.weights_only = strict, weights_only
        self.here = dict(zip(axes.sizes, axes.here, strict=True))
        self.same_mesh = self.manifest.model_axes == axes.sizes
        # whose non-tensors count here
        self.at: Coordinates = next(iter(self.manifest.writers))
        if self.same_mesh:  # whose axes may stand in another order
            self.at = tuple(self.here[axis] for axis in self.manifest.model_axes)

    def weights(self) -> dict[str, Any]:
        """This rank's state dict: its pieces of what was saved, tied names included."""
        result: dict[str, Any] = {}
        for name, wholes in self.manifest.weights.items():
            found = self._found(name, wholes)
            if found is not None:
                result[name] = self.saved.weight(name, *found)
        for alias, name in self.manifest.aliases.items():
            if name in result:
                result[alias] = result[name]
        return {**result, **self.saved.state(self.at, self.weights_only)["objects"]}

    def rest(self) -> dict[str, Any]:
        """What is neither weight nor optimizer state; on another mesh, what cannot be cut anew is refused by name."""
        own: dict[str, Any] = dict(self.saved.state(self.at, self.weights_only)["checkpoint"])
        if not self.same_mesh:
            for key, value in own.items():
                self._refuse_pieces(key, value)
        return own

    def optimizer(self, k: int) -> Any:
        """The k-th optimizer's state dict for this rank."""
        shell = self.saved.shell(k, self.at)
        if "whole" in shell:
            if not self.same_mesh:
                raise CheckpointError(
                    f"optimizer {k} has a state dict of its own form, which cannot be taken apart. {self._advice()}"
                )
            return shell["whole"]
        state: dict[Any, Any] = {}
        for index, values in shell["state"].items():
            name = shell["names"][index] if isinstance(index, int) and index < len(shell["names"]) else None
            if not isinstance(values, Mapping) or name is None:
                if not self.same_mesh and not is_replicated(values):
                    raise CheckpointError(
                        f"optimizer {k} holds a state {index!r} that belongs to no parameter of the module."
                        f" {self._advice()}"
                    )
                state[index] = values
                continue
            wholes = self.manifest.weights.get(name, [])
            found = self._found(name, wholes)
            if not self.same_mesh:
                self._refuse_uneven(k, name, values, wholes)
            if found is None and any(isinstance(v, str) and v == FOLLOWS for v in values.values()):
                continue  # its weight is left out, too

            def read(key: str, name: str = name, found: Any = found) -> Tensor:
                return self.saved.following(k, name, key, *found)

            state[index] = filled(values, read)
        return {"state": state, **shell["rest"]}

    def parameter_names(self, k: int) -> list[str | None]:
        """The names of the parameters in the order of the k-th optimizer's state."""
        names: list[str | None] = self.saved.shell(k, self.at).get("names", [])
        return names

    # -- where a tensor is found ---------------------------------------------------------------------------------------

    def _found(self, name: str, wholes: Sequence[Whole]) -> tuple[Whole, Place] | None:
        """Which saved whole this rank needs a slice of, and which slice."""
        entry = self.entries.get(name)
        place = own_place(entry, self.wanted[name], self.axes) if entry is not None else None
        whole = self._whole(name, entry, wholes)
        if whole is None:
            return None
        if place is None or not entry:
            return whole, Place(whole.shape)  # for load_state_dict to refuse, or a hook to use
        if place.whole != whole.shape:
            if place.spans:
                raise CheckpointError(
                    f"{name} has the shape {whole.shape} in the checkpoint {self.saved.path}, but here its pieces make"
                    f" {place.whole} on {_said(self.axes.sizes)}. Build the model with the same sizes, and"
                    " give sharded() the same dim and parts."
                )
            return whole, Place(whole.shape)
        return whole, place

    def _whole(self, name: str, entry: Entry | None, wholes: Sequence[Whole]) -> Whole | None:
        """Which of the tensors of that name is this rank's; None where it is another rank's."""

        def changed(axis: str) -> bool:
            return self.manifest.model_axes.get(axis, 1) != self.axes.sizes.get(axis, 1)

        private_here = any(kind == "private" and changed(axis) for axis, kind in entry.kinds) if entry else False
        private_there = any(changed(axis) for whole in wholes for axis in whole.private)
        if not private_here and not private_there:
            for whole in wholes:
                if all(self.here.get(axis, 0) == position for axis, position in whole.private.items()):
                    return whole
            return None
        if not private_here and self._all_equal(name, wholes):
            return wholes[0]
        if not self.strict:
            log.warning("%s of the checkpoint %s is left out: it is private to a model rank.", name, self.saved.path)
            return None
        raise CheckpointError(
            f"{name} is private to each model rank, so the checkpoint {self.saved.path}, saved on"
            f" {_said(self.manifest.model_axes)}, does not say what it is on {_said(self.axes.sizes)}. {self._advice()}"
            " Or mark the weight shared() or sharded(dim=...) if that is what it is."
        )

    def _all_equal(self, name: str, wholes: Sequence[Whole]) -> bool:
        if len({(whole.shape, whole.dtype) for whole in wholes}) > 1:
            return False
        first, *others = (self.saved.weight(name, whole, Place(whole.shape)) for whole in wholes)
        return all(same(first, other) for other in others)

    # -- what is no piece of a whole -----------------------------------------------------------------------------------

    def _refuse_uneven(self, k: int, name: str, values: Mapping[str, Any], wholes: Sequence[Whole]) -> None:
        """On another mesh one rank's numbers count for all pieces, and other things cannot be cut."""
        pieces = sum(len(whole.pieces) for whole in wholes)
        for key, value in values.items():
            if isinstance(value, str) and value == FOLLOWS:
                continue
            if not is_replicated(value) and pieces != 1:
                raise CheckpointError(
                    f"{key} of {name} in optimizer {k} is neither a number nor a tensor of the weight's shape but a"
                    f" {type(value).__name__}{f' of shape {tuple(value.shape)}' if isinstance(value, Tensor) else ''},"
                    f" so nobody knows how to cut it. {self._advice()}"
                )
            for at, rank in self.manifest.writers.items():
                shell = self.saved.shell(k, at)
                if name not in shell.get("names", ()):
                    continue
                other = shell["state"].get(shell["names"].index(name), {}).get(key)
                if not same(value, other):
                    raise CheckpointError(
                        f"{key} of {name} in optimizer {k} is {_shown(value)} on rank"
                        f" {self.manifest.writers[self.at]} and {_shown(other)} on rank {rank}, so it does not belong"
                        f" to that weight alone, or the ranks did not step alike. {self._advice()}"
                    )

    def _refuse_pieces(self, key: str, value: Any) -> None:
        """Tensors that the caller or a callback has added, and that differ between model ranks, may be pieces."""
        own = _tensors(value)
        for at in self.manifest.writers:
            others = _tensors(self.saved.state(at, self.weights_only)["checkpoint"].get(key))
            for place, tensor in own.items():
                other = others.get(place)
                if tensor.numel() > 1 and (other is None or not same(tensor, other)):
                    raise CheckpointError(
                        f"checkpoint[{key!r}]{place} is a tensor of shape {tuple(tensor.shape)} that differs between"
                        f" the model ranks, and nothing says how its pieces are joined. {self._advice()} Or put it into"
                        " buffers of the module, with marks."
                    )

    def _advice(self) -> str:
        mesh = self.manifest.mesh or {"data": self.manifest.world_size}
        model = {axis: size for axis, size in mesh.items() if axis not in self.manifest.data_axes}
        return f"Resume with the model axes of the checkpoint, {_said(model)}; the data axis may have any size."


def _said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one model rank"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    return str(value) if is_replicated(value) else f"a {type(value).__name__}"


def _tensors(tree: Any) -> dict[str, Tensor]:
    leaves, _ = _pytree.tree_flatten_with_path(tree)
    return {_pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
