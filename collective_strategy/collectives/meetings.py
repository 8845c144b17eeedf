"""Where processes of one host wait for each other, by numbers in memory that all of them map."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Sequence

_TURNS = 200  # a processor of its own is not given away for so short a time
_NAP, _REST = 50e-6, 1e-3
_PATIENCE = 10e-3


class Meetings:
    """A rank comes to a meeting by counting up its number; it goes on when the others' numbers are as high.

    That takes some microseconds, where an all-reduce through sockets wakes several threads. What a rank wrote to the
    memory before a meeting the others see after it, on processors that let others see what was written in the order in
    which it was written, as x86-64 does.

    Args:
        rank: This process' place.
        memories: By rank, the first bytes of the memory that belongs to it, `NBYTES` long, zeros at first.
        files: By rank, the open file of that memory as ``/proc`` shows it to others, which is there as long as the
            process.
        timeout: Seconds to wait for others.
    """

    NBYTES = 16

    def __init__(
        self, rank: int, memories: Sequence[ctypes.Array[ctypes.c_ubyte]], files: Sequence[str], timeout: float
    ) -> None:
        self._rank, self._files, self._timeout = rank, files, timeout
        self._inodes = [os.stat(file).st_ino for file in files]
        self._numbers = [ctypes.c_int64.from_buffer(memory, 0) for memory in memories]
        self._left = [ctypes.c_int64.from_buffer(memory, 8) for memory in memories]
        self._met = 0
        self.leave = weakref.finalize(self, _leave, self._left[rank], os.getpid())
        """Tells the others that this rank comes to no more meetings. Called once, at the latest by its end."""

    def meet(self) -> None:
        """Returns when all ranks have called it equally often.

        Raises:
            RuntimeError: a rank has left or its process ended.
            TimeoutError: a rank did not come in time.
        """
        self._met += 1
        self._numbers[self._rank].value = self._met
        began, turn = 0.0, 0
        for number in self._numbers:
            while number.value < self._met:
                turn += 1
                if turn < _TURNS:
                    continue
                began = began or time.monotonic()
                waited = time.monotonic() - began
                if waited > _PATIENCE:
                    self._look_after_the_others(waited)
                time.sleep(_NAP if waited < _PATIENCE else _REST)

    def _look_after_the_others(self, waited: float) -> None:
        for rank, (file, inode, left) in enumerate(zip(self._files, self._inodes, self._left, strict=True)):
            gone = bool(left.value) or not _is(file, inode)
            if gone and self._numbers[rank].value < self._met:  # asked last: it may have come, and then left
                raise RuntimeError(f"rank {rank} of the group has left, or its process ended")
        if waited > self._timeout:
            late = [rank for rank, number in enumerate(self._numbers) if number.value < self._met]
            if late:
                raise TimeoutError(f"ranks {late} of the group timed out: they did not come in {waited:.1f} s")


def _is(file: str, inode: int) -> bool:
    try:
        return os.stat(file).st_ino == inode
    except OSError:
        return False


def _leave(left: ctypes.c_int64, process: int) -> None:
    if os.getpid() == process:  # a forked process is not the rank
        left.value = 1
