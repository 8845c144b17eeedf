"""Callbacks that explain, verify and audit the weights during training. Bound to each Lightning package elsewhere."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from collective_strategy.inspection import Audit, SharingMistakeError
from collective_strategy.strategies.inspection import InspectionBehaviour

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
else:
    _Callback = object

log = logging.getLogger("collective_strategy")


class ExplainSharingBehaviour(_Callback):
    """Prints, once on rank 0 when fit starts, what each weight is on the mesh and how its gradient is reduced.

    Example::

        Trainer(strategy=CollectiveStrategy(mesh={"data": -1, "model": 2}), callbacks=[ExplainSharing()])
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        explanation = _strategy(self, trainer).explain(all_ranks=True)
        if trainer.is_global_zero:
            print(explanation, flush=True)


class VerifyReplicasBehaviour(_Callback):
    """Compares all copies of weights bit for bit, every n optimizer steps and when training ends.

    Args:
        every_n_steps: Optimizer steps from one comparison to the next.
        repair: Make copies equal again, with a warning that says which ones differed, instead of raising.
        optimizer_states: Compare the optimizers' states too; as ``repair`` if not given.
        buffers: Compare buffers too, which in training most modules update on each rank by itself.

    Raises:
        ReplicaDriftError: on all ranks, naming weight, ranks and size of the difference, unless ``repair``.

    Example::

        Trainer(strategy="collective", callbacks=[VerifyReplicas(every_n_steps=100)])
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        repair: bool = False,
        optimizer_states: bool | None = None,
        buffers: bool = False,
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, got {every_n_steps!r}.")
        self.every_n_steps = every_n_steps
        self.repair, self.optimizer_states, self.buffers = repair, optimizer_states, buffers
        self._verified = 0
        self._warned = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _strategy(self, trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._verified = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step // self.every_n_steps > self._verified // self.every_n_steps:
            self._verify(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step > self._verified:
            self._verify(trainer)

    def _verify(self, trainer: Any) -> None:
        self._verified = trainer.global_step
        strategy = _strategy(self, trainer)
        if not strategy._can_communicate("verifying replicas"):
            return
        report = strategy.verify(repair=self.repair, optimizer_states=self.optimizer_states, buffers=self.buffers)
        if not report.ok and trainer.is_global_zero:
            log.warning("after step %d: %s", trainer.global_step, report)
        elif report.not_finite and not self._warned:
            self._warned = True
            log.warning("after step %d: %s", trainer.global_step, report)


class AuditSharingBehaviour(_Callback):
    """Audits the marks of the weights on the first batches of training; see `collective_strategy.audit`.

    Each of these batches is run once more, before its own step, without a trace on the module. ``training_step`` must
    not write to the outside by other means than ``self.log``.

    Args:
        batches: How many; two at least.
        raise_on_mistake: Raise where a mark contradicts the gradients. Otherwise, and for questions, warn.

    Raises:
        SharingMistakeError: on all ranks, naming the weights.

    Example::

        Trainer(strategy=CollectiveStrategy(mesh={"data": -1, "model": 2}), callbacks=[AuditSharing()])
    """

    def __init__(self, batches: int = 2, *, raise_on_mistake: bool = True) -> None:
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 2:
            raise ValueError(f"AuditSharing needs two batches at least, got {batches!r}.")
        self.batches, self.raise_on_mistake = batches, raise_on_mistake
        self._running: Audit | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._running = _strategy(self, trainer).start_audit()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._running is not None:
            _strategy(self, trainer).observe(self._running, batch, batch_idx)
            if self._running.batches == self.batches:
                self._report(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._running is not None and self._running.batches:
            self._report(trainer)
        self._running = None

    def _report(self, trainer: Any) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        report = running.report()
        if trainer.is_global_zero:
            log.log(logging.INFO if report.ok else logging.WARNING, "%s", report)
        if report.mistakes and self.raise_on_mistake:
            raise SharingMistakeError(report)


def _strategy(callback: Any, trainer: Any) -> InspectionBehaviour:
    strategy = trainer.strategy
    if not isinstance(strategy, InspectionBehaviour):
        raise TypeError(
            f"{type(callback).__name__} needs the collective strategy, which knows what weights are; the Trainer has "
            f"{type(strategy).__name__}. Pass strategy='collective' or CollectiveStrategy(...)."
        )
    return strategy
