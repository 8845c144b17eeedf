"""Raw operations: any dtype, device and layout in; a fresh contiguous tensor out; no autograd.

This is the only place that calls a backend's primitives. It makes tensors contiguous, brings them to a dtype the
backend declares (see `Capabilities`) and then to its device and back, and composes what the backend lacks. Ranks are
group ranks. ``sizes`` lists the lengths along ``dim``, one per rank, the same list on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collective_strategy.collectives.handles import Handle
from collective_strategy.collectives.reductions import encode_reduction
from collective_strategy.collectives.type_hook import unchecked

if TYPE_CHECKING:
    from collective_strategy.collectives.base import CollectiveBase
    from collective_strategy.collectives.operations import ReduceOp


def all_reduce(collective: CollectiveBase, x: Tensor, op: ReduceOp) -> Tensor:
    """The reduction over all ranks, element by element; shape of ``x``."""
    code = encode_reduction(_outbound(collective, x), op, collective.world_size, collective.capabilities)
    if code.wire_op is None:
        reduced = code.fold(_gathered(collective, code.buffer))
    else:
        wire_op, shape = code.wire_op, code.buffer.shape
        reduced = _carried(collective, code.buffer.reshape(-1), lambda there: collective._all_reduce(there, wire_op))
        reduced = reduced[: code.buffer.numel()].reshape(shape)
    return code.finish(reduced)


def broadcast(collective: CollectiveBase, x: Tensor, src: int) -> Tensor:
    """The value of rank ``src``; ``x`` has its shape and dtype on every rank."""
    buffer, restore = _bytes_if_needed(collective, _outbound(collective, x))
    if same_memory(buffer, x) or collective.world_size == 1:
        buffer = buffer.clone()
    received = _carried(collective, buffer, lambda there: collective._broadcast(there, src))
    return restore(received[: buffer.numel()]).reshape(x.shape)


def all_gather(collective: CollectiveBase, x: Tensor) -> Tensor:
    """All tensors stacked in rank order: ``(world_size, *x.shape)``."""
    return _gathered(collective, _outbound(collective, x))


def all_gather_cat(collective: CollectiveBase, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """All tensors concatenated along ``dim``, whose lengths are ``sizes``."""
    front = _outbound(collective, x.movedim(dim, 0))
    rest = tuple(front.shape[1:])
    longest = max(sizes)
    if min(sizes) == longest:
        pieces = _gathered(collective, front).reshape(sum(sizes), *rest)
        return _back(pieces, dim)
    # No backend's all_gather takes different lengths alike, so the pieces are padded to the longest.
    if front.shape[0] < longest:
        front = torch.cat([front, front.new_zeros(longest - front.shape[0], *rest)])
    gathered = _gathered(collective, front)
    pieces = torch.cat([gathered[rank, :size] for rank, size in enumerate(sizes)])
    return _back(pieces, dim)


def reduce_scatter(collective: CollectiveBase, x: Tensor, op: ReduceOp, dim: int, sizes: Sequence[int]) -> Tensor:
    """Own chunk along ``dim`` of the reduction of ``x``."""
    front = _outbound(collective, x.movedim(dim, 0))
    code = encode_reduction(front, op, collective.world_size, collective.capabilities)
    mine = sizes[collective.rank]
    shape = (mine, *code.buffer.shape[1:])
    if code.wire_op is not None and min(sizes) == max(sizes):
        wire_op = code.wire_op
        chunks = code.buffer.reshape(collective.world_size, *shape)
        reduced = _carried(collective, chunks, lambda there: collective._reduce_scatter(there, wire_op), padded=False)
    else:
        row = _numel(code.buffer.shape[1:])
        received = exchange(
            collective, code.buffer.reshape(-1), [size * row for size in sizes], [mine * row] * collective.world_size
        )
        reduced = code.fold(received.reshape(collective.world_size, *shape))
    return _back(code.finish(reduced), dim)


def all_to_all(collective: CollectiveBase, x: Tensor, split_dim: int, concat_dim: int, sizes: Sequence[int],
               received_shapes: Sequence[Sequence[int]]) -> Tensor:  # fmt: skip
    """Chunk k of ``x`` along ``split_dim`` goes to rank k; what arrives is concatenated along ``concat_dim``.

    ``received_shapes[k]`` is the shape of the chunk that rank k sends here.
    """
    chunks = _outbound(collective, x).split(list(sizes), split_dim)
    flat = torch.cat([chunk.reshape(-1) for chunk in chunks])
    numels = [_numel(shape) for shape in received_shapes]
    received = exchange(collective, flat, [chunk.numel() for chunk in chunks], numels)
    parts = [part.reshape(list(shape)) for part, shape in zip(received.split(numels), received_shapes, strict=True)]
    return torch.cat(parts, concat_dim).contiguous()


def received_shapes(x: Tensor, split_dim: int, concat_dim: int, own: int, into: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes of the chunks that arrive: ``own`` long along ``split_dim``, ``into[k]`` along ``concat_dim``."""
    shapes = []
    for length in into:
        shape = list(x.shape)
        shape[split_dim] = own
        shape[concat_dim] = length
        shapes.append(tuple(shape))
    return shapes


