"""Reduces the gradients of one module over one collective, once each, between backward and step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveError, CollectiveMismatchError
from collective_strategy.gradients.fingerprint import agree, parameter_entries
from collective_strategy.gradients.guard import StepGuard
from collective_strategy.gradients.plan import ReductionPlan, reduce_dense, reduce_sparse


@dataclass
class _Parts:
    """What a ``.grad`` consists of: ``reduced`` is equal on all ranks, ``local`` is this rank's own.

    ``reduced=None`` says that all of it is reduced.
    """

    reduced: Tensor | None = None
    local: Tensor | None = None


class GradientReducer:
    """Averages gradients over the ranks of ``collective``; each increment is reduced exactly once.

    Construction is collective: every rank of ``collective`` constructs its reducer at the same place, after the
    module is on its device and before gradients exist. With one rank it does nothing.

    Only the gradient that is *fresh*, added since the last reduction, is reduced; what was reduced before stays.
    So accumulation, several backwards before a step, toggled optimizers with old gradients, and increments made
    under :meth:`no_sync` are all right. A parameter that no rank used keeps ``grad=None``; one that some rank
    used counts as zero on the others. Frozen parameters are not sent.

    The module is not wrapped and may be deep-copied and pickled: hooks stay behind.

    Args:
        module: the parameters to look after. New, replaced or converted ones are found at the next backward.
        collective: the data axis.

    Raises:
        CollectiveMismatchError: on all ranks, when names, shapes, dtypes or ``requires_grad`` differ; it names the
            first parameter that does and the ranks.

    Example::

        reducer = GradientReducer(model, collective.data)
        with reducer.backward():
            loss.backward()
        optimizer.step()
    """

    def __init__(self, module: nn.Module, collective: Collective) -> None:
        self._module = module
        self._collective = collective
        self._plan = ReductionPlan.of(module)
        self._parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._blocked = False
        agree(collective, parameter_entries(module))
        self._guard = StepGuard(self._plan, collective) if collective.world_size > 1 else None

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
        sync = sync and not self._blocked
        aside = self._set_aside(guard)
        guard.hook_parameters()
        guard.armed = True
        try:
            yield
        except BaseException:
            guard.armed = False
            self._keep_local(guard, aside)
            raise
        guard.armed = False
        if sync:
            self._flush(guard, aside)
        else:
            self._keep_local(guard, aside)

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

        Called by every rank.
        """
        if self._guard is not None:
            self._guard.dirty.clear()
            self._flush(self._guard, self._set_aside(self._guard))

    def close(self) -> None:
        """Removes all hooks. Local, idempotent."""
        if self._guard is not None:
            self._guard.close()

    # -- before backward -----------------------------------------------------------------------------------------

    def _set_aside(self, guard: StepGuard) -> dict[int, Tensor]:
        """Takes the reduced part out of every ``.grad`` and leaves the local part there."""
        aside: dict[int, Tensor] = {}
        for i, parameter in enumerate(self._plan.parameters):
            gradient = parameter.grad
            if gradient is None:
                guard.forget(i)
                continue
            parts: _Parts | None = self._parts.pop(gradient, None)
            if parts is None:
                continue
            if parts.reduced is None and i not in guard.dirty:
                aside[i] = gradient
                parameter.grad = None
            elif parts.local is not None and i not in guard.dirty:
                # an in-place change since then (unscaling, zeroing) is taken to be equal on all ranks
                aside[i] = gradient - parts.local
                parameter.grad = parts.local
            # else: a backward behind our back went on top; the mean of what was equal is itself again
        return aside

    # -- after backward ------------------------------------------------------------------------------------------

    def _keep_local(self, guard: StepGuard, aside: dict[int, Tensor]) -> None:
        """Shows the sum to the user, and remembers which part of it is still local."""
        for i, parameter in enumerate(self._plan.parameters):
            local = parameter.grad
            if local is not None:
                guard.pending.add(i)
            if i not in aside:
                continue
            if local is None:
                parameter.grad = aside[i]
                self._parts[parameter.grad] = _Parts()
            else:
                parameter.grad = aside[i] + local
                self._parts[parameter.grad] = _Parts(reduced=aside[i], local=local)

    @torch.no_grad()
    def _flush(self, guard: StepGuard, aside: dict[int, Tensor]) -> None:
        flags = self._exchange_flags(guard)
        if flags is None:
            # some rank's parameters changed: agree on a new plan; indices in `aside` follow the parameters
            before = {id(self._plan.parameters[i]): gradient for i, gradient in aside.items()}
            self._replan(guard)
            aside = {self._plan.index[key]: gradient for key, gradient in before.items() if key in self._plan.index}
            flags = self._exchange_flags(guard)
            assert flags is not None
        used, sparse = flags
        parameters = self._plan.parameters
        dense = [i for i in used if i not in sparse]
        means = reduce_dense(
            self._collective,
            [parameters[i] for i in dense],
            [_densified(parameters[i].grad) for i in dense],
        )
        for i, mean in zip(dense, means, strict=True):
            self._write_back(i, mean, aside.pop(i, None))
        for i in sorted(sparse):
            mean = reduce_sparse(self._collective, parameters[i], parameters[i].grad)
            self._write_back(i, mean, aside.pop(i, None))
        for i, gradient in aside.items():
            parameters[i].grad = gradient
            self._parts[gradient] = _Parts()
        guard.clear()

    def _write_back(self, index: int, mean: Tensor, reduced_before: Tensor | None) -> None:
        parameter = self._plan.parameters[index]
        if reduced_before is not None:
            sparse = mean.is_sparse or reduced_before.is_sparse
            parameter.grad = reduced_before + mean if sparse else reduced_before.add_(mean)
        elif mean.is_sparse:
            parameter.grad = mean
        elif parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty_like(parameter).copy_(mean)
        else:
            parameter.grad.copy_(mean)
        assert parameter.grad is not None
        self._parts[parameter.grad] = _Parts()

    def _exchange_flags(self, guard: StepGuard) -> tuple[list[int], set[int]] | None:
        """One small all-reduce tells every rank who used what.

        Returns:
            The indices that some rank used, and those of them whose gradients are all sparse; None when some
            rank's list of parameters is out of date.
        """
        parameters, names = self._plan.parameters, self._plan.names
        stale = self._plan.is_stale(self._module)
        header = [float(bool(guard.dirty)), float(stale)]
        used = [float(p.grad is not None) for p in parameters]
        sparse = [float(p.grad is not None and p.grad.is_sparse) for p in parameters]
        trainable = [float(p.requires_grad) for p in parameters]
        flags = torch.tensor(header + used + sparse + trainable, dtype=torch.float32, device=self._collective.device)
        self._collective.all_reduce_(flags, "sum")
        sums = flags.tolist()
        n, count = self._collective.world_size, len(parameters)
        if sums[0]:
            raise CollectiveError(guard.dirty_message(int(sums[0])))
        if sums[1]:
            return None
        sums = sums[2:]
        for i, total in enumerate(sums[2 * count :]):
            if total not in (0, n):
                raise CollectiveMismatchError(
                    f"Parameter {names[i]} is trainable on {int(total)} of {n} ranks (here requires_grad="
                    f"{parameters[i].requires_grad}). Its average would mix trained and frozen copies. Freeze and"
                    " unfreeze it on every rank in the same step."
                )
        some_used = [i for i in range(count) if sums[i]]
        all_sparse = {i for i in some_used if sums[count + i] == sums[i]}
        return some_used, all_sparse

    def _replan(self, guard: StepGuard) -> None:
        self._plan = ReductionPlan.of(self._module)
        agree(self._collective, parameter_entries(self._module))
        guard.watch(self._plan)


def _densified(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
