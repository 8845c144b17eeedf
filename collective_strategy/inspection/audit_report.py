"""What the audit found out about each weight and axis, and the judgement on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from collective_strategy.collectives.errors import CollectiveError

Weights = Literal["equal", "different"]
Values = Literal["varied", "uniform", "zero"]
Gradients = Literal["equal", "rounded", "different", "one-sided", "zero"]
Kind = Literal[
    "forgotten mark", "reduced twice", "wrong axis", "not reduced", "averaged parts", "copies differ", "equal pieces",
    "replicated, unmarked", "not decided",
]  # fmt: skip
Level = Literal["mistake", "question", "note"]


@dataclass(frozen=True)
class Evidence:
    """One weight over one axis, as the ranks of a group along that axis saw it in all batches so far.

    Attributes:
        name: Qualified name.
        axis: The axis.
        ranks: Its size.
        mark: ``"unmarked"``, ``"private"``, ``"sharded"``, ``"sum"``, ``"mean"`` or ``"none"``.
        weights: Whether the ranks hold the same bits.
        values: Whether these say something: not if all are zero, and little if all are one number.
        gradients: The ranks' local gradients. ``"one-sided"``: zero on some ranks; ``"zero"``: on all.
        depends: Whether a gradient changed from batch to batch; None if there was one batch. One that does not may be
            equal on all ranks although it is a part (of a mean over pixels, say).
        largest, magnitude: The largest difference between two ranks' gradients, and the largest entry.
    """

    name: str
    axis: str
    ranks: int
    mark: str
    weights: Weights
    values: Values
    gradients: Gradients
    depends: bool | None
    largest: float
    magnitude: float

    def joined(self, other: Evidence) -> Evidence:
        """With what other batches, or other groups along the axis, saw."""
        order: tuple[Gradients, ...] = ("different", "one-sided", "rounded", "equal", "zero")
        worse = max(self, other, key=lambda e: e.largest / e.magnitude if e.magnitude else 0.0)
        values: tuple[Values, ...] = ("varied", "uniform", "zero")
        depends = [flag for flag in (self.depends, other.depends) if flag is not None]
        return replace(
            self,
            weights="equal" if self.weights == other.weights == "equal" else "different",
            values=min(self.values, other.values, key=values.index),
            gradients=min(self.gradients, other.gradients, key=order.index),
            depends=any(depends) if depends else None,
            largest=worse.largest,
            magnitude=worse.magnitude,
        )


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: Of the weight.
        axis: The axis; of a wrong one, the one that is marked.
        kind: What it is.
        level: ``"mistake"``: what is marked contradicts what was seen. ``"question"``: it may be on purpose.
            ``"note"``: nothing is wrong with the gradients.
        message: What was seen, why it matters, what to do.
    """

    name: str
    axis: str
    kind: Kind
    level: Level
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class AuditReport:
    """The outcome, equal on all ranks.

    Attributes:
        findings: In order of the weights.
        evidence: All that was looked at.
        batches: How many batches were run.
    """

    findings: tuple[Finding, ...]
    evidence: tuple[Evidence, ...]
    batches: int

    @property
    def mistakes(self) -> tuple[Finding, ...]:
        """Findings of which there is no doubt."""
        return tuple(finding for finding in self.findings if finding.level == "mistake")

    @property
    def questions(self) -> tuple[Finding, ...]:
        """Findings that may be on purpose."""
        return tuple(finding for finding in self.findings if finding.level == "question")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """What could not be decided, and weights that deserve a mark although their gradients are right."""
        return tuple(finding for finding in self.findings if finding.level == "note")

    @property
    def ok(self) -> bool:
        """Whether there are neither mistakes nor questions."""
        return not self.mistakes and not self.questions

    def __str__(self) -> str:
        weights = len({evidence.name for evidence in self.evidence})
        axes = ", ".join(dict.fromkeys(evidence.axis for evidence in self.evidence)) or "no axis of several ranks"
        lines = [f"Audit of {weights} weights over {axes} in {self.batches} batches: " + self._verdict()]
        for title, found in (("Mistakes", self.mistakes), ("Questions", self.questions)):
            if found:
                lines += [f"{title}:", *(f"  {finding}" for finding in found)]
        for kind in ("replicated, unmarked", "not decided"):
            names = list(dict.fromkeys(finding.name for finding in self.notes if finding.kind == kind))
            if names:
                shown = ", ".join(names[:6]) + (f", and {len(names) - 6} more" if len(names) > 6 else "")
                lines.append(f"{_NOTES[kind]}: {shown}.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        counts = [(len(self.mistakes), "mistake"), (len(self.questions), "question")]
        said = [f"{number} {word}{'s' if number > 1 else ''}" for number, word in counts if number]
        return " and ".join(said) + "." if said else "marks and gradients agree."


_NOTES = {
    "replicated, unmarked": "Equal copies with equal gradients and no mark, which norms count once per rank; "
    "shared(..., grad='none') says what they are",
    "not decided": "Not decided, because values or gradients are zero, or gradients do not depend on the batch",
}


class SharingMistakeError(CollectiveError):
    """The audit found marks that contradict the gradients. Raised alike on all ranks; ``report`` has the data."""

    def __init__(self, report: AuditReport) -> None:
        self.report = report
        super().__init__(
            f"{report}\nWith these marks the weights get wrong gradients, or their copies drift apart. Correct "
            "them, or look at the report without an error: AuditSharing(raise_on_mistake=False)."
        )

    def __reduce__(self) -> tuple[type[SharingMistakeError], tuple[AuditReport]]:
        return type(self), (self.report,)


def judge(evidence: Sequence[Evidence]) -> list[Finding]:
    """The findings on what was seen."""
    findings = [finding for one in evidence if (finding := _judge_one(one)) is not None]
    doubled = {finding.name: finding for finding in findings if finding.kind == "reduced twice"}
    result = []
    for finding in findings:
        right = finding.kind == "forgotten mark" and doubled.get(finding.name)
        if right:
            result.append(_wrong_axis(right, finding))
        elif not (
            finding.kind == "reduced twice"
            and any(other.kind == "forgotten mark" and other.name == finding.name for other in findings)
        ):
            result.append(finding)
    return result


def _judge_one(seen: Evidence) -> Finding | None:
    by_mark = {"unmarked": _unmarked, "sharded": _sharded, "sum": _sum, "mean": _mean, "none": _none}
    judged = by_mark.get(seen.mark)
    if judged is None:
        return None
    if seen.mark in ("sum", "mean", "none") and seen.weights == "different":
        return _finding(
            seen, "copies differ", "mistake",
            f"it is marked shared over {seen.axis}, but its {seen.ranks} copies differ, so their gradients cannot be "
            "compared. verify() says where and by how much, and mends them.",
        )  # fmt: skip
    return judged(seen)


def _unmarked(seen: Evidence) -> Finding | None:
    if seen.weights == "different":
        return None  # private
    if seen.values == "zero" or seen.gradients in ("zero", "one-sided"):
        return _undecided(seen) if seen.values != "zero" or seen.gradients in ("different", "rounded") else None
    if seen.gradients in ("equal", "rounded"):
        return _finding(seen, "replicated, unmarked", "note", "equal copies with equal gradients, and no mark.")
    start = (
        " Its values are all one number, as a layer may be made, so this may be chance." if seen.values == "uniform"
        else ""
    )  # fmt: skip
    return _finding(
        seen, "forgotten mark", "question" if seen.values == "uniform" else "mistake",
        f"it has no mark for axis {seen.axis}, is equal on its {seen.ranks} ranks, and gets different gradients "
        f"({_size(seen)}), so the copies drift apart.{start} If it is one weight, say shared(module, "
        f"over={seen.axis!r}), or use collective[{seen.axis!r}].replicate(weight) in forward. If it is not, say "
        "private() or sharded(), and draw its start values in varying_rng(), so that the ranks' pieces differ.",
    )  # fmt: skip


def _sharded(seen: Evidence) -> Finding | None:
    if seen.weights == "different" or seen.values != "varied" or seen.gradients != "equal" or not seen.depends:
        return None
    return _finding(
        seen, "equal pieces", "mistake",
        f"it is marked sharded over {seen.axis}, but its {seen.ranks} ranks hold the same values and get the same "
        "gradients: either it is a copy (shared(..., grad='none'); as pieces, norms count it once per rank), or the "
        "pieces started from the same random numbers and will stay equal for ever (draw them in varying_rng()).",
    )  # fmt: skip


def _sum(seen: Evidence) -> Finding | None:
    if seen.gradients in ("different", "one-sided"):
        return None
    if seen.gradients == "zero" or not seen.depends:
        return _undecided(seen)
    return _finding(
        seen, "reduced twice", "mistake",
        f"it is marked grad='sum' over {seen.axis}, but its {seen.ranks} ranks get the same gradient already, so the "
        f"sum is {seen.ranks} times too large. Say grad='mean' (or 'none'); or take the replicate() away that sums it "
        "in forward, or the wrong to= that hands every rank the whole gradient.",
    )  # fmt: skip


def _mean(seen: Evidence) -> Finding | None:
    if seen.gradients not in ("different", "one-sided"):
        return None
    return _finding(
        seen, "averaged parts", "question",
        f"it is marked grad='mean' over {seen.axis}, but its {seen.ranks} ranks get different gradients "
        f"({_size(seen)}). If these are parts of one gradient, the mean is {seen.ranks} times too small: say "
        "grad='sum'. If the axis averages, as over an ensemble, it is right.",
    )  # fmt: skip


def _none(seen: Evidence) -> Finding | None:
    if seen.gradients in ("equal", "zero"):
        return None
    if seen.gradients == "rounded":
        what = "by rounding only: say grad='mean', which keeps copies together"
    else:
        what = (
            "so the copies drift apart: if these are parts, say grad='sum'; if they should be equal, look for random "
        )
        what += "numbers or batches that differ over the axis"
    return _finding(
        seen, "not reduced", "mistake",
        f"it is marked grad='none' over {seen.axis}, but its {seen.ranks} ranks get different gradients "
        f"({_size(seen)}), {what}.",
    )  # fmt: skip


def _wrong_axis(doubled: Finding, forgotten: Finding) -> Finding:
    return Finding(
        doubled.name, doubled.axis, "wrong axis", "mistake",
        f"it is marked grad='sum' over {doubled.axis}, where the ranks get the same gradient already, and not over "
        f"{forgotten.axis}, where it is equal and gets different ones. Probably the axes are mixed up: say "
        f"over={forgotten.axis!r}.",
    )  # fmt: skip


def _undecided(seen: Evidence) -> Finding:
    return _finding(seen, "not decided", "note", "values or gradients say nothing.")


def _finding(seen: Evidence, kind: Kind, level: Level, message: str) -> Finding:
    return Finding(seen.name, seen.axis, kind, level, message)


def _size(seen: Evidence) -> str:
    return f"by up to {seen.largest:.2g}, the largest entry is {seen.magnitude:.2g}"
