"""Tools that tell the truth about a model on many ranks: what is reduced where, and whether copies are equal."""

from collective_strategy.inspection.audit import Audit, audit
from collective_strategy.inspection.audit_report import AuditReport, Evidence, Finding, SharingMistakeError
from collective_strategy.inspection.explain import explain
from collective_strategy.inspection.explanation import ExplainedTensor, Explanation
from collective_strategy.inspection.replica_report import ReplicaDifference, ReplicaDriftError, ReplicaReport
from collective_strategy.inspection.verify import verify

__all__ = [
    "Audit",
    "AuditReport",
    "Evidence",
    "ExplainedTensor",
    "Explanation",
    "Finding",
    "ReplicaDifference",
    "ReplicaDriftError",
    "ReplicaReport",
    "SharingMistakeError",
    "audit",
    "explain",
    "verify",
]
