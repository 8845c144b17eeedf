"""The strategy's `explain` and `verify`: the tools of `collective_strategy.inspection` on the Trainer's module."""

from __future__ import annotations

from typing import Any

from torch import nn

from collective_strategy.collectives.errors import CollectiveStateError
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.inspection import Explanation, ReplicaReport, explain, verify
from collective_strategy.sharing.roles import UnmarkedPolicy
from collective_strategy.strategies.communication import CommunicationBehaviour


class InspectionBehaviour(CommunicationBehaviour):
    """What the module's weights are on the ranks, and whether copies are equal."""

    _communicators: Communicators | None
    _unmarked: UnmarkedPolicy
    _reducer_settings: dict[str, Any]

    def explain(self, *, all_ranks: bool = False) -> Explanation:
        """A table of the module's weights: role on each axis, reduction, bucket, bytes; ``print`` shows it.

        Local, unless ``all_ranks``, when all ranks call it. From the module's set-up on, for instance in
        ``on_fit_start``; see `collective_strategy.explain`.
        """
        module = self._inspected("explain")
        settings = {key: self._reducer_settings[key] for key in ("sizes", "reduce_dtype", "compression")}
        return explain(module, self.collective, unmarked=self._unmarked, all_ranks=all_ranks, **settings)

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
            buffers = trainer is not None and not trainer.training
        return verify(
            module,
            self.collective,
            buffers=buffers,
            optimizers=self.optimizers if with_states else (),
            repair=repair,
            unmarked=self._unmarked,
            communicators=self._communicators,
        )

    def _inspected(self, what: str) -> nn.Module:
        module = self.lightning_module
        if module is None or self._communicators is None or not self.collective.is_set_up:
            raise CollectiveStateError(
                f"strategy.{what}() works once trainer.fit (validate, test, predict) has set the module up; call it in "
                "on_fit_start, on_train_start or later."
            )
        return module
