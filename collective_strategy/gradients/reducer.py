"""`GradientReducer`: owns all gradient reductions of a module, of private and of shared weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.gradients.backward_run import CHANGED, DIRTY, LEFTOVER, BackwardRun, Choice, Choices, Flags
from collective_strategy.gradients.guard import StepGuard
from collective_strategy.gradients.increments import Increments, added
from collective_strategy.gradients.inventory import Communicators, Inventory
from collective_strategy.gradients.leftovers import reduce_leftovers
from collective_strategy.gradients.norms import NormOperations
from collective_strategy.gradients.plan import BucketSizes, Plan
from collective_strategy.gradients.replicas import BufferReduction, broadcast_replicas, make_buffers_equal
from collective_strategy.gradients.statistics import ReducerStatistics
from collective_strategy.sharing.roles import UnmarkedPolicy


class GradientReducer(NormOperations):
    """Reduces the gradients of a module over the ranks of a collective; each increment exactly once.

    Over the data axis gradients are averaged; over the axes on which a weight is marked `shared`, summed or averaged as
    its mark says, in the same all-reduce. Buckets are launched during backward, in one order on all ranks, as their
    gradients become ready.

    Construction is an act of all ranks of ``collective``, at the same place, after the module is on its device and
    before gradients exist. With one rank it does nothing.

    Only the gradient that is *fresh*, added since the last reduction, is reduced; what was reduced before stays.
    So accumulation, several backwards before a step, toggled optimizers with old gradients, and increments made
    under :meth:`no_sync` are all right. A parameter that no rank used keeps ``grad=None``; one that some rank
    used counts as zero on the others. Frozen parameters are not sent. Ranks may use layers in different orders, and
    leave some out.

    The module is not wrapped and may be deep-copied and pickled: hooks stay behind.

    Args:
        module: The parameters to look after. New, replaced or converted ones are found at the next backward.
        collective: All ranks; its mesh says which axis is the data axis and which are model axes.
        unmarked: What a weight without a mark is on the model axes: ``"private"``, ``"shared"`` (summed), ``"error"``.
        sizes: When gradients are packed together; as the backend prefers by default.
        reduce_dtype: A wider dtype for the way of narrower floating gradients, such as torch.float32 for bfloat16.
        compression: A narrower dtype for the way of wider floating gradients, such as torch.bfloat16 for float32.
        static_graph: The user promises that all ranks run the same operations in the same order in backward. Without
            it, on asynchronous devices, buckets wait for the end of a backward whose forward communicated, because two
            groups in flight there must be launched in one order.
        communicators: The engine's groups, to use those of an earlier reducer again.

    Raises:
        CollectiveMismatchError: on all ranks, when names, shapes, dtypes, ``requires_grad`` or marks differ within a
            group; it names the first parameter that does and the ranks.
        ValueError: a mark is wrong, see `resolve_roles`.

    Example::

        reducer = GradientReducer(model, collective)
        reducer.broadcast_replicas()
        with reducer.backward():
            loss.backward()
        reducer.clip_grad_norm_(1.0)
        optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        collective: Collective,
        *,
        unmarked: UnmarkedPolicy = "private",
        sizes: BucketSizes | None = None,
        reduce_dtype: torch.dtype | None = None,
        compression: torch.dtype | None = None,
        static_graph: bool = False,
        communicators: Communicators | None = None,
    ) -> None:
        self.statistics = ReducerStatistics()
        self._module = module
        self._collective = collective
        self._communicators = communicators or Communicators(collective)
        self._unmarked: UnmarkedPolicy = unmarked
        self._sizes = BucketSizes.suited_to(collective.capabilities, sizes)
        self._wire_dtypes = reduce_dtype, compression
        self._static_graph = static_graph
        self._increments = Increments()
        self._deferred: set[int] = set()
        self._awaited: set[int] = set()
        self._sparse: set[int] = set()
        self._blocked = False
        self._broken: str | None = None
        self._mask: tuple[bool, ...] = ()
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self._choices = Choices()
        self._guard: StepGuard | None = None
        self._take_inventory()

    # -- the public face ---------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, sync: bool = True) -> Iterator[None]:
        """Surrounds one backward pass; with ``sync`` its gradients, and earlier local ones, are reduced at the end.

        Every rank enters it equally often and with the same ``sync``, whether or not its loss used any parameter.
        With ``sync=False`` nothing is sent and the gradients stay local until a later call with ``sync=True``.

        Raises:
            CollectiveError: on all ranks, when some rank ran a backward outside this context since the last
                reduction, or when the ranks disagree about which parameters are trainable.
        """
        guard = self._guard
        if guard is None:
            yield
            return
        if guard.armed:
            raise CollectiveError("reducer.backward() was entered inside itself; end the first backward before.")
        if self._broken:
            raise CollectiveError(self._broken)
        sync = sync and not self._blocked
        guard.arm()
        run: BackwardRun | None = None
        try:
            aside = self._increments.set_aside(self._inventory, guard)
            changed = self._choose_plan(guard)
            if sync:
                run = self._begin_run(guard)
            try:
                yield
            except BaseException as error:
                if run is not None and run.started:
                    self._broken = (
                        f"a backward pass raised {type(error).__name__} after some of its gradients were sent, so the "
                        "ranks' gradients do not belong together any more. Make a new GradientReducer on all ranks, or "
                        "end the run."
                    )
                if run is not None:
                    run.abandon()
                self._increments.keep_local(self._inventory, guard, aside)
                raise
            finally:
                if run is not None:
                    run.end()
            if run is None:
                self._increments.keep_local(self._inventory, guard, aside)
            else:
                self._flush(guard, run, aside, changed)
        finally:
            guard.disarm()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside stay local, whatever their ``sync`` says. Entered by every rank."""
        before, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = before

    def reduce_gradients(self) -> None:
        """Reduces now what is not reduced yet, also gradients of backwards that ran outside :meth:`backward`.

        Called by every rank. It waits for each of its all-reduces.
        """
        guard = self._guard
        if guard is None:
            return
        inseparable = self._increments.inseparable(self._inventory, guard)
        aside = self._increments.set_aside(self._inventory, guard)
        changed = self._inventory.mask() not in self._plans or self._inventory.is_stale(self._module)
        header = [changed, bool(inseparable), True]
        counts, _ = Flags(self._inventory, self._communicators, set(), header).read()
        if counts[DIRTY]:
            self._increments.show(self._inventory, aside)
            raise CollectiveError(
                f"A backward pass outside the reducer added to gradients that were reduced before"
                f"{' (' + inseparable + ')' if inseparable else ' on another rank'}. What is added to a weight that is "
                "summed over a model axis cannot be told from the sum any more. Set the gradients to None before such "
                "a backward (optimizer.zero_grad()), or run it inside reducer.backward()."
            )
        guard.dirty.clear()
        if counts[CHANGED]:
            aside = self._take_inventory(aside)
        self._reduce_rest(guard, aside)
        self.statistics.reductions += 1

    def broadcast_replicas(self) -> None:
        """Starts replicas equal: parameters and buffers become those of the first rank of the group that shares them.

        That is the data axis, and the axes over which a weight is marked shared. Called by all ranks.
        """
        broadcast_replicas(self._module, self._communicators, self._unmarked)

    def make_buffers_equal(self, reduction: BufferReduction = "first") -> None:
        """Gives all copies of a buffer the values of the first rank, or the mean. Called by all ranks.

        For running statistics, which each rank updates by itself, before evaluation and before they are saved.
        """
        make_buffers_equal(self._module, self._communicators, self._unmarked, reduction)

    def close(self) -> None:
        """Removes all hooks. Local, idempotent."""
        if self._guard is not None:
            self._guard.close()

    def _take_inventory(self, aside: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """Looks at the module anew; all ranks do. Returns ``aside`` by the new indices."""
        old = getattr(self, "_inventory", None)
        before = {id(old.parameters[i]): gradient for i, gradient in (aside or {}).items()} if old is not None else {}
        self._inventory = Inventory(self._module, self._communicators, self._unmarked)
        self._interleaved = self._inventory.agree(self._communicators)
        self.statistics.agreements += 1
        self._choices.changed(first=old is None)
        if old is not None and old.signature != self._inventory.signature:
            self._plans, self._deferred, self._awaited, self._sparse = {}, set(), set(), set()
        self._mask = ()
        groups = self._inventory.prepare(self._communicators)
        self._plan = self._plans.setdefault(self._inventory.mask(), self._make_plan())
        self._plan.number = self.statistics.agreements
        self._prepare_norms(self._inventory, self._communicators, groups)
        if self._collective.world_size > 1:
            if self._guard is None:
                self._guard = StepGuard(self._inventory, self._collective)
            else:
                self._guard.watch(self._inventory)
        return {self._inventory.index[key]: g for key, g in before.items() if key in self._inventory.index}

    def _make_plan(self) -> Plan:
        parameters = self._inventory.parameters
        members = [i for i in self._inventory.routed if parameters[i].requires_grad and i not in self._sparse]
        return Plan.make(
            self._inventory,
            self._communicators,
            members,
            self._sizes,
            *self._wire_dtypes,
            interleaved=self._interleaved,
        )

    def _choose_plan(self, guard: StepGuard) -> bool:
        """Takes the plan for what is trainable now; True if all ranks must agree on a new one first."""
        mask = self._inventory.mask()
        if mask != self._mask:
            guard.hook_parameters()
            self._mask = mask
        plan = self._plans.get(mask)
        if plan is None:
            return True
        self._plan = plan
        return False

    def _begin_run(self, guard: StepGuard) -> BackwardRun:
        choice = Choice(self._plan, self._communicators) if self._choices.compared else None
        self.statistics.all_reduces += choice is not None
        return BackwardRun(
            self._plan,
            self._inventory,
            self._communicators,
            guard.fired,
            self._deferred,
            self._awaited,
            self._must_hold(),
            choice,
        )

    def _must_hold(self) -> bool:
        root = self._collective._root
        differentiated, root._differentiated = root._differentiated, False
        asynchronous = self._collective.device.type != "cpu"
        return not self._collective.capabilities.asynchronous or (
            asynchronous and differentiated and not self._static_graph
        )

    # -- after backward ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _flush(self, guard: StepGuard, run: BackwardRun, aside: dict[int, Tensor], changed: bool) -> None:
        leftover: dict[int, Tensor] = {}

        def header() -> list[bool]:
            parameters = self._inventory.parameters
            leftover.update((i, g) for i in self._inventory.routed if (g := parameters[i].grad) is not None)
            return [changed or self._inventory.is_stale(self._module), bool(guard.dirty), bool(leftover)]

        flags = run.finish(header)
        buckets = [] if run.divided else run.plan.buckets
        # what can be done while the last buckets are on their way is done before they are waited for
        reduced = {i: gradient for bucket in buckets for i, gradient in bucket.results().items()}
        counts, used = flags.read()
        if not used.issuperset(reduced):
            reduced = {i: gradient for i, gradient in reduced.items() if i in used}
        kept = all(bucket.outlives_step for bucket in buckets)
        self._increments.remember(self._inventory, reduced, kept=kept)
        late, unannounced = run.too_late(i for i, gradient in leftover.items() if not gradient.is_sparse)
        if run.divided:
            aside = self._take_inventory(aside)  # raises where the same weights are trainable on some ranks only
        converted: dict[int, Tensor] = {}
        for bucket in buckets:
            converted.update((i, gradient) for i, gradient in bucket.wait().items() if i in used)
        aside |= {i: added(before, converted.get(i, reduced[i])) for i, before in aside.items() if i in reduced}
        instead = converted | aside
        self._increments.remember(self._inventory, instead)
        aside = reduced | instead if instead else reduced
        if self._choices.settled(run.chosen):
            self._plans = {mask: plan for mask, plan in self._plans.items() if plan is self._plan}
        self._deferred |= late
        self._awaited |= unannounced
        self.statistics.reductions += 1
        self.statistics.all_reduces += len(buckets) + len(flags)
        self.statistics.launched_by, self.statistics.hooks = run.launched_by, len(guard.fired)
        if counts[DIRTY]:
            self._increments.show(self._inventory, aside)
            raise CollectiveError(guard.dirty_message(int(counts[DIRTY])))
        if counts[CHANGED]:
            aside = self._take_inventory(aside)
        if run.divided or counts[CHANGED] or counts[LEFTOVER]:
            self._reduce_rest(guard, aside)
        else:
            self._increments.place(self._inventory, aside)
            guard.clear()

    @torch.no_grad()
    def _reduce_rest(self, guard: StepGuard, aside: dict[int, Tensor]) -> None:
        """Reduces what lies in ``.grad`` and shows everything. Called by all ranks."""

        def write(i: int, gradient: Tensor) -> None:
            self._inventory.parameters[i].grad = None
            aside[i] = added(aside.get(i), gradient)

        sparse = reduce_leftovers(self._inventory, self._communicators, write)
        if not sparse <= self._sparse:
            self._sparse |= sparse
            number, self._plans = self._plan.number, {}
            self._plan = self._plans.setdefault(self._inventory.mask(), self._make_plan())
            self._plan.number = number
        self._increments.show(self._inventory, aside)
        guard.clear()
