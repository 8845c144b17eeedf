"""Buckets: gradients that travel together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.gradients.inventory import Inventory, Route


class Bucket:
    """Gradients of one route, dtype and device that are reduced by one all-reduce, in a buffer that outlives the step.

    Gradients are scaled into the buffer and taken out of ``.grad``, so that a piece that comes later is seen: small
    ones together, when all are ready; large ones at once, while they are warm in the cache, which their memory then is
    for the gradient of the next layer. After the all-reduce ``.grad`` is a view of the buffer.

    Args:
        members: Indices into the inventory.
        inventory: Where the parameters are.
        route: Their way.
        group: The collective of the route.
        wire: The dtype on the way.
        large: Bytes from which a gradient is large.

    Attributes:
        trigger: The member whose hook looks whether all are there: the last one of the backward before.
        outlives_step: Whether the results' memory is kept, also where the user drops them.
    """

    outlives_step: ClassVar[bool] = True

    def __init__(
        self,
        members: list[int],
        inventory: Inventory,
        route: Route,
        group: Collective,
        wire: torch.dtype,
        large: int,
    ) -> None:
        nbytes = {i: inventory.parameters[i].numel() * wire.itemsize for i in members}
        self.members = sorted(members, key=lambda i: nbytes[i] >= large)  # the small ones, scaled as one, come first
        self.trigger = min(members)  # registered first, so the last one that a plain backward is ready with
        self.nbytes = sum(nbytes.values())
        self.route = route
        self.group = group
        self._parameters = [inventory.parameters[i] for i in self.members]
        self._wire = wire
        self._device = self._parameters[0].device
        self._numels = [parameter.numel() for parameter in self._parameters]
        self._small = sum(n < large for n in nbytes.values())
        self._small_numel = sum(self._numels[: self._small])
        self._moved: set[int] = set()
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._unshared = self._address = 0
        self._handle: Handle | None = None

    @property
    def large(self) -> Sequence[int]:
        """The places in ``members`` of those that are moved at once."""
        return range(self._small, len(self.members))

    def _open(self) -> Tensor:
        """The buffer of the backward before, or a new one if somebody still holds gradients in it, or moved them."""
        if self._buffer is None or (not self._moved and self._is_taken(self._buffer)):
            self._buffer = self.group.shared_empty(sum(self._numels), self._wire, self._device)
            self._address = self._buffer.data_ptr()
            pieces = self._buffer.split(self._numels)
            self._views = [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]
            del pieces
            self._unshared = _holders(self._buffer)
        return self._buffer

    def _is_taken(self, buffer: Tensor) -> bool:
        return _holders(buffer) > self._unshared or buffer.data_ptr() != self._address  # by share_memory_(), say

    @torch.no_grad()
    def move(self, place: int) -> None:
        """Moves a dense gradient out of ``.grad`` into the buffer. A second piece goes on top of the first."""
        parameter = self._parameters[place]
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return
        self._open()
        view, scale = self._views[place], self.route.scale
        parameter.grad = None
        if place in self._moved:
            view.add_(gradient, alpha=scale)
        elif gradient.dtype == self._wire:
            # before the sum, as DistributedDataParallel does: large fp16 gradients do not overflow in it
            torch.mul(gradient.detach(), scale, out=view)
        else:
            view.copy_(gradient).mul_(scale)
        self._moved.add(place)

    @torch.no_grad()
    def fill(self) -> list[int]:
        """Completes the buffer with what lies in ``.grad``, and with zeros.

        Returns:
            The members that had a gradient. A sparse one stays in ``.grad``, and goes another way.
        """
        for place in self.large:
            self.move(place)
        buffer, small = self._open(), self._views[: self._small]
        gradients = [parameter.grad for parameter in self._parameters[: self._small]]
        present = [place for place, g in enumerate(gradients) if g is not None and not g.is_sparse]
        if len(present) < self._small:
            buffer[: self._small_numel].zero_()
            small, gradients = [small[place] for place in present], [gradients[place] for place in present]
        if present:
            torch._foreach_copy_(small, gradients)  # type: ignore[arg-type]
            if self.route.scale != 1.0:
                buffer[: self._small_numel].mul_(self.route.scale)
        for place in present:
            self._parameters[place].grad = None
        for place in self.large:
            if place in self._moved:
                present.append(place)
            else:
                self._views[place].zero_()
        self._moved.clear()
        return [self.members[place] for place in present]

    @torch.no_grad()
    def abandon(self) -> None:
        """Nothing is sent: what was moved is put back."""
        for place in self._moved:
            parameter = self._parameters[place]
            local = self._views[place].to(parameter.dtype) / self.route.scale
            parameter.grad = local if parameter.grad is None else parameter.grad + local
        self._moved.clear()

    def send(self) -> None:
        """Starts the all-reduce."""
        assert self._buffer is not None
        started = self.group.all_reduce_(self._buffer, "sum", async_op=True)
        self._handle = started if isinstance(started, Handle) else CompletedHandle(started)

    def results(self) -> dict[int, Tensor]:
        """By member, the tensors in which the reduced gradients are when `wait` has returned."""
        # tensors of their own, so that we see when nobody holds them
        return {i: view.detach() for i, view in zip(self.members, self._views, strict=True)}

    def wait(self) -> dict[int, Tensor]:
        """Waits for the all-reduce. Returns the results that must take the place of others, in their parameter's dtype
        and strides."""
        assert self._handle is not None
        unlike = [k for k, p in enumerate(self._parameters) if p.dtype != self._wire or not p.is_contiguous()]
        self._handle.wait()
        self._handle = None
        return {
            self.members[k]: torch.empty_like(self._parameters[k], requires_grad=False).copy_(self._views[k])
            for k in unlike
        }


def _holders(buffer: Tensor) -> int:
    """How many tensors share the buffer's memory."""
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
