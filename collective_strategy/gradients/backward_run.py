"""One backward pass: buckets go out in the plan's order as their gradients become ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.gradients.inventory import Communicators, Inventory
from collective_strategy.gradients.plan import Bucket, Plan

CHANGED, DIRTY, LEFTOVER = range(3)


class Choice:
    """Compares the plans that the ranks chose, while backward runs. Made by all ranks.

    A rank that toggles a layer alone would send other buckets than the others, which ends some backends' processes.
    """

    def __init__(self, plan: Plan, communicators: Communicators) -> None:
        group = communicators.over(communicators.everybody)
        self._buffer = torch.tensor([plan.number, -plan.number], dtype=torch.float32, device=group.device)
        handle = group.all_reduce_(self._buffer, "max", async_op=True)
        self._handle = handle if isinstance(handle, Handle) else CompletedHandle(self._buffer)

    def wait(self) -> tuple[float, float]:
        """The lowest and the highest number of the ranks' plans."""
        self._handle.wait()
        highest, lowest = self._buffer.tolist()
        return -lowest, highest


class Choices:
    """Whether backwards begin with a comparison of the plans: from a change of the model on, until no rank has taken
    another plan for some time. All ranks come to the same answer, because they count what all of them saw.

    Attributes:
        compared: The next backward begins with a comparison.
    """

    patience = 100

    def __init__(self) -> None:
        self.compared = False
        self._quiet = 0
        self._last: tuple[float, float] | None = None

    def changed(self, *, first: bool) -> None:
        """The ranks agreed on the model; the first time there is one plan only."""
        self.compared, self._quiet = not first, 0

    def settled(self, chosen: tuple[float, float] | None) -> bool:
        """After a backward. True when comparisons end; then every rank forgets all plans but its present one."""
        self._quiet = self._quiet + 1 if chosen == self._last else 0
        self._last = chosen
        if not self.compared or self._quiet < self.patience:
            return False
        self.compared = False
        return True


