"""The strategy's `explain`, `verify` and `audit`: `collective_strategy.inspection` on the Trainer's module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from collective_strategy.collectives.errors import CollectiveStateError
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.gradients.reducer import GradientReducer
from collective_strategy.inspection import Audit, AuditReport, Explanation, ReplicaReport, explain, verify
from collective_strategy.sharing.roles import UnmarkedPolicy
from collective_strategy.strategies.communication import CommunicationBehaviour
from collective_strategy.strategies.replication import BufferPolicy

_BUFFERS = {
    "first": "at evaluation: the first rank's",
    "first_each_step": "before every batch: the first rank's",
    "mean": "at evaluation: the mean",
    "own": "at set-up only",
}


class InspectionBehaviour(CommunicationBehaviour):
    """What the module's weights are on the ranks, and whether copies are equal."""

    _communicators: Communicators | None
    _reducer: GradientReducer | None
    _buffers: BufferPolicy
    _unmarked: UnmarkedPolicy
    _reducer_settings: dict[str, Any]

    def explain(self, *, all_ranks: bool = False) -> Explanation:
        """A table of the module's weights: role on each axis, reduction, bucket, bytes; ``print`` shows it.

        Local, unless ``all_ranks``, when all ranks call it. From the module's set-up on, for instance in
        ``on_fit_start``; see `collective_strategy.explain`.
        """
        module = self._inspected("explain")
        settings = {key: self._reducer_settings[key] for key in ("sizes", "reduce_dtype", "compression")}
        return explain(
            module,
            self.collective,
            unmarked=self._unmarked,
            buffers=_BUFFERS[self._buffers],
            all_ranks=all_ranks,
            **settings,
        )

    def verify(
        self, *, repair: bool = False, optimizer_states: bool | None = None, buffers: bool | None = None
    ) -> ReplicaReport:
        """Compares all copies bit for bit; see `collective_strategy.verify`. Called by all ranks, between steps.

        Args:
            repair: Make copies equal that are not.
            optimizer_states: Compare them too; as ``repair`` if not given.
            buffers: Compare buffers too. If not given, only while evaluating: in training each rank updates its own.

        Raises:
            ReplicaDriftError: on all ranks, when copies differ and ``repair`` is false.
        """
        module = self._inspected("verify")
        with_states = repair if optimizer_states is None else optimizer_states
        if buffers is None:
            trainer = module.__dict__.get("_trainer")
            evaluating = trainer is not None and (trainer.validating or trainer.testing or trainer.predicting)
            buffers = evaluating and self._buffers != "own"
        return verify(
            module,
            self.collective,
            buffers=buffers,
            optimizers=self.optimizers if with_states else (),
            repair=repair,
            unmarked=self._unmarked,
            communicators=self._communicators,
        )

    def audit(self, batches: Sequence[Any]) -> AuditReport:
        """Runs ``training_step`` on batches and judges the marks by the ranks' gradients; see `audit`.

        Called by all ranks during fit, between steps; nothing changes. Two batches at least, as the data loader gives
        them, for instance ``[next(loader), next(loader)]`` of a loader of their own. The callback `AuditSharing` takes
        those of training.
        """
        if len(batches) < 2:
            raise ValueError(f"audit needs two batches at least, not {len(batches)}, to see what depends on them.")
        module = self._inspected("audit")
        running = self.start_audit()
        for index, batch in enumerate(batches):
            batch = self.precision_plugin.convert_input(batch)
            batch = self.batch_to_device(module._on_before_batch_transfer(batch))
            self.observe(running, batch, index)
        return running.report()

    def start_audit(self) -> Audit:
        """An audit of the module, for `observe`. Called by all ranks."""
        return Audit(self._inspected("audit"), self.collective, self._unmarked)

    def observe(self, running: Audit, batch: Any, batch_idx: int) -> None:
        """Runs ``training_step`` on a batch that is on its device, for an audit; logs and steps do nothing."""
        with suppress(Exception):
            batch = copy.deepcopy(batch)  # the step may change it
        module = self._inspected("audit")
        with self._without_effects(module) as backward, torch.enable_grad():

            def step() -> None:
                output = self.training_step(*_arguments(module.training_step, batch, batch_idx))
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if module.automatic_optimization and loss is not None:
                    backward(loss)

            running.observe(step)

    @contextmanager
    def _without_effects(self, module: Any) -> Iterator[Callable[..., None]]:
        """Within, backwards are local and call no hooks, optimizers and schedulers do not step, nothing is logged."""
        scaler = getattr(self.precision_plugin, "scaler", None)

        def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
            module.backward(loss if scaler is None else scaler.scale(loss), *args, **kwargs)

        trainer = module.trainer
        replaced = {
            (self, "backward"): lambda loss, optimizer, *args, **kwargs: backward(loss, *args, **kwargs),
            (self, "optimizer_step"): lambda optimizer, closure, *args, **kwargs: closure(),
            (module, "log"): lambda *args, **kwargs: None,
        }
        with ExitStack() as undo:
            reducer, self._reducer = self._reducer, None
            undo.callback(setattr, self, "_reducer", reducer)
            for (owner, name), stand_in in replaced.items():
                had = name in owner.__dict__
                undo.callback(owner.__dict__.__setitem__, name, owner.__dict__[name]) if had else undo.callback(
                    owner.__dict__.pop, name, None
                )
                owner.__dict__[name] = stand_in
            for config in trainer.lr_scheduler_configs:
                state = copy.deepcopy(config.scheduler.state_dict())
                undo.callback(config.scheduler.load_state_dict, state)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    undo.callback(group.update, {key: value for key, value in group.items() if key != "params"})
            yield backward

    def _inspected(self, what: str) -> Any:
        module = self.lightning_module
        if module is None or self._communicators is None or not self.collective.is_set_up:
            raise CollectiveStateError(
                f"strategy.{what}() works once trainer.fit (validate, test, predict) has set the module up; call it in "
                "on_fit_start, on_train_start or later."
            )
        return module


def _arguments(step: Callable[..., Any], batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """What ``training_step`` takes: a batch, and perhaps its index."""
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise TypeError(
            "audit cannot run a training_step(dataloader_iter), which takes batches by itself. Audit in a plain loop: "
            "collective_strategy.audit(module, collective, step)."
        )
    several = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return (batch, batch_idx) if several else (batch,)