def permute(collective: CollectiveBase, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """The tensor of the rank that sends here; zeros if none does. ``x`` has the same shape on every rank."""
    buffer, restore = _bytes_if_needed(collective, _outbound(collective, x))
    received = _carried(collective, buffer, lambda there: collective._permute(there, pairs))
    return restore(received[: buffer.numel()]).reshape(x.shape)


def halo_exchange(collective: CollectiveBase, x: Tensor, dim: int, before: int, after: int, wrap: bool) -> Tensor:
    """``x`` between the last ``before`` entries of the previous rank and the first ``after`` of the next one."""
    x = x.detach()
    first, last = x.narrow(dim, 0, after), x.narrow(dim, x.shape[dim] - before, before)
    from_previous, from_next = _swapped(collective, first, last, wrap)
    return torch.cat([from_previous, x, from_next], dim)


def folded_halo(collective: CollectiveBase, x: Tensor, dim: int, before: int, after: int, wrap: bool) -> Tensor:
    """The adjoint of `halo_exchange`: both borders are added to the entries that they are copies of."""
    x = x.detach()
    length = x.shape[dim] - before - after
    from_previous, from_next = _swapped(
        collective, x.narrow(dim, 0, before), x.narrow(dim, before + length, after), wrap
    )
    result = x.narrow(dim, before, length).clone(memory_format=torch.contiguous_format)
    result.narrow(dim, 0, after).add_(from_previous)
    result.narrow(dim, length - before, before).add_(from_next)
    return result


def _swapped(collective: CollectiveBase, to_previous: Tensor, to_next: Tensor, wrap: bool) -> tuple[Tensor, Tensor]:
    """What the previous and the next rank send here, zeros if there is none; both directions in one exchange."""
    n, rank = collective.world_size, collective.rank
    previous = (rank - 1) % n if wrap or rank > 0 else None
    following = (rank + 1) % n if wrap or rank < n - 1 else None
    # one piece per neighbour, in the order of their ranks; two that meet the same neighbour stay in this order
    sent = sorted((peer, k) for k, peer in enumerate([previous, following]) if peer is not None)
    heard = sorted((peer, k) for k, peer in enumerate([following, previous]) if peer is not None)
    flats = [_outbound(collective, x).reshape(-1) for x in (to_previous, to_next)]
    out, into = [0] * n, [0] * n
    for peer, k in sent:
        out[peer] += flats[k].numel()
    for peer, k in heard:
        into[peer] += flats[k].numel()  # of the shape of what goes the other way
    received = exchange(collective, torch.cat([flats[k] for _, k in sent] or [flats[0][:0]]), out, into)
    pieces = dict(zip([k for _, k in heard], received.split([flats[k].numel() for _, k in heard]), strict=True))
    likes = {1: to_next, 0: to_previous}
    found = [
        pieces[k].reshape(like.shape).to(like.device) if k in pieces else torch.zeros_like(like)
        for k, like in likes.items()
    ]
    return found[0], found[1]


def scatter(collective: CollectiveBase, x: Tensor, src: int, dim: int, sizes: Sequence[int]) -> Tensor:
    """Own chunk along ``dim`` of the tensor of rank ``src``."""
    front = _outbound(collective, x.movedim(dim, 0))
    rest = tuple(front.shape[1:])
    row = _numel(rest)
    here = collective.rank == src
    out = [size * row if here else 0 for size in sizes]
    mine = sizes[collective.rank]
    into = [mine * row if peer == src else 0 for peer in range(collective.world_size)]
    flat = front.reshape(-1)
    received = exchange(collective, flat if here else flat[:0], out, into)
    return _back(received.reshape(mine, *rest), dim)


def gather_to(collective: CollectiveBase, x: Tensor, dst: int) -> Tensor | None:
    """All tensors stacked in rank order on rank ``dst``, None elsewhere."""
    flat = _outbound(collective, x).reshape(-1)
    n = flat.numel()
    here = collective.rank == dst
    out = [n if peer == dst else 0 for peer in range(collective.world_size)]
    received = exchange(collective, flat, out, [n if here else 0] * collective.world_size)
    return received.reshape(collective.world_size, *x.shape) if here else None


def exchange(collective: CollectiveBase, flat: Tensor, out: Sequence[int], into: Sequence[int]) -> Tensor:
    """One flat tensor's pieces of lengths ``out`` to the ranks, pieces of lengths ``into`` from them."""
    buffer, restore = _bytes_if_needed(collective, flat)
    scale = flat.dtype.itemsize if _moves_as_bytes(collective, flat) else 1
    sent, expected = [n * scale for n in out], [n * scale for n in into]
    received = _carried(collective, buffer, lambda there: collective._all_to_all(there, sent, expected))
    return restore(received[: sum(expected)])


def own_chunk(collective: CollectiveBase, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Own chunk of ``x`` along ``dim``, copied; nothing is sent."""
    start = list(accumulate(sizes, initial=0))[collective.rank]
    return x.narrow(dim, start, sizes[collective.rank]).clone(memory_format=torch.contiguous_format)


def own_chunk_in_zeros(collective: CollectiveBase, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """``x`` in the place of the own chunk, zeros elsewhere; nothing is sent."""
    start = list(accumulate(sizes, initial=0))[collective.rank]
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    result = x.new_zeros(shape)
    result.narrow(dim, start, sizes[collective.rank]).copy_(x)
    return result


def barrier(collective: CollectiveBase) -> None:
    """Returns when all ranks have called it."""
    _complete(collective, collective._barrier)


def _gathered(collective: CollectiveBase, x: Tensor) -> Tensor:
    """`_all_gather` of a contiguous tensor, in a dtype the backend moves."""
    buffer, restore = _bytes_if_needed(collective, x)
    gathered = _carried(collective, buffer, collective._all_gather)
    return restore(gathered[:, : buffer.numel()].contiguous()).reshape(collective.world_size, *x.shape)


def _carried(collective: CollectiveBase, x: Tensor, start: Callable[[Tensor], Handle], padded: bool = True) -> Tensor:
    """A primitive's result, on the device of ``x``, which travels over the backend's own device.

    Args:
        collective: The backend.
        x: Contiguous, in a dtype that the backend takes.
        start: The primitive.
        padded: ``x`` is flat and may travel with more entries at its end, as may the result.
    """
    types = collective.capabilities.device_types
    if types is None or x.device.type in types:
        return _complete(collective, lambda: start(x))
    if padded and collective.capabilities.compiles:
        x = _to_power_of_two(x)
    return _complete(collective, lambda: Returning(start(x.to(collective.device)), x.device))


def _to_power_of_two(x: Tensor) -> Tensor:
    """With zeros at its end, so that lengths that change from call to call need few programs."""
    length = 1 << (x.numel() - 1).bit_length() if x.numel() else 0
    return x if length == x.numel() else torch.cat([x, x.new_zeros(length - x.numel())])


class Returning(Handle):
    """A handle whose result is brought to another device while it is waited for."""

    def __init__(self, handle: Handle, device: torch.device) -> None:
        self._handle, self._device = handle, device

    def wait(self) -> Tensor:
        return self._handle.wait().to(self._device)

    def is_completed(self) -> bool:
        return self._handle.is_completed()


def _complete(collective: CollectiveBase, start: Callable[[], Handle]) -> Tensor:
    collective._compare_backward()
    with unchecked():
        return collective._guarded(lambda: start().wait())


def _outbound(collective: CollectiveBase, x: Tensor) -> Tensor:
    """Detached, with plain memory, contiguous. May be ``x`` itself."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors begin at one place. Tensors of lazy devices have no place; there each is its own."""
    return x is y or (x.data_ptr() == y.data_ptr() and x.data_ptr() != 0)


def _bytes_if_needed(collective: CollectiveBase, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``x`` flat, viewed as bytes where that is how it moves, and the way back."""
    flat = _flat(x)
    if not _moves_as_bytes(collective, x):
        return flat, _same
    dtype = x.dtype
    return flat.view(torch.uint8), lambda moved: moved.reshape(-1).view(dtype)


def _moves_as_bytes(collective: CollectiveBase, x: Tensor) -> bool:
    """What the backend does not move, and what a backend that compiles would otherwise compile once per dtype."""
    capabilities = collective.capabilities
    types = capabilities.device_types
    host = types is not None and x.device.type not in types
    return x.dtype not in capabilities.movement_dtypes or (host and capabilities.compiles)


def _flat(x: Tensor) -> Tensor:
    """A contiguous tensor in one dim of stride 1: torch lets a dim of length 1 have any stride."""
    flat = x.reshape(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def _back(front: Tensor, dim: int) -> Tensor:
    return front.movedim(0, dim).contiguous()


def _numel(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _same(x: Tensor) -> Tensor:
    return x


def send(collective: CollectiveBase, x: Tensor, dst: int) -> Tensor:
    """Sends ``x`` to rank ``dst``."""
    buffer, _ = _bytes_if_needed(collective, _outbound(collective, x))
    return _carried(collective, buffer, lambda there: collective._send(there, dst), padded=False)


def recv(collective: CollectiveBase, like: Tensor, src: int) -> Tensor:
    """The tensor of ``like``'s shape and dtype that rank ``src`` sends."""
    buffer, restore = _bytes_if_needed(collective, _outbound(collective, torch.empty_like(like)))
    received = _carried(collective, buffer, lambda there: collective._recv(there, src), padded=False)
    return restore(received).reshape(like.shape)