class BackwardRun:
    """The launches of one backward pass.

    Args:
        plan: The buckets.
        inventory, communicators: The parameters and their groups.
        deferred: Parameters whose gradients come in several pieces (reentrant checkpointing), known from earlier
            passes; their buckets wait for the end.
        awaited: Parameters that the engine does not announce (those in a reentrant checkpoint), known from earlier
            passes; their buckets wait for their hooks.
        hold: Launch nothing before the end.
        choice: The ranks' comparison of their plans; None where there is only one.

    Attributes:
        launched_by: How many hooks had fired when each bucket was launched, in launch order.
        fired: Parameters whose gradient was accumulated.
        unannounced: Parameters whose only hook fired after their bucket was launched without them.
        late: Parameters with another piece of gradient accumulated after their bucket was launched.
        chosen: The lowest and the highest number of the ranks' plans, if they were compared.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        communicators: Communicators,
        deferred: set[int],
        awaited: set[int],
        hold: bool,
        choice: Choice | None = None,
    ) -> None:
        self.plan = plan
        self.chosen: tuple[float, float] | None = None
        self.launched_by: list[int] = []
        self.fired: set[int] = set()
        self.unannounced: set[int] = set()
        self.late: set[int] = set()
        self.hooks = 0
        self._inventory = inventory
        self._communicators = communicators
        self._silent: set[int] = set()
        self._awaited = awaited
        self._choice = choice
        self._filled = 0
        self._next = 0
        self._missing = [len(bucket.members) for bucket in plan.buckets]
        self._waits = [
            hold or bucket.flags > 0 or any(i in deferred for i in bucket.members) for bucket in plan.buckets
        ]
        for bucket in plan.buckets:
            bucket.begin()

    def accumulated(self, index: int) -> None:
        """A hook: the gradient of a parameter was accumulated."""
        self.hooks += 1
        if self.hooks == 1:
            self._find_silent()
        position = self.plan.where.get(index)
        if position is None:
            return
        if position < self._next:
            (self.late if index in self.fired else self.unannounced).add(index)
        else:
            if index not in self.fired and index not in self._silent:
                self._missing[position] -= 1
            bucket = self.plan.buckets[position]
            if index in bucket.large:
                with torch.no_grad():
                    bucket.move(bucket.large[index])
        self.fired.add(index)
        while self._next < len(self._missing) and not self._missing[self._next] and not self._waits[self._next]:
            if self.divided:
                return
            self._fill()
            self._send()

    @property
    def divided(self) -> bool:
        """Whether ranks chose different plans; then nothing is sent. Waits for their comparison."""
        if self._choice is not None:
            self.chosen, self._choice = self._choice.wait(), None
        return self.chosen is not None and self.chosen[0] != self.chosen[1]

    def _find_silent(self) -> None:
        """Asks the engine which parameters this pass leaves out, so that nobody waits for them.

        Those inside a reentrant checkpoint are in a pass of their own; they count as left out here until known better.
        """
        for position, bucket in enumerate(self.plan.buckets):
            for i in bucket.members:
                parameter = self._inventory.parameters[i]
                if i in self._awaited and parameter.requires_grad:
                    continue
                if not (parameter.requires_grad and self._inventory.will_be_used(i)):
                    self._silent.add(i)
                    self._missing[position] -= 1

    @property
    def started(self) -> bool:
        """Whether something was sent."""
        return self._next > 0

    def abandon(self) -> None:
        """Nothing more is sent; gradients are where the user expects them."""
        for bucket in self.plan.buckets[self._next :]:
            bucket.abandon(self.fired)

    def finish(self, header: Callable[[], list[bool]]) -> Flags:
        """Launches what is left, with zeros for parameters that stayed silent, and then the flags.

        Args:
            header: Asked when all that goes out in buckets is taken out of the parameters' gradients.
        """
        buckets = self.plan.buckets
        if self.divided:
            self.abandon()
            buckets = []
        while self._filled < len(buckets):
            self._fill()
        flags = Flags(self._inventory, self._communicators, self.fired, header(), buckets)
        while self._next < len(buckets):
            self._send(flags)
        flags.send_rest()
        return flags

    @torch.no_grad()
    def _fill(self) -> None:
        # those made before this backward, under no_sync, are used too
        self.fired.update(self.plan.buckets[self._filled].fill())
        self._filled += 1

    def _send(self, flags: Flags | None = None) -> None:
        bucket = self.plan.buckets[self._next]
        self._next += 1
        self.launched_by.append(self.hooks)
        bucket.send(flags.values(bucket.route.axes) if flags is not None and bucket.flags else None)


class Flags:
    """What the ranks tell each other at the end of a backward, once in each group: behind the gradients of its last
    bucket, or in a small buffer of its own where no bucket of the group is among the last ones.

    Per parameter, whether a rank used it; for the whole world, whether parameters changed, a backward ran behind our
    back, or something is left that no bucket took.

    Args:
        inventory, communicators: The parameters and their groups.
        used: The parameters that have a gradient.
        header: The flags for the whole world.
        buckets: Those that will take flags with them.
    """

    def __init__(
        self,
        inventory: Inventory,
        communicators: Communicators,
        used: set[int],
        header: list[bool],
        buckets: Sequence[Bucket],
    ) -> None:
        self._members = inventory.by_group()
        self._world = communicators.everybody
        self._members.setdefault(self._world, [])
        self._communicators = communicators
        self._used = used
        self._header = [float(flag) for flag in header]
        self._carriers = {bucket.route.axes: bucket for bucket in buckets if bucket.flags}
        self._buffers: dict[tuple[str, ...], tuple[Tensor, Handle]] = {}

    def values(self, axes: tuple[str, ...]) -> list[float]:
        """What this rank tells the group over ``axes``."""
        return self._header + [float(i in self._used) for i in self._members[axes]]

    def send_rest(self) -> None:
        """Sends what no bucket takes."""
        for axes in self._members:
            if axes in self._carriers:
                continue
            group = self._communicators.over(axes)
            buffer = torch.tensor(self.values(axes), dtype=torch.float32, device=group.device)
            handle = group.all_reduce_(buffer, "sum", async_op=True)
            self._buffers[axes] = buffer, handle if isinstance(handle, Handle) else CompletedHandle(buffer)

    @property
    def own_buffers(self) -> int:
        """How many groups' flags went by themselves."""
        return len(self._buffers)

    def read(self, carried: Mapping[tuple[str, ...], list[float]]) -> tuple[list[float], set[int]]:
        """Waits. Counts of the header's flags over the world, and the parameters that some rank used.

        Args:
            carried: The summed flags that came with buckets.
        """
        used: set[int] = set()
        header: list[float] = []
        for axes, members in self._members.items():
            if axes in self._buffers:
                buffer, handle = self._buffers[axes]
                handle.wait()
                sums: list[float] = buffer.tolist()
            else:
                sums = carried[axes]
            if axes == self._world:
                header = sums[: len(self._header)]
            used.update(i for i, count in zip(members, sums[len(self._header) :], strict=True) if count)
        return header, used
