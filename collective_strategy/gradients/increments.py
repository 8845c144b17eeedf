"""Which part of every ``.grad`` is reduced already, so that each increment is reduced exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.gradients.guard import StepGuard
from collective_strategy.gradients.inventory import Inventory


@dataclass
class _Parts:
    """What a ``.grad`` consists of: ``reduced`` is equal on all ranks, ``local`` is this rank's own.

    ``version`` tells whether the sum was changed in place since.
    """

    reduced: Tensor
    local: Tensor
    version: int


class Increments:
    """Takes the reduced part out of the gradients before a backward, and puts it back after. Local.

    Remembered with the tensor that was in ``.grad``: a gradient that was dropped, replaced or made by the user is a
    fresh one.
    """

    def __init__(self) -> None:
        # by the parameter's id; without parts, all of the gradient is reduced
        self._shown: dict[int, tuple[TensorWeakRef, _Parts | None]] = {}
        # by index, where others are not shown instead; all of them reduced, and in memory that is kept anyway
        self._kept: Mapping[int, Tensor] = {}
        self._kept_by: Inventory | None = None

    def _find(self, inventory: Inventory, i: int, gradient: Tensor) -> tuple[bool, _Parts | None]:
        """Whether a ``.grad`` is what was shown, and its parts."""
        if self._kept.get(i) is gradient and self._kept_by is inventory:
            return True, None
        reference, parts = self._shown.get(id(inventory.parameters[i]), (None, None))
        return reference is not None and reference() is gradient, parts

    def inseparable(self, inventory: Inventory, guard: StepGuard) -> str:
        """A parameter whose reduced gradient a backward behind our back went on top of, if averaging is no cure."""
        for i in sorted(guard.dirty):
            gradient = inventory.parameters[i].grad
            if gradient is not None and not inventory.averages(i) and self._find(inventory, i, gradient)[0]:
                return inventory.names[i]
        return ""

    def set_aside(self, inventory: Inventory, guard: StepGuard) -> dict[int, Tensor]:
        """Takes the reduced part out of every ``.grad``, by index, and leaves the local part there."""
        gradients = [(i, g) for i in inventory.routed if (g := inventory.parameters[i].grad) is not None]
        if len(gradients) < len(inventory.routed):
            guard.keep(i for i, _ in gradients)
        dirty = guard.dirty
        apart: list[tuple[int, Tensor, Tensor | None]] = []
        for i, gradient in gradients:
            known, parts = self._find(inventory, i, gradient)
            if not known or i in dirty:
                # A backward behind our back may have gone on top; what is not known to be reduced counts as fresh.
                continue
            if parts is None:
                apart.append((i, gradient, None))
            elif gradient._version == parts.version:
                # not gradient - local, which each rank would round differently
                apart.append((i, parts.reduced, parts.local))
            elif not inventory.averages(i) and bool(gradient.any()):
                raise CollectiveError(
                    f"The gradient of {inventory.names[i]} was changed in place (clipped, unscaled) while a part of it "
                    "was only local, and what is local cannot be told from the sum over a model axis any more. Reduce "
                    "before changing gradients: reducer.reduce_gradients()."
                )
            # else all of it counts as fresh: averaging the reduced part once more changes nothing
        self._shown, self._kept = {}, {}
        for i, _, local in apart:
            inventory.parameters[i].grad = local
        return {i: reduced for i, reduced, _ in apart}

    def keep_local(self, inventory: Inventory, guard: StepGuard, aside: Mapping[int, Tensor]) -> None:
        """Shows the sum to the user, and remembers which part of it is still local."""
        for i in inventory.routed:
            parameter = inventory.parameters[i]
            local = parameter.grad
            if local is not None:
                guard.pending.add(i)
            if i not in aside:
                continue
            if local is None:
                parameter.grad = aside[i]
                self._shown[id(parameter)] = TensorWeakRef(aside[i]), None
            else:
                both = aside[i] + local
                parameter.grad = both
                self._shown[id(parameter)] = TensorWeakRef(both), _Parts(aside[i], local, both._version)

    def show(self, inventory: Inventory, reduced: Mapping[int, Tensor]) -> None:
        """Puts gradients that are reduced as a whole where the user finds them."""
        self.remember(inventory, reduced)
        self.place(inventory, reduced)

    def remember(self, inventory: Inventory, reduced: Mapping[int, Tensor], *, kept: bool = False) -> None:
        """What will be placed; ``kept`` where its memory outlives the step, so that we may hold it."""
        if kept:
            self._kept, self._kept_by = reduced, inventory
            return
        parameters = inventory.parameters
        self._shown.update((id(parameters[i]), (TensorWeakRef(g), None)) for i, g in reduced.items())

    def place(self, inventory: Inventory, reduced: Mapping[int, Tensor]) -> None:
        """Puts what is remembered where the user finds it."""
        parameters = inventory.parameters
        for i, gradient in reduced.items():
            parameters[i].grad = gradient


def added(before: Tensor | None, gradient: Tensor) -> Tensor:
    """A reduced gradient on top of what was reduced before, in place where that is possible."""
    if before is None:
        return gradient
    if before.is_sparse or gradient.is_sparse:
        return before + gradient
    return before.add_(gradient)
