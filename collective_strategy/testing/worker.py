"""The process of one rank: waits for calls, runs each with a collective of its own, reports, tears down.

A call goes in two steps, so that a rank that is done keeps its connections open for those that are not:
``Call`` -> ``Report``, then ``RELEASE`` -> ``Closing``.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from collective_strategy.testing.guard import ProcessState, random_state
from collective_strategy.testing.outcome import Parcel, pack
from collective_strategy.testing.pickling import dumps

RELEASE = "release"
CLOSING_LIMIT = 10.0  # seconds for the tear-down


class Place(NamedTuple):
    """Where a rank stands and whom it meets. All ranks are on this host."""

    rank: int
    world_size: int
    port: int


@dataclass(frozen=True)
class Call:
    """One call for one rank. ``work`` is the pickled ``Work``, unpickled only once the path is set.

    After ``limit`` seconds without a report the process writes where its threads stand.
    """

    place: Place
    limit: float
    work: bytes
    environment: Mapping[str, str]
    directory: str
    path: list[str]


@dataclass(frozen=True)
class Work:
    """What to run. ``backend=None`` runs it without a collective."""

    function: Any
    arguments: tuple[Any, ...]
    backend: str | type | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What the function ended with. ``broken`` says why this process should not serve another call."""

    value: Parcel | None = None
    error: Parcel | None = None
    traceback: str = ""
    broken: str | None = None


@dataclass(frozen=True)
class Closing:
    """What the tear-down ended with: differences of process state, and an error of the tear-down itself."""

    differences: list[str]
    failure: str | None = None


class OwnProcess:
    """What a call does to its process before and after, where the process has one rank."""

    def __init__(self, stacks: int) -> None:
        self._stacks = stacks
        self._restore_random_state = random_state()

    def begin(self, call: Call) -> None:
        """Makes the process like the caller's."""
        self._restore_random_state()
        # Anew each time: a Trainer puts Python's default back for all signals when it is done.
        os.ftruncate(self._stacks, 0)
        os.lseek(self._stacks, 0, os.SEEK_SET)
        faulthandler.disable()
        faulthandler.enable(file=self._stacks)
        sys.path[:] = call.path
        os.chdir(call.directory)
        os.environ.clear()
        os.environ.update(call.environment)
        self.watch(call.limit)

    def together(self) -> None:
        """Waits for the other ranks of this process."""

    def collect_garbage(self) -> None:
        """When no rank uses the call's objects any more: what they hold should be gone before states are compared."""
        gc.collect()

    def watch(self, seconds: float) -> None:
        """Writes where all threads stand if that takes longer."""
        # A thread of the fault handler's, which neither a lock held by Python nor a signal that is taken can stop.
        faulthandler.dump_traceback_later(seconds, file=self._stacks)

    def unwatch(self) -> None:
        """It did not."""
        faulthandler.cancel_dump_traceback_later()

    def place(self, place: Place) -> Any:
        """The place of a rank, for the collective's set-up."""
        from collective_strategy.collectives.environment import LaunchEnvironment

        return LaunchEnvironment(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.rank,
            local_world_size=place.world_size,
            node_rank=0,
            master_addr="127.0.0.1",
            master_port=place.port,
            source="run_ranks",
        )


def serve(connection: Connection, lifeline: int, stacks: int) -> None:
    """Serves calls until the parent closes the connection. Never returns."""
    die_with_parent(lifeline)
    serve_rank(connection, OwnProcess(stacks))


def serve_rank(connection: Connection, process: OwnProcess) -> None:
    """Serves the calls of one rank. Never returns."""
    connection.send(threading.get_ident())
    try:
        while True:
            call: Call = connection.recv()
            process.begin(call)
            _serve_call(connection, call, process)
    except (EOFError, OSError):
        os._exit(0)


def die_with_parent(lifeline: int) -> None:
    """Ends this process when the parent is gone, however it went."""
    threading.Thread(target=_die_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()


def _die_with_parent(lifeline: int) -> None:
    # The parent holds the other end and never writes: reading returns when the parent is gone.
    os.read(lifeline, 1)
    os._exit(1)


def _serve_call(connection: Connection, call: Call, process: OwnProcess) -> None:
    collective: Any = None
    work: Work | None = None
    before: ProcessState | None = None
    failure: str | None = None
    was_set_up = False
    raised: type[BaseException] | None = None
    try:
        work = cloudpickle.loads(call.work)
        collective = _create(work)
        before = ProcessState.now()  # after the imports, which may set variables of their own
    except BaseException as error:
        report = Report(error=pack(error), traceback=_traceback(error))
    process.together()  # no rank has started anything yet
    if before is not None and work is not None:
        try:
            if collective is not None:
                collective.setup(process.place(call.place))
                was_set_up = True
            report = Report(value=pack(work.function(collective, *work.arguments)))
        except BaseException as error:  # SystemExit and pytest's outcomes too
            report, raised = Report(error=pack(error), traceback=_traceback(error)), type(error)
    process.unwatch()
    if collective is not None:
        report = replace(report, broken=collective.broken if was_set_up else "it could not be set up")
    connection.send(report)
    work = report = None  # type: ignore[assignment]  # what they hold should be gone before the state is compared
    if connection.recv() != RELEASE:
        raise RuntimeError("expected a release")
    process.watch(CLOSING_LIMIT)
    try:
        if collective is not None:
            collective.__exit__(raised, None, None)  # the tear-down, with or without an error
    except BaseException as error:
        failure = _traceback(error)
    collective = None
    process.collect_garbage()
    differences = before.differences() if before else []
    process.unwatch()
    connection.send(Closing(differences, failure))


def _create(work: Work) -> Any:
    if work.backend is None:
        return None
    if isinstance(work.backend, type):
        return work.backend(**work.options)
    from collective_strategy.collectives.registry import create_collective

    return create_collective(work.backend, **work.options)


def _traceback(error: BaseException) -> str:
    # Without this file's own frames at the top.
    entries = error.__traceback__
    while entries is not None and entries.tb_frame.f_code.co_filename == __file__:
        entries = entries.tb_next
    return "".join(traceback.format_exception(type(error), error, entries or error.__traceback__))


def work_bytes(function: Any, arguments: tuple[Any, ...], backend: str | type | None, options: dict[str, Any]) -> bytes:
    """Pickles the work. A module that a worker could not import by name travels by value."""
    work = Work(function, arguments, backend, options)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _importable(module.__name__):
        return dumps(work)
    cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(work)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    from importlib.machinery import PathFinder

    top = name.partition(".")[0]
    return top in sys.builtin_module_names or PathFinder.find_spec(top, sys.path) is not None
