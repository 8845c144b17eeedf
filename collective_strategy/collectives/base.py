"""Life of a collective: set-up, tear-down, sub-groups, the way of one call, and the primitives a backend writes."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from collective_strategy.collectives.capabilities import Capabilities
from collective_strategy.collectives.checks import Checker, CheckMode, check_enabled
from collective_strategy.collectives.compiling import outside_graphs
from collective_strategy.collectives.counters import Counters
from collective_strategy.collectives.environment import LaunchEnvironment, read_environment
from collective_strategy.collectives.errors import (
    CollectiveError,
    CollectiveStateError,
    CollectiveTimeoutError,
    RankLeftError,
    call_failed,
    call_timed_out,
    was_forked,
)
from collective_strategy.collectives.handles import Handle
from collective_strategy.collectives.layout import NO_DEFAULT, MeshLayout, Partition
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.planned_call import Plan, outside_autocast
from collective_strategy.collectives.side_channel import SideChannel
from collective_strategy.collectives.watch import Monitor, Watch

log = logging.getLogger("collective_strategy")
T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(minutes=30)


class CollectiveBase(ABC):
    """What all collectives share below their operations. Backends derive from `Collective`, not from this class."""

    backend_name: ClassVar[str]
    """The name under which the backend is registered."""
    ranks_in_tests: ClassVar[str] = "process"
    """What a rank is under `collective_strategy.testing`: a ``"process"``, or a thread with a ``"device"`` of XLA's."""

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | float | None = None,
        mesh: Mapping[str, int] | None = None,
        unions: Mapping[str, Sequence[str]] | None = None,
        data_axis: str | None = NO_DEFAULT,
        check: CheckMode = "auto",
    ) -> None:
        """Keeps the settings; nothing is opened or sent.

        Args:
            device: Where tensors are communicated; the backend's default if not given.
            timeout: Seconds or timedelta for set-up, every operation and barrier; 30 minutes if not given.
            mesh: Axis names to sizes, row-major over the ranks, one may be -1: ``{"data": -1, "model": 2}``.
            unions: Names for joined axes that get a group of their own: ``{"batch": ("data", "ensemble")}``.
            data_axis: The axis that splits the batch; ``"data"`` if not given, None if there is none.
            check: Compare the ranks' calls before data moves: True, False, or ``"auto"`` (up to 16 ranks). The
                environment variable COLLECTIVE_STRATEGY_CHECK (0, 1, auto) wins.

        Raises:
            TypeError, ValueError: a setting is wrong whatever the number of ranks.
        """
        if mesh is not None:
            MeshLayout.check(mesh, unions, data_axis)
        elif unions or data_axis not in (NO_DEFAULT, None):
            raise ValueError("unions and data_axis belong to a mesh; give mesh={...} too.")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout must be positive, got {timeout!r} seconds.")
        check_enabled(check, 1)
        self.timeout = DEFAULT_TIMEOUT if seconds is None else timedelta(seconds=seconds)
        self._settings: dict[str, Any] = {"mesh": mesh, "unions": unions, "data_axis": data_axis, "check": check}
        self._device_setting = None if device is None else torch.device(device)
        self._reset()

    def _reset(self) -> None:
        self._state = "new"
        self._process = os.getpid()
        self.rank, self.world_size, self._node = -1, 0, 0
        self.ranks: tuple[int, ...] = ()
        self.name = "world"
        self.axis: str | tuple[str, ...] | None = None
        self.broken: str | None = None
        self.mesh: MeshLayout | None = None
        self.counters = Counters()
        self._root: CollectiveBase = self
        self._outside: str | None = None
        self._differentiated = False  # a collective with a backward was called; the gradient engine asks
        self._subgroups: dict[Any, Any] = {}
        self._parts: list[CollectiveBase] = []
        self._default_to: str | None = "replicate"
        self._calls = 0
        self._current = ""
        self._uncompared: str | None = None
        self._scope = "world"
        self._checker: Checker | None = None
        self._channel: SideChannel | None = None
        self._monitor: Monitor | None = None
        self._watch: Watch | None = None
        self._group: Any = None

    # -- set-up and tear-down ------------------------------------------------------------------------------------------

    def setup(self, environment: LaunchEnvironment | None = None, *, device: torch.device | str | None = None) -> Self:
        """Opens the communication and makes the mesh's groups. All ranks call it.

        Args:
            environment: This process' place; that of `launch_environment` if not given.
            device: Overrides the constructor's device (a strategy knows it only now).

        Returns:
            This collective, usable.

        Raises:
            CollectiveStateError: it is set up already.
            ValueError: the mesh does not fit the number of ranks.
            RendezvousError: the processes did not find each other within the time-out.
        """
        if self._state == "ready":
            raise CollectiveStateError("setup() was called on a collective that is set up; call teardown() first.")
        environment = environment or self.launch_environment()
        mesh, unions, data_axis = (self._settings[key] for key in ("mesh", "unions", "data_axis"))
        layout = None if mesh is None else MeshLayout.resolve(mesh, unions, data_axis, environment.world_size)
        checks = check_enabled(self._settings["check"], environment.world_size)
        self._reset()
        if device is not None:
            self._device_setting = torch.device(device)
        self.rank, self.world_size = environment.rank, environment.world_size
        self.ranks = tuple(range(self.world_size))
        self.mesh, self._node = layout, environment.node_rank
        try:
            self._channel = self._open(environment, f"mesh={layout}, timeout={self.timeout}, check={checks}")
            self._state = "ready"
            self._start_watching(checks)
            if layout is not None:
                self._make_axes(layout)
        except BaseException:
            self.teardown()
            raise
        return self

    def teardown(self) -> None:
        """Releases the groups. Local, does not wait for the other ranks, may be called twice or half set up.

        In check mode, ranks that still make calls get an error that says so at once.
        """
        if self._root is not self:
            raise CollectiveStateError(f"{self.name!r} is a part of another collective; tear that one down.")
        opened = self._state == "ready" or self._channel is not None
        if self.broken is None:
            self._leave("teardown() was called there, or its process ended")
        self._state = "closed"
        if self._monitor is not None:
            self._monitor.close()
        if opened:
            self._close()
        self._monitor = self._channel = self._checker = None
        self._subgroups, self._parts = {}, []

    def abort(self, reason: str) -> None:
        """Marks the collective and its parts unusable on this rank, for error paths. Waits for nobody.

        In check mode, ranks that wait for this one in a call, or come to it, get an error with the reason at once.

        Args:
            reason: Shown by every later call.
        """
        root = self._root
        if root.broken is None:
            root.broken = reason
            root._leave(reason)

    def _leave(self, reason: str) -> None:
        for part in (self, *self._parts):
            if part._checker is not None and os.getpid() == self._process:  # a forked process is not the rank
                part._checker.leave(part._calls + 1, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Settings only: live groups belong to a process."""
        if self._root is not self:
            raise CollectiveStateError(
                f"the sub-collective {self.name!r} cannot be pickled or copied; index it where needed."
            )
        blank: CollectiveBase = object.__new__(type(self))
        blank._reset()
        return {key: value for key, value in self.__dict__.items() if key not in blank.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.__dict__.update(state)

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}" if self._state == "ready" else self._state
        return f"<{type(self).__name__} {self.name!r}, {place}>"

    @classmethod
    def launch_environment(cls) -> LaunchEnvironment:
        """This process' place, as the launcher says that goes with the backend.

        Raises:
            EnvironmentConfigError: its variables are half set or contradict each other.
        """
        return read_environment()

    # -- what a user may ask -------------------------------------------------------------------------------------------

    @property
    def is_set_up(self) -> bool:
        """Whether operations can be called."""
        return self._root._state == "ready"

    @property
    def is_member(self) -> bool:
        """Whether this rank belongs to the group (false after ``split(None)``)."""
        return self._outside is None

    @property
    def global_rank(self) -> int:
        """This process' rank in the whole job."""
        return self._root.rank

    @property
    def device(self) -> torch.device:
        """Where tensors are communicated."""
        return self._device_setting or torch.device("cpu")

    @property
    def data_axis(self) -> str | None:
        """Name of the axis that splits the batch; None without a mesh or with ``data_axis=None``."""
        return self.mesh.data_axis if self.mesh is not None else None

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend does by itself and what is composed."""

    # -- primitives: a backend writes these ----------------------------------------------------------------------------
    #
    # Tensors are contiguous, detached, on a device and of a dtype that `capabilities` declares. Ranks are ranks of
    # this collective. `x` belongs to the primitive where it says so, and must be left alone elsewhere. The handle's
    # result must not share memory with an input that was to be left alone.

    @abstractmethod
    def _open(self, environment: LaunchEnvironment, settings: str) -> SideChannel | None:
        """Opens the world's group; ``settings`` must be equal on all ranks (compare it). Returns the side channel."""

    @abstractmethod
    def _close(self) -> None:
        """Releases what `_open` and `_new_group` made. Local; must work half opened."""

    @abstractmethod
    def _new_group(self, ranks: tuple[int, ...], partition: Partition, scope: str) -> Any:
        """Makes the group of the global ranks ``ranks``; called by its members only, in one order on all of them.

        ``scope`` is a name that its members agree on and no other group of this set-up has.
        """

    def _no_group(self, partition: Partition) -> None:  # noqa: B027
        """Called instead of `_new_group` by a rank that is alone or in no group."""

    @abstractmethod
    def _barrier(self) -> Handle:
        """Complete when all ranks have started it."""

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: ReduceOp) -> Handle:
        """The reduction, in ``x`` or in a new tensor. ``x`` belongs to the primitive."""

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> Handle:
        """The value of rank ``src``, in ``x`` or in a new tensor. ``x`` belongs to the primitive."""

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Handle:
        """A new tensor ``(world_size, *x.shape)`` in rank order. ``x`` is left alone."""

    def _reduce_scatter(self, x: Tensor, op: ReduceOp) -> Handle:
        """``x`` is ``(world_size, *shape)``; entry ``rank`` of the reduction. ``x`` belongs to the primitive."""
        from collective_strategy.collectives.composed import composed_reduce_scatter

        return composed_reduce_scatter(self, x, op)

    def _all_to_all(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Handle:
        """``x`` is flat, cut into pieces of lengths ``out``; piece k goes to rank k. ``x`` is left alone.

        The result is flat: the pieces of lengths ``into`` that arrived, in rank order. It may be longer, and where the
        backend compiles so may ``x`` be; what follows the pieces means nothing.
        """
        from collective_strategy.collectives.composed import composed_all_to_all

        return composed_all_to_all(self, x, out, into)

    def _permute(self, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Handle:
        """The flat tensor of the rank that sends here, zeros if none does; ``x`` is equally long on all ranks.

        Entries may follow that mean nothing.
        """
        from collective_strategy.collectives.composed import composed_permute

        return composed_permute(self, x, pairs)

    def _send(self, x: Tensor, dst: int) -> Handle:
        raise NotImplementedError(f"the backend {self.backend_name!r} has no send.")

    def _recv(self, x: Tensor, src: int) -> Handle:
        raise NotImplementedError(f"the backend {self.backend_name!r} has no recv.")

    def _is_timeout(self, error: BaseException) -> bool:
        """Whether an exception of the backend's library means that a rank did not come in time."""
        text = str(error).lower()
        return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text

    # -- groups --------------------------------------------------------------------------------------------------------

    def _make_axes(self, layout: MeshLayout) -> None:
        self._default_to = "replicate" if tuple(layout.axes) == (layout.data_axis,) else None
        groups: dict[str, tuple[str, ...]] = {name: (name,) for name in layout.axes}
        groups.update(layout.unions)
        for name, axes in groups.items():
            partition = layout.partition(axes, self.rank)
            sub = self._subgroup(name, name if len(axes) == 1 else axes, partition)
            if name == layout.data_axis:
                sub._default_to = "replicate"
            self._subgroups[name] = self._subgroups[axes] = sub

    def _subgroup(self, name: str, axis: Any, partition: Partition, default_to: str | None = None) -> Self:
        """This rank's group of a partition of this collective's ranks."""
        ranks = tuple(self.ranks[member] for member in partition.members)
        sub: Self = object.__new__(type(self))
        if len(ranks) == 1 and self.world_size > 1:
            from collective_strategy.collectives.single import SingleProcessCollective

            sub = object.__new__(SingleProcessCollective)  # type: ignore[assignment]
        sub.__dict__.update(self.__dict__)
        sub.rank, sub.world_size, sub.ranks = ranks.index(self.global_rank), len(ranks), ranks
        sub.name, sub.axis, sub.broken, sub.counters, sub.mesh = name, axis, None, Counters(), None
        sub._subgroups, sub._default_to, sub._calls, sub._current = {}, default_to, 0, ""
        sub._checker = sub._watch = sub._group = None
        # What the members agree on, and no other group of this set-up has. Not the name of a split: equal colors may
        # look different (1 and True, the order of a set).
        sub._scope = f"{self._scope}/{axis and name}/{self._calls}/{ranks[0]}"
        if len(ranks) > 1:
            sub._group = self._new_group(ranks, partition, sub._scope)
            if self._channel is not None:
                sub._channel = self._root._channel and self._root._channel.scoped(sub._scope)
            sub._start_watching(self._checker is not None)
            self._root._parts.append(sub)
        else:
            self._no_group(partition)
        return sub

    def _outsider(self, reason: str) -> Self:
        sub: Self = object.__new__(type(self))
        sub.__dict__.update(self.__dict__)
        sub.rank, sub.world_size, sub.ranks, sub._outside, sub.name = -1, 0, (), reason, "split"
        return sub

    def _start_watching(self, checks: bool) -> None:
        if self._channel is None or self.world_size == 1:
            return
        if checks:
            self._checker = Checker(self._channel.scoped("calls"), self.rank, self.world_size, self.timeout)
        self._watch = Watch(self.name, self.rank, self.ranks, self._channel)
        root = self._root
        if root._monitor is None:
            root._monitor = Monitor(self.timeout)
        self._watch.monitor_channel = self._channel.for_monitor()
        root._monitor.add(self._watch)

    # -- the way of one call -------------------------------------------------------------------------------------------

    @outside_graphs
    def _run(self, operation: str, plan: Callable[[], Plan]) -> Any:
        """State, arguments, comparison with the other ranks, then the operation."""
        self._require_usable(operation)
        self._calls += 1
        try:
            planned = plan()
        except Exception as refusal:  # a container of the user's may raise anything while it is taken apart
            if self._checker is not None:
                checker, error = self._checker, refusal
                self._current = operation
                self._guarded(lambda: checker.refuse(self._calls, operation, error))
            raise
        self._current = planned.call
        if self._checker is not None:
            checker, number = self._checker, self._calls
            self._guarded(lambda: checker.compare(number, planned.call, planned.details, planned.verify))
        self.counters.count(operation, planned.nbytes)
        with outside_autocast(self.device):
            return planned.run()

    def _require_usable(self, operation: str) -> None:
        if self._outside is not None:
            raise CollectiveStateError(f"{operation}: {self._outside}")
        state = self._root._state
        if state == "new":
            raise CollectiveStateError(
                f"{operation} was called before the collective was set up. Call setup() or collective_strategy.init() "
                "first; under a Trainer it is usable from the hooks setup() and configure_model() on."
            )
        if state == "closed":
            raise CollectiveStateError(
                f"{operation} was called after teardown(). Call setup() to use the collective again."
            )
        if os.getpid() != self._process:
            raise was_forked(operation, self._process)
        reason = self.broken or self._root.broken
        if reason:
            raise CollectiveStateError(f"{operation}: the collective {self.name!r} is broken: {reason}")

    def _guarded(self, act: Callable[[], T]) -> T:
        """Runs something that waits for other ranks: watched, timed, errors translated."""
        began = time.monotonic()
        text = self._current
        watch = self._watch
        if watch is not None:
            watch.call = (self._calls, text, began)
        try:
            return act()
        except RankLeftError as error:
            self._root.broken = str(error)
            raise
        except (CollectiveError, NotImplementedError):
            raise
        except Exception as error:
            told = self._translated(error, text, time.monotonic() - began)
            # a time-out's own message has everything that the library's says
            raise told from (None if isinstance(told, CollectiveTimeoutError) else error)
        finally:
            if watch is not None:
                watch.call = None
            self.counters.waited(text.partition("(")[0], time.monotonic() - began)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Gives what is communicated inside another name in errors and counters."""
        before, self._current = self._current, name
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def _backward_of(self, name: str, call: int) -> Iterator[None]:
        """Names what a backward pass communicates, if the collective can still be used.

        In check mode the first message inside is compared: a rank whose loss uses another result would otherwise meet
        the backward of another call.
        """
        self._require_usable(f"backward of {name}")
        self._uncompared = f"backward of {name} (call {call})" if self._checker is not None else None
        try:
            with self._named(f"backward of {name}"), outside_autocast(self.device):
                yield
        finally:
            self._uncompared = None

    def _compare_backward(self) -> None:
        """Compares the backward that is about to send its first message with the other ranks'."""
        call, self._uncompared = self._uncompared, None
        if call is not None and self._checker is not None:
            self._calls += 1
            checker, number = self._checker, self._calls
            self._guarded(lambda: checker.compare(number, call))

    def _translated(self, error: Exception, text: str, waited: float) -> CollectiveError:
        where = f"{text} (call {self._calls} of {self.name!r}, rank {self.rank} of {self.world_size})"
        if not self._is_timeout(error):
            self.broken = f"{where} failed: {error}"
            return call_failed(where, waited, error)
        self.broken = f"{where} timed out"
        missing: list[str] = []
        if self._watch is not None:
            try:
                self._watch.publish(self._calls, text)
                missing = self._watch.missing(self._calls)
            except Exception:
                log.debug("the side channel is gone", exc_info=True)
        return call_timed_out(where, waited, self.timeout.total_seconds(), missing, error)
