"""Sums of tensors that lie in memory which the processes of one host map together."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import secrets
import struct
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.collectives.handles import Handle
from collective_strategy.collectives.meetings import Meetings
from collective_strategy.collectives.operations import ReduceOp

if TYPE_CHECKING:
    from collective_strategy.collectives.collective import Collective

log = logging.getLogger("collective_strategy")
_Memory: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"
VARIABLE = "COLLECTIVE_STRATEGY_SHARED_MEMORY"
_MOST_RANKS = 64  # each keeps a file of every other one open
_ROW = struct.Struct("qqq")
_TABLE_BYTES = 1 << 24  # of a file that takes memory only where something was written
_NONCE_BYTES = 16
_HEAD_BYTES = _LINE_BYTES = 64
_PATIENCE = 64


class SharedMemory:
    """What the ranks of a group see of each other's memory, and the sums in it.

    Every rank has a file without a name, in which it alone places tensors, and which the others map. A sum sends no
    data: when all ranks have arrived, each adds up its chunk of all ranks' tensors, in rank order, and writes it to all
    of them; when all have done so, it is complete. Nothing happens between start and wait: it is work for the
    processor, not for a network.

    A file begins with a nonce, by which it is known to be the right one, and what `Meetings` needs. A table follows: a
    row with the number of the batch and the number of tensors in it, then a row for each tensor with the batch, its
    place, 0 where it is outside, and its size. All ranks see all rows, so they come to the same decisions.
    """

    def __init__(self, group: Collective, own: int, files: Sequence[int], paths: Sequence[str]) -> None:
        self._group = weakref.proxy(group)
        self._rank, self._own, self._files = group.rank, own, files
        self._end = _TABLE_BYTES
        self._tables = [_map_file(file, 0, _TABLE_BYTES) for file in files]
        starts = [_part(table, _NONCE_BYTES, Meetings.NBYTES) for table in self._tables]
        self._meetings = Meetings(group.rank, starts, paths, group.timeout.total_seconds())
        self._segments: dict[int, tuple[weakref.ref[_Memory | mmap.mmap], int]] = {}  # by address: memory, its place
        self._mapped: dict[tuple[int, int], tuple[int, Tensor]] = {}  # by rank and place: last batch, bytes
        self._batch = 1
        self._pending: list[Tensor] = []
        for file in {own, *files}:
            weakref.finalize(self, os.close, file)

    @classmethod
    def open(cls, group: Collective) -> SharedMemory | None:
        """Called by all ranks of a group. None, on all of them, where they cannot or shall not share memory."""
        own, failure = -1, ""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        if os.environ.get(VARIABLE) == "0":
            failure = f"{VARIABLE}=0"
        elif group.world_size > _MOST_RANKS:
            failure = f"more than {_MOST_RANKS} ranks"
        elif group.device.type != "cpu" or sys.platform != "linux" or platform.machine() != "x86_64":
            failure = "needs CPU tensors, Linux and x86-64"
        else:
            try:
                own = os.memfd_create("collective_strategy")
                os.ftruncate(own, _TABLE_BYTES)
                os.pwrite(own, nonce, 0)
            except OSError as error:
                failure = str(error)
        files: list[int] = []
        memory = None
        try:
            cards = group.all_gather_object((group._node, f"/proc/{os.getpid()}/fd/{own}", nonce, failure))
            failure = next((card[-1] for card in cards if card[-1]), "")
            if not failure and len({card[0] for card in cards}) > 1:
                failure = "the ranks are on several nodes"
            if not failure:
                try:
                    files.extend(_opened(path, nonce) for _, path, nonce, _ in cards)
                    memory = cls(group, own, files, [path for _, path, _, _ in cards])
                except OSError as error:
                    failure = str(error)
                failure = next(filter(None, group.all_gather_object(failure)), "")
        except BaseException as error:
            failure = str(error)
            raise
        finally:
            if memory is None:
                for file in {own, *files} - {-1}:
                    os.close(file)
            elif failure:
                memory = None
        log.debug("%s: %s", group.name, f"no shared memory ({failure})" if failure else "shared memory")
        return memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, uninitialised, that `sum` takes. Local; its memory is given back with its last view."""
        length = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        memory: _Memory | mmap.mmap
        try:
            os.posix_fallocate(self._own, self._end, length)  # where there is no memory this says so, not a signal
            memory, place = _map_file(self._own, self._end, length, give_back=True), self._end
            self._end += length
        except OSError:
            memory, place = mmap.mmap(-1, length), 0  # the others see that it is outside
        self._segments = {at: known for at, known in self._segments.items() if known[0]() is not None}
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        self._segments[tensor.data_ptr()] = weakref.ref(memory), place
        return tensor

    def owns(self, x: Tensor) -> bool:
        """Whether ``x`` begins where a tensor made by `empty` does."""
        known = self._segments.get(x.data_ptr())
        return known is not None and known[0]() is not None

    # -- sums ----------------------------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Handle:
        """Starts the sum of a tensor made by `empty`. All ranks start the same ones in the same order."""
        _, place = self._segments[x.data_ptr()]
        self._pending.append(x.view(-1))
        self._write(len(self._pending), place, x.numel() * x.element_size())
        self._write(0, len(self._pending), 0)
        return _Sum(self, self._batch, x)

    @property
    def batch(self) -> int:
        """Counts completed batches of sums."""
        return self._batch

    def leave(self) -> None:
        """Others that wait for this rank get an error. Local, idempotent."""
        self._meetings.leave()

    def complete(self) -> None:
        """Completes all sums that are started. All ranks call it when they have started the same ones."""
        try:
            self._complete()
        except BaseException:
            self.leave()
            raise

    def _complete(self) -> None:
        self._meetings.meet()
        self._compare(0, "the number of sums in flight")
        places = [[row[1] for row in self._compare(i + 1, "bytes")] for i in range(len(self._pending))]
        outside = []
        for x, at in zip(self._pending, places, strict=True):
            if all(at):
                self._add_up(x, at)
            else:
                outside.append(x)
        self._meetings.meet()
        for x in outside:
            reduced = self._group._all_reduce(x, ReduceOp.SUM).wait()
            if reduced.data_ptr() != x.data_ptr():
                x.copy_(reduced)
        self._pending = []
        self._batch += 1
        if self._batch % _PATIENCE == 0:
            oldest = self._batch - _PATIENCE
            self._mapped = {key: found for key, found in self._mapped.items() if found[0] >= oldest}

    def _add_up(self, x: Tensor, places: Sequence[int]) -> None:
        """Writes the sum of this rank's chunk to all ranks."""
        tensors = [x if rank == self._rank else self._map(rank, place, x) for rank, place in enumerate(places)]
        line = max(1, _LINE_BYTES // x.element_size())
        share = -(-x.numel() // (len(tensors) * line)) * line
        chunks = [tensor[self._rank * share : (self._rank + 1) * share] for tensor in tensors]
        block = torch.get_num_threads() << 16  # elements that stay in the cache between reading and writing
        for pieces in zip(*(chunk.split(block) for chunk in chunks), strict=True):
            total, *others = pieces
            for other in others:
                total += other
            for other in others:
                other.copy_(total)

    def _map(self, rank: int, place: int, like: Tensor) -> Tensor:
        nbytes = like.numel() * like.element_size()
        _, seen = self._mapped.get((rank, place), (0, None))
        if seen is None or seen.numel() < nbytes:
            length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            seen = torch.frombuffer(_map_file(self._files[rank], place, length), dtype=torch.uint8, count=nbytes)
        self._mapped[rank, place] = self._batch, seen
        return seen[:nbytes].view(like.dtype)

    def _write(self, position: int, first: int, second: int) -> None:
        _ROW.pack_into(self._tables[self._rank], _HEAD_BYTES + position * _ROW.size, self._batch, first, second)

    def _compare(self, position: int, what: str) -> list[tuple[int, int, int]]:
        rows = [_ROW.unpack_from(table, _HEAD_BYTES + position * _ROW.size) for table in self._tables]
        told = [(row[0], row[1] if position == 0 else row[2]) for row in rows]
        if len(set(told)) > 1:
            found = ", ".join(f"rank {rank}: {value} in batch {batch}" for rank, (batch, value) in enumerate(told))
            self._group.broken = (
                f"the ranks of {self._group.name!r} do not sum the same tensors; they differ in {what} ({found}). All "
                "ranks must start the same all_reduce_ calls before they wait for one."
            )
            raise CollectiveError(self._group.broken)
        return rows


class _Sum(Handle):
    def __init__(self, memory: SharedMemory, batch: int, x: Tensor) -> None:
        self._memory, self._batch, self._x = memory, batch, x

    def wait(self) -> Tensor:
        if not self.is_completed():
            self._memory.complete()
        return self._x

    def is_completed(self) -> bool:
        return self._batch < self._memory.batch


def _map_file(file: int, place: int, length: int, *, give_back: bool = False) -> _Memory:
    """A part of a file as memory, until nobody holds it any more; then, to ``give_back``, the file gives it back.

    Not by `mmap.mmap`, which keeps a file open for each: every bucket of every rank would take one of the process'.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = library.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, place)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(memory, _unmap, library, address, length, os.getpid() if give_back else 0).atexit = False
    return memory


def _unmap(library: ctypes.CDLL, address: int, length: int, process: int) -> None:
    if process == os.getpid():  # a forked process only looks on
        library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_REMOVE)
    library.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def _part(memory: _Memory, start: int, length: int) -> _Memory:
    """A part of memory, which keeps all of it."""
    return (ctypes.c_ubyte * length).from_buffer(memory, start)


def _opened(path: str, nonce: bytes) -> int:
    """Another process' file, if it is the one that was meant: there may be one of this number in another container."""
    found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(found, _NONCE_BYTES, 0) != nonce:
        os.close(found)
        raise OSError(f"{path} is another file here")
    return found
