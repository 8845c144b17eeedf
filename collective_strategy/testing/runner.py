"""``run_ranks``: a function on n real ranks, and what became of each."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from collective_strategy.collectives.registry import automatic_backend, collective_class
from collective_strategy.collectives.xla_threads import cpu_environment
from collective_strategy.testing.outcome import (
    LeakedStateError,
    Outcome,
    RankTimeoutError,
    WorkerDiedError,
    unpack,
    unpack_error,
)
from collective_strategy.testing.pool import Pool, Spawner, Worker, worker_environment
from collective_strategy.testing.worker import CLOSING_LIMIT, RELEASE, Call, Closing, Place, Report, work_bytes

MAX_POOLS = 6  # idle pools cost memory only; the one unused longest goes first
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
SETTLE = 1.0  # seconds that the others get to finish by themselves when a rank has failed


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | type | None = "auto",
    ranks: str = "auto",
    mesh: Mapping[str, int] | None = None,
    unions: Mapping[str, Any] | None = None,
    timeout: float = 60,
    grace: float = 10,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    **collective_options: Any,
) -> list[Outcome]:
    """Calls ``fn(collective, *args)`` on ``n`` ranks and returns what became of each.

    A rank is a process; with the backend ``"xla"`` it is a thread with an XLA:CPU device, all in one process apart.

    Args:
        n: How many ranks; 1 is a process too.
        fn: Any function, a closure or lambda too. It and ``args`` reach every rank as a copy of its own.
        backend: A registered name, ``"auto"`` (the one that the environment variable COLLECTIVE_STRATEGY_BACKEND names,
            else torch), a ``Collective`` class, or ``None`` for no collective (``fn`` then gets ``None``).
        ranks: What a rank is with ``backend=None``: a ``"process"`` with the launcher's environment variables, or a
            thread with a ``"device"`` of XLA's; ``"auto"`` is what it is for the backend that ``backend="auto"`` means.
        mesh, unions, collective_options: Handed to the collective's constructor.
        timeout: Seconds, the time-out of the collective's own operations.
        grace: Seconds beyond ``timeout`` after which a rank that has not come back counts as hanging.
        fresh: Take processes that have run nothing before and throw them away afterwards: for functions that end a
            runtime or change the process. What they leave changed is not reported.
        env: More environment variables, with ``fresh=True``. They are set before the backend's library is imported,
            but after torch.

    Returns:
        One ``Outcome`` per rank, in rank order. A rank whose process died has a ``WorkerDiedError``. A rank that left
        the default dtype, the grad mode, environment variables, process groups or threads changed has a
        ``LeakedStateError``. Random states are put back, so every call starts from the same one.

    Raises:
        RankTimeoutError: A rank hangs. Says where each rank stood, with the stacks of all threads.

    The processes are kept for the next call with the same backend and ``n``, unless something went wrong that may
    have left them in a bad state. The environment and the working directory are those of the caller at each call.

    Example:
        >>> [outcome.result() for outcome in run_ranks(2, lambda collective: collective.rank)]
        [0, 1]
    """
    if n < 1:
        raise ValueError(f"run_ranks needs at least one rank, not {n}")
    if env and not fresh:
        raise ValueError("env= needs fresh=True: a warm process may have read its variables already")
    if backend == "auto":
        backend = automatic_backend()
    options = {"mesh": mesh, "unions": unions, "timeout": timeout, **collective_options}
    work = work_bytes(fn, args, backend, options)
    if backend is not None or ranks == "auto":
        ranks = _kind_of_rank(automatic_backend() if backend is None else backend)
    devices = ranks == "device"
    with _lock:
        return _Run(n, backend, devices, work, timeout + grace, fresh, dict(env or {})).outcomes()


def close_pools() -> None:
    """Ends all warm processes. Happens at exit by itself."""
    global _spawner
    with _lock:
        for pool in _pools.values():
            if _owner == os.getpid():
                pool.close()
        _pools.clear()
        if _spawner is not None and _owner == os.getpid():
            _spawner.close()
        _spawner = None


# The warm processes are the point of this module, so they are kept in it. A forked child must not use its parent's.
_lock = threading.RLock()
_pools: dict[tuple[str, int], Pool] = {}
_spawner: Spawner | None = None
_owner = os.getpid()
atexit.register(close_pools)


class _Run:
    """One call on all ranks of one pool."""

    def __init__(
        self,
        n: int,
        backend: str | type | None,
        devices: bool,
        work: bytes,
        limit: float,
        fresh: bool,
        env: dict[str, str],
    ) -> None:
        self.n = n
        self.devices = devices
        self.work = work
        self.limit = limit
        self.fresh = fresh
        self.env = env
        name = backend if isinstance(backend, str) else getattr(backend, "__qualname__", "none")
        self.key = ("devices" if devices else name, n)
        self.reports: dict[int, Report] = {}
        self.closings: dict[int, Closing] = {}
        self.deaths: dict[int, WorkerDiedError] = {}
        self.released: set[int] = set()
        self.keep = not fresh

    def outcomes(self) -> list[Outcome]:
        self.pool = _take_pool(self.key, self.devices, self.fresh)
        try:
            self._send_calls()
            deadline = time.monotonic() + self.limit
            self._collect_reports(deadline)
            self._release(set(self.reports))
            self._collect_closings()
            outcomes = [self._outcome(rank) for rank in range(self.n)]
        except BaseException:
            self.pool.close()
            raise
        if self.keep:
            _pools[self.key] = self.pool
        else:
            self.pool.close()
        return outcomes

    def _send_calls(self) -> None:
        for worker in self.pool.workers:
            place = Place(worker.rank, self.n, self.pool.port)
            given = cpu_environment(self.n) if self.devices else _launcher_variables(place)
            environment = worker_environment({**given, **self.env}.items())
            worker.connection.send(Call(place, self.limit, self.work, environment, os.getcwd(), list(sys.path)))

    def _collect_reports(self, deadline: float) -> None:
        settled: float | None = None
        while waiting := self._waiting_for(self.reports):
            now = time.monotonic()
            if now >= deadline:
                raise self._timeout_error(waiting, "the function", self.limit)
            if settled is not None and now >= settled:
                # A rank has failed and others wait, perhaps for it: as at the end of its process, its side closes.
                failed = {rank for rank, report in self.reports.items() if report.error is not None}
                self._release(failed - self.released)
                settled, self.keep = None, False
            until = deadline if settled is None else min(settled, deadline)
            for connection in wait(list(waiting), max(0.0, until - now)):
                assert isinstance(connection, Connection)
                worker = waiting[connection]
                message = self._receive(worker)
                if isinstance(message, Report):
                    self.reports[worker.rank] = message
                    if message.error is not None and settled is None and not self.released:
                        settled = time.monotonic() + SETTLE

    def _collect_closings(self) -> None:
        deadline = time.monotonic() + CLOSING_LIMIT
        while waiting := self._waiting_for(self.closings):
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._timeout_error(waiting, "the tear-down", CLOSING_LIMIT)
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = waiting[connection]
                message = self._receive(worker)
                if isinstance(message, Closing):
                    self.closings[worker.rank] = message

    def _waiting_for(self, done: Mapping[int, object]) -> dict[Connection, Worker]:
        return {
            connection: worker
            for connection, worker in self.pool.connections.items()
            if worker.rank not in done and worker.rank not in self.deaths
        }

    def _receive(self, worker: Worker) -> object:
        try:
            return worker.connection.recv()
        except (EOFError, OSError):
            self.keep = False
            for other in self.pool.workers:
                if other.process is worker.process and other.rank not in self.closings:
                    self.deaths[other.rank] = _death(other)
            return None

    def _release(self, ranks: set[int]) -> None:
        for worker in self.pool.workers:
            if worker.rank in ranks - self.released - self.deaths.keys():
                self.released.add(worker.rank)
                with contextlib.suppress(OSError):  # it died meanwhile, which the next receive finds out
                    worker.connection.send(RELEASE)

    def _outcome(self, rank: int) -> Outcome:
        report = self.reports.get(rank)
        if report is None or (rank in self.deaths and report.error is None):
            return Outcome(rank, error=self.deaths[rank])
        closing = self.closings.get(rank, Closing([]))  # none if its process died after the report
        problems = [] if self.fresh else list(closing.differences)
        if closing.failure:
            problems.append(f"the tear-down failed:\n{closing.failure}")
        if problems or report.broken:
            self.keep = False
        if report.error is not None:
            notes = "".join(f"\n(also: {problem})" for problem in problems)
            return Outcome(rank, error=unpack_error(report.error), traceback=report.traceback + notes)
        if problems:
            return Outcome(
                rank, error=LeakedStateError(f"rank {rank} left its process changed: " + "; ".join(problems))
            )
        return Outcome(rank, value=unpack(report.value) if report.value else None)

    def _timeout_error(self, waiting: Mapping[Connection, Worker], what: str, limit: float) -> RankTimeoutError:
        stacks = {worker.rank: worker.stacks() for worker in waiting.values()}
        lines = []
        for rank in range(self.n):
            if rank in stacks:
                lines.append(f"rank {rank}: {_top_of(stacks[rank])}")
            elif rank in self.deaths:
                lines.append(f"rank {rank}: {self.deaths[rank]}")
            else:
                report = self.reports[rank]
                error = unpack_error(report.error) if report.error else None
                lines.append(f"rank {rank}: " + (f"raised {type(error).__name__}: {error}" if error else "returned"))
        details = "".join(f"\n\nrank {rank}, most recent call first:\n{text}" for rank, text in stacks.items())
        message = f"{what} did not come back within {limit:g} s on {len(stacks)} of {self.n} ranks\n"
        finished = [Outcome(rank, value=unpack(r.value)) for rank, r in sorted(self.reports.items()) if r.value]
        return RankTimeoutError(message + "\n".join(lines) + details, stacks, finished)


def _kind_of_rank(backend: str | type) -> str:
    """What the backend's ranks are; why one cannot be had is said in the ranks."""
    try:
        found = collective_class(backend) if isinstance(backend, str) else backend
    except (ValueError, ImportError, TypeError):
        return "process"
    return str(getattr(found, "ranks_in_tests", "process"))


