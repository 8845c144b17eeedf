"""One backward pass: buckets go out in the plan's order as their gradients become ready."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.gradients.inventory import Communicators, Inventory
from collective_strategy.gradients.plan import Plan

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

    A bucket is looked at when the gradient of its trigger is ready, the member that was last in the backward before.
    Where one is missing then, because this backward goes another way, that one becomes the trigger.

    Args:
        plan: The buckets.
        inventory, communicators: The parameters and their groups.
        fired: The parameters whose gradient was accumulated in this backward, in their order; filled by hooks.
        deferred: Parameters whose gradients come in several pieces (reentrant checkpointing), known from earlier
            passes; their buckets wait for the end.
        awaited: Parameters that the engine does not announce (those in a reentrant checkpoint), known from earlier
            passes; their buckets wait for their hooks.
        hold: Launch nothing before the end.
        choice: The ranks' comparison of their plans; None where there is only one.

    Attributes:
        launched_by: How many hooks had fired when each bucket was launched, in launch order.
        used: Parameters that had a gradient when their bucket was filled.
        chosen: The lowest and the highest number of the ranks' plans, if they were compared.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        communicators: Communicators,
        fired: Mapping[int, Tensor],
        deferred: set[int],
        awaited: set[int],
        hold: bool,
        choice: Choice | None = None,
    ) -> None:
        self.plan = plan
        self.chosen: tuple[float, float] | None = None
        self.launched_by: list[int] = []
        self.used: set[int] = set()
        self._inventory = inventory
        self._communicators = communicators
        self._fired = fired
        self._silent: set[int] = set()
        self._awaited = awaited
        self._choice = choice
        self._filled = 0
        self._next = 0
        self._early = 0
        self._hooks: list[RemovableHandle] = []
        self._waits = [hold or not deferred.isdisjoint(bucket.members) for bucket in plan.buckets]
        for position, (bucket, waits) in enumerate(zip(plan.buckets, self._waits, strict=True)):
            if len(bucket.parts) > 1:  # the only one is moved when the bucket is filled
                for part, trigger in enumerate(bucket.triggers):
                    self._hook(trigger, functools.partial(self._move, position, part))
            if not waits:
                self._hook(bucket.trigger, self._advance)

    def _hook(self, index: int, hook: Callable[[Tensor], None]) -> None:
        parameter = self._inventory.parameters[index]
        if parameter.requires_grad:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _move(self, position: int, part: int, _parameter: Tensor) -> None:
        """A hook: the gradients of a part go into their bucket."""
        if position >= self._next:
            self.plan.buckets[position].move(part)

    def _advance(self, _parameter: Tensor) -> None:
        """A hook: sends the buckets whose turn it is and whose gradients are there."""
        while self._next < len(self._waits) and not self._waits[self._next]:
            bucket = self.plan.buckets[self._next]
            if bucket.trigger not in self._fired and not self._is_silent(bucket.trigger):
                return
            missing = [i for i in bucket.members if i not in self._fired and not self._is_silent(i)]
            if missing:
                bucket.trigger = max(missing, key=lambda i: abs(i - bucket.trigger))
                self.plan.order = []
                self._hook(bucket.trigger, self._advance)
                return
            if self.divided:
                return
            self._fill()
            self._send()

    def _is_silent(self, index: int) -> bool:
        """Asks the engine whether this pass leaves the parameter out, so that nobody waits for it.

        One inside a reentrant checkpoint is in a pass of its own; it counts as left out here until known better.
        """
        if index in self._silent:
            return True
        parameter = self._inventory.parameters[index]
        if parameter.requires_grad and (index in self._awaited or self._inventory.will_be_used(index)):
            return False
        self._silent.add(index)
        return True

    @property
    def divided(self) -> bool:
        """Whether ranks chose different plans; then nothing is sent. Waits for their comparison."""
        if self._choice is not None:
            self.chosen, self._choice = self._choice.wait(), None
        return self.chosen is not None and self.chosen[0] != self.chosen[1]

    @property
    def started(self) -> bool:
        """Whether something was sent."""
        return self._next > 0

    def abandon(self) -> None:
        """Nothing more is sent; gradients are where the user expects them."""
        for bucket in self.plan.buckets[self._next :]:
            bucket.abandon()

    def end(self) -> None:
        """The backward is over: hooks are removed, and the next one's triggers are known."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.plan.follow(list(self._fired))
        self._early = self._next

    def finish(self, header: Callable[[], list[bool]]) -> Flags:
        """Launches what is left, with zeros for parameters that stayed silent, and then the flags.

        Args:
            header: Asked when all that goes out in buckets is taken out of the parameters' gradients, and sent.
        """
        buckets = self.plan.buckets
        if self.divided:
            self.abandon()
            buckets = []
        while self._filled < len(buckets):
            self._fill()
        while self._next < len(buckets):
            self._send()
        return Flags(self._inventory, self._communicators, self.used, header())

    def too_late(self, leftover: Iterable[int]) -> tuple[set[int], set[int]]:
        """Which parameters' gradients came when their bucket had been sent.

        Args:
            leftover: Those that have a dense gradient when all buckets are filled.

        Returns:
            Those of which another piece was sent, and those whose bucket did not wait for them.
        """
        where = self.plan.where
        late = {i for i in leftover if where.get(i, self._early) < self._early}
        return late & self.used, late - self.used

    def _fill(self) -> None:
        # those made before this backward, under no_sync, are used too
        self.used.update(self.plan.buckets[self._filled].fill())
        self._filled += 1

    def _send(self) -> None:
        bucket = self.plan.buckets[self._next]
        self._next += 1
        self.launched_by.append(len(self._fired))
        bucket.send()


class Flags:
    """What the ranks tell each other at the end of a backward, in a small all-reduce in each group, while the last
    bucket is on its way. Made by all ranks.

    Per parameter, whether a rank used it; for the whole world, whether parameters changed, a backward ran behind our
    back, or something is left that no bucket took.

    Args:
        inventory, communicators: The parameters and their groups.
        used: The parameters that have a gradient.
        header: The flags for the whole world.
    """

    def __init__(self, inventory: Inventory, communicators: Communicators, used: set[int], header: list[bool]) -> None:
        groups: dict[tuple[str, ...], list[int]] = {communicators.everybody: [], **inventory.by_group}
        self._header = len(header)
        self._sent: list[tuple[list[int], Tensor, Handle]] = []
        for axes, members in sorted(groups.items()):  # one order on all ranks, whose models may differ
            group = communicators.over(axes)
            values = [*header, *[i in used for i in members]]
            buffer = communicators.summed(axes, torch.tensor(values, dtype=torch.float32, device=group.device))
            handle = group.all_reduce_(buffer, "sum", async_op=True)
            self._sent.append((members, buffer, handle if isinstance(handle, Handle) else CompletedHandle(buffer)))
            if axes == communicators.everybody:
                self._world = buffer

    def __len__(self) -> int:
        """The number of all-reduces."""
        return len(self._sent)

    def read(self) -> tuple[list[float], set[int]]:
        """Waits. Counts of the header's flags over the world, and the parameters that some rank used."""
        used: set[int] = set()
        for members, buffer, handle in self._sent:
            handle.wait()
            used.update(itertools.compress(members, buffer.tolist()[self._header :]))
        return self._world.tolist()[: self._header], used
