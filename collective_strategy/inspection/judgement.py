"""What the audit makes of what it saw."""

from __future__ import annotations

from collections.abc import Sequence

from collective_strategy.inspection.audit_report import Evidence, Finding, Kind, Level


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
            f"marked shared over {seen.axis}, but the {seen.ranks} copies differ, so gradients cannot be compared",
            "verify() says where and by how much, and mends them.",
        )  # fmt: skip
    return judged(seen)


def _unmarked(seen: Evidence) -> Finding | None:
    if seen.weights == "different":
        return None  # private
    if seen.values == "zero" or seen.gradients in ("zero", "one-sided"):
        return _undecided(seen) if seen.values != "zero" or seen.gradients in ("different", "rounded") else None
    if seen.gradients in ("equal", "rounded"):
        return _finding(seen, "replicated, unmarked", "note", "equal copies with equal gradients, and no mark")
    what = (
        f"no mark for axis {seen.axis}, equal on the {seen.ranks} ranks, but different gradients, so that copies drift "
        "apart"
    )
    advice = (
        f"If it is one weight, say shared(module, over={seen.axis!r}), or use "
        f"collective[{seen.axis!r}].replicate(weight) in forward. If it is not, say private() or sharded(), and draw "
        "its start values in varying_rng(), so that the ranks' pieces differ."
    )
    if seen.values == "uniform":
        what = f"{what}, unless they are equal by chance: their values are all one number, as a layer may be made"
    return _finding(
        seen, "forgotten mark", "question" if seen.values == "uniform" else "mistake", what, advice, _size(seen)
    )


def _sharded(seen: Evidence) -> Finding | None:
    if seen.weights == "different" or seen.values != "varied" or seen.gradients != "equal" or not seen.depends:
        return None
    return _finding(
        seen, "equal pieces", "mistake",
        f"marked sharded over {seen.axis}, but the {seen.ranks} ranks hold the same values and get the same gradients",
        "Either it is a copy: say shared(..., grad='none'); as pieces, norms count it once per rank. Or the pieces "
        "started from the same random numbers and will stay equal for ever: draw them in varying_rng().",
    )  # fmt: skip


def _sum(seen: Evidence) -> Finding | None:
    if seen.gradients in ("different", "one-sided"):
        return None
    if seen.gradients == "zero" or not seen.depends:
        return _undecided(seen)
    return _finding(
        seen, "reduced twice", "mistake",
        f"marked grad='sum' over {seen.axis}, but the {seen.ranks} ranks get the same gradient already, so that the "
        f"sum is {seen.ranks} times too large",
        "Say grad='mean' (or 'none'); or take away the replicate() that sums it in forward, or the to= that hands "
        "every rank the whole gradient.",
    )  # fmt: skip


def _mean(seen: Evidence) -> Finding | None:
    if seen.gradients not in ("different", "one-sided"):
        return None
    return _finding(
        seen, "averaged parts", "question",
        f"marked grad='mean' over {seen.axis}, but the {seen.ranks} ranks get different gradients",
        f"If these are parts of one gradient, the mean is {seen.ranks} times too small: say grad='sum'. If the axis "
        "averages, as over an ensemble, it is right.",
        _size(seen),
    )  # fmt: skip


def _none(seen: Evidence) -> Finding | None:
    if seen.gradients in ("equal", "zero"):
        return None
    by_rounding = seen.gradients == "rounded"
    what = f"marked grad='none' over {seen.axis}, but the {seen.ranks} ranks get different gradients"
    what += ", by rounding only" if by_rounding else ", so that copies drift apart"
    advice = (
        "Say grad='mean', which keeps copies together."
        if by_rounding
        else "If these are parts, say grad='sum'; if they should be equal, look for random numbers or batches that "
        "differ over the axis."
    )
    return _finding(seen, "not reduced", "mistake", what, advice, _size(seen))


def _wrong_axis(doubled: Finding, forgotten: Finding) -> Finding:
    return Finding(
        doubled.name, doubled.axis, "wrong axis", "mistake",
        f"marked grad='sum' over {doubled.axis}, where the ranks get the same gradient already, and not over "
        f"{forgotten.axis}, where it is equal and gets different ones",
        forgotten.size,
        f"Probably the axes are mixed up: say over={forgotten.axis!r}.",
    )  # fmt: skip


def _undecided(seen: Evidence) -> Finding:
    return _finding(seen, "not decided", "note", "values or gradients say nothing")


def _finding(seen: Evidence, kind: Kind, level: Level, what: str, advice: str = "", size: str = "") -> Finding:
    return Finding(seen.name, seen.axis, kind, level, what, size, advice)


def _size(seen: Evidence) -> str:
    return f"by up to {seen.largest:.2g}, where the largest entry is {seen.magnitude:.2g}"
