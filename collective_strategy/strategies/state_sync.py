"""Makes the tensors of a module equal to those of one rank."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective

_CHUNK_BYTES = 64 * 1024 * 1024


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


def module_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, then buffers (the non-persistent ones too), each shared one once."""
    return [*module.parameters(), *module.buffers()]


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
