"""When the strategy makes buffers equal, and which random numbers ranks draw."""

from __future__ import annotations

from typing import Any, Literal

from collective_strategy.collectives.random_numbers import seed_ranks
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.gradients.replicas import make_buffers_equal
from collective_strategy.sharing.roles import UnmarkedPolicy
from collective_strategy.strategies.communication import CommunicationBehaviour

BufferPolicy = Literal["first", "first_each_step", "mean", "own"]
RandomNumbers = Literal["auto", "by_data_rank", "as_they_are"]
_POLICIES: dict[str, tuple[str, ...]] = {
    "buffers": ("first", "first_each_step", "mean", "own"),
    "random_numbers": ("auto", "by_data_rank", "as_they_are"),
}


class ReplicationBehaviour(CommunicationBehaviour):
    """What replicas have in common beside gradients. The callback calls these at the right events."""

    _communicators: Communicators | None
    _unmarked: UnmarkedPolicy
    _buffers: BufferPolicy = "first"
    _random_numbers: RandomNumbers = "auto"

    def _choose_replication(self, buffers: BufferPolicy, random_numbers: RandomNumbers) -> None:
        """Takes the constructor's arguments.

        Raises:
            ValueError: an unknown policy.
        """
        for name, value in (("buffers", buffers), ("random_numbers", random_numbers)):
            if value not in _POLICIES[name]:
                raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, _POLICIES[name]))}.")
        self._buffers, self._random_numbers = buffers, random_numbers

    def sync_buffers(self, occasion: str) -> None:
        """Makes copies of buffers equal as the policy says. Called by every rank; ``occasion`` appears in errors."""
        module = self.lightning_module
        if self._buffers == "own" or module is None or self._communicators is None:
            return
        if not any(True for _ in module.buffers()) or self.collective.world_size == 1:
            return
        if self._can_communicate(f"synchronising buffers at {occasion}"):
            # a rank that is missing here is named, which the broadcast itself could not do
            self.collective.barrier(f"buffers at {occasion}")
            reduction: Literal["first", "mean"] = "mean" if self._buffers == "mean" else "first"
            make_buffers_equal(module, self._communicators, self._unmarked, reduction)

    def sync_buffers_each_step(self) -> None:
        """Before a training batch; does something with ``buffers="first_each_step"`` only."""
        module = self.lightning_module
        if self._buffers == "first_each_step" and module is not None and self._communicators is not None:
            make_buffers_equal(module, self._communicators, self._unmarked)

    def seed_data_ranks(self) -> None:
        """Before the first batch of a run: other random numbers on each data rank, equal ones in a model group."""
        resumed = self.__dict__.get("_resumed") is not None  # a checkpoint brings the states of this very rank
        wanted = self._random_numbers == "by_data_rank" or (
            self._random_numbers == "auto" and self.collective.mesh is not None
        )
        if wanted and not resumed and self._can_communicate("seeding random numbers"):
            seed_ranks(self.collective)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.sync_buffers("the checkpoint")
        return super().lightning_module_state_dict()
