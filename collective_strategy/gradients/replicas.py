"""Makes replicas equal: each parameter and buffer over the data axis and the axes it is shared over."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.fingerprint import TensorEntry, agree_in_groups
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.sharing.roles import UnmarkedPolicy

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
    plain = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
    flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in plain])
    collective.broadcast_(flat, src)
    if collective.rank == src:
        return
    offset = 0
    for tensor in plain:
        piece = flat[offset : offset + _nbytes(tensor)]
        # a copy is aligned for the wider dtype; a slice of bytes need not be
        tensor.copy_(piece.clone().view(tensor.dtype).reshape(tensor.shape))
        offset += _nbytes(tensor)
