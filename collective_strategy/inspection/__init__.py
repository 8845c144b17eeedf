"""Tools that tell the truth about a model on many ranks: what is reduced where, and whether copies are equal."""

from collective_strategy.inspection.explain import ExplainedTensor, Explanation, explain
from collective_strategy.inspection.replica_report import ReplicaDifference, ReplicaDriftError, ReplicaReport
from collective_strategy.inspection.verify import verify

__all__ = [
    "ExplainedTensor",
    "Explanation",
    "ReplicaDifference",
    "ReplicaDriftError",
    "ReplicaReport",
    "explain",
    "verify",
]