def _take_pool(key: tuple[str, int], devices: bool, fresh: bool) -> Pool:
    global _spawner, _owner
    if _owner != os.getpid():
        _pools.clear()
        _spawner, _owner = None, os.getpid()
    if not fresh and key in _pools:
        return _pools.pop(key)  # put back, at the end of the queue, if all goes well
    if _spawner is not None and not _spawner.usable:
        close_pools()
    if _spawner is None:
        _spawner = Spawner()
    while len(_pools) >= MAX_POOLS:
        _pools.pop(next(iter(_pools))).close()
    return Pool(_spawner, key[1], devices=devices)


def _death(worker: Worker) -> WorkerDiedError:
    code = worker.process.reap()
    words = worker.last_words()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    whose = f"the process of rank {worker.rank}"
    if len(worker.process.connections) > 1:
        # XLA ends all ranks when one does not come; which one that is can be seen from where they stood.
        places = [f"rank {rank}: {_top_of(text)}" for rank, text in worker.process.last_stacks().items()]
        how = f"with all ranks in it {how}" + "".join(f"\n{place}" for place in places)
    return WorkerDiedError(f"{whose} {how}" + (f"\n{words}" if words else ""), code)


def _top_of(stacks: str) -> str:
    """The innermost frame, and the innermost one that is neither ours nor in an installed library, on one line."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stacks.partition("\n\n")[0])
    if not frames:
        return stacks
    named = [f"{function} ({os.path.basename(file)}:{line})" for file, line, function in frames]
    not_theirs = re.compile(rf"{re.escape(_PACKAGE)}|.*site-packages|.*[/\\]lib[/\\]python")
    own = [name for name, (file, _, _) in zip(named, frames, strict=True) if not not_theirs.match(file)]
    called = f", called by {own[0]}" if own and own[0] != named[0] else ""
    return f"in {named[0]}{called}"


def _launcher_variables(place: Place) -> dict[str, str]:
    rank, size = str(place.rank), str(place.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
    }
