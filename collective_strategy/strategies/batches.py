"""Do the ranks that hold one model together get the same batches?"""

import hashlib
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveMismatchError
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.strategies.communication import CommunicationBehaviour

BatchPolicy = Literal["check", "broadcast", "different"]
CHECKED = 2  # batches per stage and dataloader; data sets that differ do so from the start


class BatchAgreement:
    """Sees to it that batches are equal on the ranks that differ on model axes only.

    ``"check"``: the first batches of every stage are compared, whatever a dataset, a sampler or an augmentation did.
    ``"broadcast"``: the first model rank's batch goes to the others. ``"different"``: the user wants it so.
    """

    def __init__(self, collective: Collective, policy: BatchPolicy, model_axes: tuple[str, ...]) -> None:
        self._collective, self._policy = collective, policy
        self._axes = [axis for axis in model_axes if collective.mesh is not None and collective.mesh.axes[axis] > 1]
        self._seen: dict[tuple[str, int], int] = {}

    def agreed(self, batch: Any, stage: str, dataloader: int) -> Any:
        """The batch to use. Called by all ranks for every batch.

        Raises:
            CollectiveMismatchError: on all ranks, when batches that are compared differ; it names what and the ranks.
        """
        if not self._axes or self._policy == "different":
            return batch
        if self._policy == "broadcast":
            for axis in self._axes:
                batch = self._collective[axis].broadcast_object(batch)
            return batch
        number = self._seen.get((stage, dataloader), 0)
        if number < CHECKED:
            self._seen[stage, dataloader] = number + 1
            self._compare(batch, f"{stage} batch {number}" + (f" of dataloader {dataloader}" if dataloader else ""))
        return batch

    def _compare(self, batch: Any, what: str) -> None:
        own = fingerprint(batch)
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        digests = self._collective.all_gather_object(digest)
        groups = self._groups()
        if all(digests[rank] == digests[group[0]] for group in groups for rank in group):
            return
        fingerprints = self._collective.all_gather_object(own)
        for group in groups:
            for rank in group:
                difference = _first_difference(fingerprints[group[0]], fingerprints[rank])
                if difference is not None:
                    raise CollectiveMismatchError(
                        f"The ranks {list(group)} hold one model together, but got different batches: in {what},"
                        f" {difference[0]} is {difference[1]} on rank {group[0]} and {difference[2]} on rank {rank}."
                        " What they compute together would mix samples. Let the data set and its random numbers depend"
                        " on self.collective.data.rank only; or let the first model rank send its batches:"
                        " CollectiveStrategy(batches='broadcast'); or, if each model rank reads its own part on"
                        " purpose, say batches='different'."
                    )

    def _groups(self) -> list[tuple[int, ...]]:
        mesh = self._collective.mesh
        assert mesh is not None
        return list(dict.fromkeys(mesh.members(self._axes, rank) for rank in range(self._collective.world_size)))


class BatchBehaviour(CommunicationBehaviour):
    """What happens to a batch before the step sees it."""

    _batch_policy: BatchPolicy = "check"
    _batches: BatchAgreement | None = None

    def _choose_batches(self, batches: BatchPolicy) -> None:
        """Takes the constructor's argument.

        Raises:
            ValueError: an unknown policy.
        """
        if batches not in ("check", "broadcast", "different"):
            raise ValueError(f"batches={batches!r} is none of 'check', 'broadcast', 'different'.")
        self._batch_policy = batches

    def _start_comparing(self) -> None:
        """At the start of each run, when the collective is set up."""
        self._batches = BatchAgreement(self.collective, self._batch_policy, Communicators(self.collective).model_axes)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to the device, when it is known to be the same on all ranks of the model."""
        module = self.lightning_module
        stage = module.trainer.state.stage if module is not None and module._trainer is not None else None
        if self._batches is not None and stage is not None:
            batch = self._batches.agreed(batch, stage.dataloader_prefix or stage.value, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)


def fingerprint(batch: Any) -> dict[str, str]:
    """A text for each tensor, array, number and text in a batch, by its place; of other things their type."""
    leaves, _ = _pytree.tree_flatten_with_path(batch)
    return {f"batch{_pytree.keystr(path)}": _text(leaf) for path, leaf in leaves}


def _text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        kind = f"a tensor {list(leaf.shape)} of {str(leaf.dtype).removeprefix('torch.')}"
        return f"{kind} ({_digest(leaf.detach().cpu())})"
    if hasattr(leaf, "__array_interface__"):
        return f"an array {list(leaf.shape)} of {leaf.dtype} ({hashlib.sha256(leaf.tobytes()).hexdigest()[:8]})"
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return repr(leaf)
    return f"a {type(leaf).__name__}"


def _digest(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "not compared"
    plain = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:8]


def _first_difference(one: dict[str, str], other: dict[str, str]) -> tuple[str, str, str] | None:
    for place in [*one, *other]:
        if one.get(place) != other.get(place):
            return place, one.get(place, "missing"), other.get(place, "missing")
    return None
