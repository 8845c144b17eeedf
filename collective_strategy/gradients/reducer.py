"""`GradientReducer`: owns all gradient reductions of a module, of private and of shared weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.gradients.backward_run import CHANGED, DIRTY, LEFTOVER, BackwardRun, Flags
from collective_strategy.gradients.inventory import Communicators, Inventory
from collective_strategy.gradients.leftovers import reduce_leftovers
from collective_strategy.gradients.norms import NormOperations
from collective_strategy.gradients.plan import BucketSizes, Plan
from collective_strategy.sharing.roles import UnmarkedPolicy

_WAY_OUT = (
    "Call self.manual_backward(loss) instead of loss.backward(), or strategy.reduce_gradients() between the backward"
    " and the step (reducer.backward() and reducer.reduce_gradients() in a plain loop)."
)


@dataclass
class _Parts:
    """What a ``.grad`` consists of: ``reduced`` is equal on all ranks, ``local`` is this rank's own.

    ``reduced=None`` says that all of it is reduced.
    """

    reduced: Tensor | None = None
    local: Tensor | None = None


@dataclass
class ReducerStatistics:
    """What the reducer did, for tests, benchmarks and curious users.

    Attributes:
        reductions: Backward passes whose gradients were reduced.
        all_reduces: All-reduces sent, flag buffers included.
        agreements: Comparisons of the parameters over all ranks, the one at construction included.
        launched_by: For the last backward: how many gradient hooks had fired when each bucket was launched.
        hooks: For the last backward: how many gradient hooks fired in all.
    """

    reductions: int = 0
    all_reduces: int = 0
    agreements: int = 0
    launched_by: list[int] = field(default_factory=list)
    hooks: int = 0


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
        sizes: When gradients are packed together.
        reduce_dtype: A wider dtype for the way of narrower floating gradients, such as torch.float32 for bfloat16.
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
        static_graph: bool = False,
        communicators: Communicators | None = None,
    ) -> None:
        self.statistics = ReducerStatistics()
        self._module = module
        self._collective = collective
        self._communicators = communicators or Communicators(collective)
        self._unmarked: UnmarkedPolicy = unmarked
        self._sizes = sizes or BucketSizes()
        self._reduce_dtype = reduce_dtype
        self._static_graph = static_graph
        self._parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._dirty: set[int] = set()
        self._pending: set[int] = set()
        self._deferred: set[int] = set()
        self._sparse: set[int] = set()
        self._armed = False
        self._blocked = False
        self._run: BackwardRun | None = None
        self._broken: str | None = None
        self._hooks: dict[int, RemovableHandle] = {}
        self._step_hook: RemovableHandle | None = None
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self._take_inventory()
        if self._active:
            # a global hook, so that optimizers nobody registered with us are seen as well
            self._step_hook = register_optimizer_step_pre_hook(_weakly(self, "_before_step"))

    @property
    def _active(self) -> bool:
        return self._collective.world_size > 1

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
        if not self._active:
            yield
            return
        if self._armed:
            raise CollectiveError("reducer.backward() was entered inside itself; end the first backward before.")
        if self._broken:
            raise CollectiveError(self._broken)
        sync = sync and not self._blocked
        aside = self._set_aside()
        self._hook_parameters()
        changed = self._inventory.is_stale(self._module)
        if sync:
            changed |= self._choose_plan()
            self._run = BackwardRun(self._plan, self._inventory, self._deferred, self._must_hold())
        self._armed = True
        try:
            yield
        except BaseException as error:
            if self._run is not None and self._run.started:
                self._broken = (
                    f"a backward pass raised {type(error).__name__} after some of its gradients were sent, so the "
                    f"ranks' gradients "
                    "do not belong together any more. Make a new GradientReducer on all ranks, or end the run."
                )
            self._armed, self._run = False, None
            self._keep_local(aside)
            raise
        self._armed = False
        run, self._run = self._run, None
        if run is not None:
            self._flush(run, aside, changed)
        else:
            self._keep_local(aside)

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
        if not self._active:
            return
        self._dirty.clear()
        aside = self._set_aside()
        header, _ = Flags(self._inventory, self._communicators, set(), self._header(leftover=True)).wait()
        if header[CHANGED]:
            aside = self._take_inventory(aside)
        self._reduce_rest(aside)
        self.statistics.reductions += 1

    def close(self) -> None:
        """Removes all hooks. Local, idempotent."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    # -- parameters and plans ----------------------------------------------------------------------------------------

    def _take_inventory(self, aside: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """Looks at the module anew; all ranks do. Returns ``aside`` by the new indices."""
        old = getattr(self, "_inventory", None)
        before = {id(old.parameters[i]): gradient for i, gradient in (aside or {}).items()} if old is not None else {}
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {}
        self._inventory = Inventory(self._module, self._communicators, self._unmarked)
        self._interleaved = self._inventory.agree(self._communicators)
        self.statistics.agreements += 1
        if old is not None and old.signature != self._inventory.signature:
            self._plans, self._deferred, self._sparse = {}, set(), set()
        groups = self._inventory.prepare(self._communicators)
        self._plan = self._plans.setdefault(self._inventory.mask(), self._make_plan())
        self._prepare_norms(self._inventory, self._communicators, groups)
        if self._active:
            self._hook_parameters()
        return {self._inventory.index[key]: g for key, g in before.items() if key in self._inventory.index}

    def _make_plan(self) -> Plan:
        parameters = self._inventory.parameters
        members = [i for i in self._inventory.routed if parameters[i].requires_grad and i not in self._sparse]
        return Plan.make(
            self._inventory,
            self._communicators,
            members,
            self._sizes,
            self._reduce_dtype,
            interleaved=self._interleaved,
        )

    def _choose_plan(self) -> bool:
        """Takes the plan for what is trainable now; True if all ranks must agree on a new one first."""
        plan = self._plans.get(self._inventory.mask())
        if plan is None:
            return True
        self._plan = plan
        return False

    def _must_hold(self) -> bool:
        root = self._collective._root
        differentiated, root._differentiated = root._differentiated, False
        asynchronous = self._collective.device.type != "cpu"
        return not self._collective.capabilities.asynchronous or (
            asynchronous and differentiated and not self._static_graph
        )

    # -- before and during backward ----------------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        """Hooks the parameters that became trainable; torch refuses hooks on frozen ones."""
        for i in self._inventory.routed:
            parameter = self._inventory.parameters[i]
            if i not in self._hooks and parameter.requires_grad:
                callback = _weakly(self, "_after_accumulation", i)
                self._hooks[i] = parameter.register_post_accumulate_grad_hook(callback)

    def _after_accumulation(self, index: int, _parameter: Tensor) -> None:
        if not self._armed:
            self._dirty.add(index)
        elif self._run is not None:
            self._run.accumulated(index)

    def _set_aside(self) -> dict[int, Tensor]:
        """Takes the reduced part out of every ``.grad`` and leaves the local part there."""
        aside: dict[int, Tensor] = {}
        for i in self._inventory.routed:
            parameter = self._inventory.parameters[i]
            gradient = parameter.grad
            if gradient is None:
                # zero_grad() dropped it, and with it the reason for a complaint
                self._dirty.discard(i)
                self._pending.discard(i)
                continue
            parts: _Parts | None = self._parts.pop(gradient, None)
            if parts is None or i in self._dirty:
                # A backward behind our back may have gone on top; what is not known to be reduced counts as fresh.
                continue
            if parts.reduced is None:
                aside[i] = gradient
                parameter.grad = None
            elif parts.local is not None:
                # an in-place change since then (unscaling, zeroing) is taken to be equal on all ranks
                aside[i] = gradient - parts.local
                parameter.grad = parts.local
        return aside

    # -- after backward ----------------------------------------------------------------------------------------------

    def _keep_local(self, aside: dict[int, Tensor]) -> None:
        """Shows the sum to the user, and remembers which part of it is still local."""
        for i in self._inventory.routed:
            parameter = self._inventory.parameters[i]
            local = parameter.grad
            if local is not None:
                self._pending.add(i)
            if i not in aside:
                continue
            if local is None:
                parameter.grad = aside[i]
                self._parts[parameter.grad] = _Parts()
            else:
                parameter.grad = aside[i] + local
                self._parts[parameter.grad] = _Parts(reduced=aside[i], local=local)

    @torch.no_grad()
    def _flush(self, run: BackwardRun, aside: dict[int, Tensor], changed: bool) -> None:
        run.launch_rest()
        leftover = any(self._inventory.parameters[i].grad is not None for i in self._inventory.routed)
        header = self._header(leftover, changed)
        flags = Flags(self._inventory, self._communicators, run.fired, header)
        reduced = [(bucket, bucket.finish()) for bucket in run.plan.buckets]
        counts, used = flags.wait()
        for bucket, gradients in reduced:
            for i, gradient in zip(bucket.members, gradients, strict=True):
                if i in used:
                    aside[i] = self._added(aside.get(i), gradient)
        self._deferred |= run.late
        self.statistics.reductions += 1
        self.statistics.all_reduces += len(run.plan.buckets) + len(flags._buffers)
        self.statistics.launched_by, self.statistics.hooks = run.launched_by, run.hooks
        if counts[DIRTY]:
            self._show(aside)
            raise CollectiveError(self._dirty_message(int(counts[DIRTY])))
        if counts[CHANGED]:
            aside = self._take_inventory(aside)
        if counts[CHANGED] or counts[LEFTOVER]:
            self._reduce_rest(aside)
        else:
            self._show(aside)
        self._pending.clear()

    def _header(self, leftover: bool, changed: bool | None = None) -> list[bool]:
        if changed is None:
            changed = self._inventory.is_stale(self._module) or self._inventory.mask() not in self._plans
        return [changed, bool(self._dirty), leftover]

    @torch.no_grad()
    def _reduce_rest(self, aside: dict[int, Tensor]) -> None:
        """Reduces what lies in ``.grad`` and shows everything. Called by all ranks."""

        def write(i: int, gradient: Tensor) -> None:
            self._inventory.parameters[i].grad = None
            aside[i] = self._added(aside.get(i), gradient)

        sparse = reduce_leftovers(self._inventory, self._communicators, write)
        if not sparse <= self._sparse:
            self._sparse |= sparse
            self._plans = {}
            self._plan = self._plans.setdefault(self._inventory.mask(), self._make_plan())
        self._show(aside)
        self._pending.clear()
        self._dirty.clear()

    def _show(self, reduced: dict[int, Tensor]) -> None:
        for i, gradient in reduced.items():
            parameter = self._inventory.parameters[i]
            parameter.grad = gradient
            self._parts[gradient] = _Parts()

    @staticmethod
    def _added(before: Tensor | None, gradient: Tensor) -> Tensor:
        if before is None:
            return gradient
        if before.is_sparse or gradient.is_sparse:
            return before + gradient
        return before.add_(gradient)

    # -- at the optimizer step -----------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        def checked(closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                result = closure()
                self._refuse_unreduced(optimizer)
                return result

            return run

        # With a closure the backward runs inside step(): before it, local gradients of earlier micro-batches are
        # right, so the check comes after it. `args` starts with the optimizer.
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": checked(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], checked(args[1]), *args[2:]), kwargs
        self._refuse_unreduced(optimizer)
        return None

    def _refuse_unreduced(self, optimizer: Optimizer) -> None:
        if not self._dirty and not self._pending:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                i = self._inventory.index.get(id(parameter))
                if i is None or parameter.grad is None:
                    continue
                if i in self._dirty:
                    raise CollectiveError(self._dirty_message())
                if i in self._pending and bool(parameter.grad.any()):
                    raise CollectiveError(
                        f"{type(optimizer).__name__}.step() would use gradients of {self._inventory.names[i]} that "
                        f"were never"
                        f" averaged over the {self._collective.world_size} ranks: all backwards since the last "
                        f"reduction"
                        " ran with synchronisation off, so the ranks' weights would drift apart. Run the last backward"
                        " before the step with synchronisation on, or call strategy.reduce_gradients()."
                    )

    def _dirty_message(self, ranks: int | None = None) -> str:
        names = [self._inventory.names[i] for i in sorted(self._dirty)]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        where = f"of {shown} on rank {self._collective.global_rank}" if names else f"on {ranks} other rank(s)"
        return (
            f"A backward pass ran outside the strategy, so the gradients {where} were not averaged over the"
            f" {self._collective.world_size} ranks, and their weights would drift apart. {_WAY_OUT}"
        )


def _weakly(owner: object, method: str, *bound: Any) -> Callable[..., Any]:
    """A hook that neither keeps its owner alive nor fires after it is gone."""
    reference = weakref.ref(owner)

    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else getattr(alive, method)(*bound, *args)

    return hook
