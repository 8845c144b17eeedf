"""The audit: do the marks of the weights agree with the gradients that the ranks compute?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from collective_strategy.collectives.base import Plan
from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.inspection.audit_report import AuditReport, Evidence, Gradients, Values
from collective_strategy.inspection.checksums import checksums, plain
from collective_strategy.inspection.judgement import judge
from collective_strategy.inspection.untouched import untouched
from collective_strategy.sharing.roles import Role, UnmarkedPolicy

_CHUNK_BYTES = 64 << 20
_ROUNDING = 16  # units in the last place, relative to the largest entry


def audit(
    module: nn.Module,
    collective: Collective,
    step: Callable[[int], Any],
    *,
    batches: int = 2,
    unmarked: UnmarkedPolicy = "private",
) -> AuditReport:
    """Runs batches, compares the ranks' local gradients along each model axis, and judges the marks by them.

    Called by all ranks, between steps; all get the same report. Nothing of the module is changed (weights, buffers,
    gradients, attributes, random states), and a reducer of it does not notice.

    It finds: a mark that is missing (copies are equal, gradients differ), a sum of gradients that are whole already, a
    mark over the wrong axis, ``grad="none"`` where gradients differ, pieces that are copies. Zeros decide nothing, nor
    do gradients that do not depend on the batch. Weights that were equal and have drifted apart cannot be told from
    private ones: run it before the first step.

    Args:
        module: The module, in training mode, as it is trained.
        collective: All ranks, with their mesh.
        step: Gets 0, 1, ...; runs forward on a batch of its own, as in training, and returns the loss, or runs
            backward itself and returns None. It steps no optimizer. Batches differ from call to call.
        batches: How often it is called; two at least, to see what depends on the batch.
        unmarked: What a weight without a mark is on the model axes.

    Raises:
        ValueError: ``batches`` is smaller than two, or a mark is wrong.
        RuntimeError: ``step`` stepped an optimizer, or ran no backward that reached a weight.

    Example:
        >>> print(audit(model, collective, lambda i: loss(model(inputs[i]), targets[i])))
    """
    if batches < 2:
        raise ValueError(f"audit needs two batches at least, to see which gradients depend on them; got {batches}.")
    running = Audit(module, collective, unmarked)
    for number in range(batches):
        running.observe(lambda number=number: step(number))  # type: ignore[misc]
    return running.report()


@dataclass
class _Subject:
    """The weights that the ranks of one group along an axis have in common."""

    axis: str
    group: Collective
    members: list[int]
    evidence: dict[int, Evidence]


class Audit:
    """An audit batch by batch, for loops that get their batches one by one. Made by all ranks. See `audit`.

    Example:
        >>> running = Audit(model, collective)
        >>> running.observe(lambda: loss(model(batch)))  # all ranks, before a step
        >>> print(running.report())
    """

    def __init__(self, module: nn.Module, collective: Collective, unmarked: UnmarkedPolicy = "private") -> None:
        self._module, self._collective = module, collective
        self.batches = 0
        collective._require_usable("audit")
        communicators = Communicators(collective)

        def plan() -> Plan:
            roles = communicators.roles(module, unmarked)  # if this rank refuses, the others hear of it
            return Plan(lambda: roles, "audit()")

        roles: dict[str, Role] = collective._run("audit", plan)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and name in roles]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._roles = [roles[name] for name in self._names]
        self._axes = [axis for axis in communicators.model_axes if communicators.sizes[axis] > 1]
        self._subjects: list[_Subject] | None = None
        self._before: list[tuple[int, bool]] | None = None

    def observe(self, step: Callable[[], Any]) -> None:
        """Runs one batch. Called by all ranks; leaves no trace."""
        if self._subjects is None:
            self._subjects = [self._subject(axis) for axis in self._axes]
        with untouched(self._module):
            with _gradients_of(self._parameters) as gradients:
                loss = step()
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.backward()
            present = [
                torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, gradients, strict=True)
            ]
        if not any(gradient is not None for gradient in gradients) and self._parameters:
            raise RuntimeError(
                "audit: the step returned no loss that depends on the module's weights, and ran no backward. Return "
                "the loss of a forward of this module."
            )
        sums = checksums(present)
        depends = (
            [None] * len(sums) if self._before is None else [a != b for a, b in zip(sums, self._before, strict=True)]
        )
        self._before = sums
        self.batches += 1
        for subject in self._subjects:
            self._compare(subject, present, depends)

    def report(self) -> AuditReport:
        """The judgement on what was observed. Called by all ranks."""
        own: list[Evidence] = []
        for subject in self._subjects or ():
            if subject.group.rank == 0:
                own.extend(subject.evidence[i] for i in subject.members)
        merged: dict[tuple[str, str, str], Evidence] = {}
        for evidences in self._collective.all_gather_object(own):
            for seen in evidences:
                key = seen.name, seen.axis, seen.mark
                merged[key] = merged[key].joined(seen) if key in merged else seen
        return AuditReport(tuple(judge(list(merged.values()))), tuple(merged.values()), self.batches)

    def _subject(self, axis: str) -> _Subject:
        group = self._collective[axis]
        own = {
            name: (tuple(p.shape), str(p.dtype), _mark(role, axis))
            for name, p, role in zip(self._names, self._parameters, self._roles, strict=True)
        }
        everybody = group.all_gather_object(own)
        common = [name for name in everybody[0] if all(rank.get(name) == everybody[0][name] for rank in everybody)]
        place = {name: i for i, name in enumerate(self._names)}
        members = [place[name] for name in common]
        chosen = [self._parameters[i] for i in members]
        sums = torch.tensor([total for total, _ in checksums(chosen)], dtype=torch.int64, device=group.device)
        equal = (group.all_gather(sums) == sums).all(0).tolist() if members else []
        evidence = {
            i: Evidence(
                self._names[i],
                axis,
                group.world_size,
                _mark(self._roles[i], axis),
                "equal" if same else "different",
                _values(self._parameters[i]),
                "zero",
                None,
                0.0,
                0.0,
            )
            for i, same in zip(members, equal, strict=True)
        }
        return _Subject(axis, group, members, evidence)

    @torch.no_grad()
    def _compare(self, subject: _Subject, gradients: Sequence[Tensor], depends: Sequence[bool | None]) -> None:
        """Updates the evidence: each rank measures its distance from the first rank of the group."""
        group, members = subject.group, subject.members
        if not members:
            return
        own = [plain(gradients[i]) for i in members]
        pairs = zip(own, _of_first_rank(group, own), members, strict=True)
        rows = [_measured(mine, first, bool(depends[i])) for mine, first, i in pairs]
        largest: Tensor = group.all_reduce(torch.stack(rows).to(group.device), "max")
        for i, (distance, magnitude, some, none, infinite, changed) in zip(members, largest.tolist(), strict=True):
            gradient = self._parameters[i].dtype
            kind = _kind(distance, magnitude, bool(some), bool(none), bool(infinite), gradient)
            seen = subject.evidence[i]
            decided = kind != "zero"
            batch = replace(
                seen,
                gradients=kind,
                depends=None if depends[i] is None else bool(changed),
                largest=distance if decided else 0.0,
                magnitude=magnitude if decided else 0.0,
            )
            subject.evidence[i] = seen.joined(batch)


def _measured(own: Tensor, first: Tensor, changed: bool) -> Tensor:
    """What the ranks' maximum is taken of: distance from the first rank's gradient, the largest entry, and flags."""
    if not own.numel():
        return torch.zeros(6, dtype=torch.float64, device=own.device)
    wide = own if own.dtype == torch.float64 else own.float()
    other = first.to(wide.device, wide.dtype)
    largest, distance = wide.abs().max(), (wide - other).abs().max()
    flags = [largest > 0, largest == 0, ~torch.isfinite(wide).all()]
    values = [distance, torch.maximum(largest, other.abs().max()), *flags, torch.full_like(distance, changed)]
    row = torch.stack([value.to(torch.float64) for value in values])
    return torch.where(row.isnan(), torch.inf, row)


@contextmanager
def _gradients_of(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """What is accumulated inside, by any number of backwards; ``.grad`` stays empty, as the next one starts anew."""
    found: list[Tensor | None] = [None] * len(parameters)

    def hook_for(index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                before = found[index]
                gradient = gradient.detach()
                found[index] = gradient if before is None else before + gradient

        return hook

    handles = [p.register_post_accumulate_grad_hook(hook_for(i)) for i, p in enumerate(parameters)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _of_first_rank(group: Collective, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors of the group's first rank, in pieces of bounded size."""
    start = 0
    while start < len(tensors):
        stop, size = start, 0
        while (
            stop < len(tensors)
            and tensors[stop].dtype == tensors[start].dtype
            and (stop == start or size < _CHUNK_BYTES)
        ):
            size += tensors[stop].numel() * tensors[stop].element_size()
            stop += 1
        flat = torch.cat([tensor.reshape(-1).to(group.device) for tensor in tensors[start:stop]])
        if flat.numel():
            group.broadcast_(flat)
        pieces = flat.split([tensor.numel() for tensor in tensors[start:stop]])
        yield from (piece.view(t.shape) for piece, t in zip(pieces, tensors[start:stop], strict=True))
        start = stop


def _kind(distance: float, magnitude: float, some: bool, none: bool, infinite: bool, dtype: torch.dtype) -> Gradients:
    if infinite or not some:
        return "zero"
    if none:
        return "one-sided"
    if not distance:
        return "equal"
    precise = dtype.is_complex or torch.finfo(dtype).eps < 1e-6
    eps = torch.finfo(dtype).eps if precise else 0.0
    return "rounded" if distance <= _ROUNDING * eps * magnitude else "different"


def _mark(role: Role, axis: str) -> str:
    mark = role.mark(axis)
    if mark is None:
        return "unmarked"
    return mark.grad if mark.kind == "shared" else mark.kind


def _values(parameter: Tensor) -> Values:
    data = plain(parameter).reshape(-1)
    if not data.numel() or not bool((data != 0).any()):
        return "zero"
    return "varied" if bool((data != data[0]).any()) else "uniform"
