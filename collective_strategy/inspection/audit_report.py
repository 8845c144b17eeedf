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
    """One weight that deserves a word.

    Attributes:
        name: Of the weight.
        axis: The axis; of a wrong one, the one that is marked.
        kind: What it is.
        level: ``"mistake"``: what is marked contradicts what was seen. ``"question"``: it may be on purpose.
            ``"note"``: nothing is wrong with the gradients.
        what: What was seen, and why it matters.
        size: How much gradients differ, where they do.
        advice: What to do.
    """

    name: str
    axis: str
    kind: Kind
    level: Level
    what: str
    size: str = ""
    advice: str = ""

    @property
    def message(self) -> str:
        """All of it but the name."""
        return f"{self.what}{f' ({self.size})' if self.size else ''}. {self.advice}".strip()

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
                lines += [f"{title}:", *_grouped(found)]
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


def _grouped(findings: Sequence[Finding]) -> list[str]:
    """What is said of several weights, once."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.what, finding.advice), []).append(finding)
    lines = []
    for (what, advice), found in groups.items():
        lines.append(f"  {what}:")
        lines += [f"    {finding.name}{f' ({finding.size})' if finding.size else ''}" for finding in found]
        lines.append(f"    -> {advice}")
    return lines
