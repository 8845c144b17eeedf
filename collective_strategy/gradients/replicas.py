"""Makes replicas equal: each parameter and buffer over the data axis and the axes it is shared over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.fingerprint import TensorEntry, agree_in_groups
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.sharing.roles import UnmarkedPolicy

BufferReduction = Literal["first", "mean"]
_CHUNK_BYTES = 64 * 1024 * 1024


def broadcast_replicas(
    module: nn.Module, communicators: Communicators, unmarked: UnmarkedPolicy = "private", *, buffers_only: bool = False
) -> None:
    """Overwrites each tensor with that of the first rank of the group over which it is equal. Called by all ranks.

    Sharded and private tensors stay what they are on each model rank, and become equal over the data axis.
    """
    tensors = {name: buffer for name, buffer in module.named_buffers()}
    roles = communicators.roles(module, unmarked, buffers=True)
    if not buffers_only:
        tensors = {**dict(module.named_parameters()), **tensors}
        roles = {**communicators.roles(module, unmarked), **roles}
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(communicators.replicated(roles[name]), []).append(tensor)
    made = communicators.prepare(set(groups))
    for axes in made:
        if axes in groups:
            broadcast_tensors(communicators.over(axes), groups[axes])


def make_buffers_equal(
    module: nn.Module,
    communicators: Communicators,
    unmarked: UnmarkedPolicy = "private",
    reduction: BufferReduction = "first",
) -> None:
    """Makes buffers equal over the data axis and the axes they are shared over. Called by all ranks.

    Args:
        module: The owner of the buffers.
        communicators: The groups.
        unmarked: As for the parameters.
        reduction: ``"first"``: those of the group's first rank. ``"mean"``: the mean of floating and complex ones
            (running statistics of batches that differ), the first rank's of all others (counters, masks).
    """
    floating = {n: b for n, b in module.named_buffers() if b.is_floating_point() or b.is_complex()}
    before = {name: buffer.detach().clone() for name, buffer in floating.items()} if reduction == "mean" else {}
    broadcast_replicas(module, communicators, unmarked, buffers_only=True)
    roles = communicators.roles(module, unmarked, buffers=True)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in before:
        groups.setdefault(communicators.replicated(roles[name]), []).append(name)
    for axes in communicators.prepare(set(groups)) if reduction == "mean" else ():
        if axes in groups:
            _average(communicators.over(axes), [(floating[name], before[name]) for name in groups[axes]])


@torch.no_grad()
def _average(collective: Collective, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Adds the mean distance from the first rank's values, so that equal ones, infinite too, stay as they are."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for first, own in pairs:
        kinds.setdefault((own.dtype, own.device), []).append((first, own))
    for members in kinds.values():
        distances = [torch.where(own == first, torch.zeros_like(own), own - first) for first, own in members]
        flat = torch.cat([distance.reshape(-1) for distance in distances])
        mean = collective.all_reduce(flat, "mean", to="invariant")
        for (first, own), piece in zip(members, mean.split([own.numel() for _, own in members]), strict=True):
            write_values(first, first + piece.reshape(own.shape))


def agree_on_buffers(module: nn.Module, communicators: Communicators) -> None:
    """Compares the buffers over the ranks on which they are equal. Called by all ranks.

    Raises:
        CollectiveMismatchError: on all ranks, naming the first buffer that differs and the ranks.
    """
    roles = communicators.roles(module, buffers=True)
    groups: dict[tuple[int, ...], list[TensorEntry]] = {communicators.members(communicators.replicated_data): []}
    for name, buffer in module.named_buffers():
        members = communicators.members(communicators.replicated(roles[name]))
        groups.setdefault(members, []).append(TensorEntry.of(name, buffer, roles[name].describe()))
    agree_in_groups(communicators.world, groups, "", "buffer")


@torch.no_grad()
def broadcast_tensors(collective: Collective, tensors: Iterable[Tensor], src: int = 0) -> None:
    """Overwrites ``tensors`` with those of rank ``src`` of the collective, bit by bit, whatever their dtype.

    Called by every rank with tensors of the same shapes and dtypes in the same order. They travel as bytes in chunks
    of up to 64 MiB per device.
    """
    if collective.world_size == 1:
        return
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (size + _nbytes(tensor) > _CHUNK_BYTES or tensor.device != chunk[0].device):
            _broadcast_chunk(collective, chunk, src)
            chunk, size = [], 0
        if tensor.numel():
            chunk.append(tensor)
            size += _nbytes(tensor)
    if chunk:
        _broadcast_chunk(collective, chunk, src)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _broadcast_chunk(collective: Collective, tensors: list[Tensor], src: int) -> None:
    plain = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in tensors]
    plain = [torch.view_as_real(t).reshape(-1) if t.is_complex() else t for t in plain]
    flat = torch.cat([t.view(torch.uint8) for t in plain])
    collective.broadcast_(flat, src)
    if collective.rank == src:
        return
    offset = 0
    for tensor, own in zip(tensors, plain, strict=True):
        # a copy is aligned for the wider dtype; a slice of bytes need not be
        values = flat[offset : offset + _nbytes(own)].clone().view(own.dtype)
        offset += _nbytes(own)
        values = torch.view_as_complex(values.view(-1, 2)) if tensor.is_complex() else values
        write_values(tensor, values.reshape(tensor.shape))


def write_values(tensor: Tensor, values: Tensor) -> None:
    """Copies values into a tensor, once where it is expanded, which `copy_` refuses."""
    target = tensor.detach()
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
