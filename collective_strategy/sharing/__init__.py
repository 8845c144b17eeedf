"""Weights shared or sharded over an axis of the mesh. Needs torch only."""

from collective_strategy.sharing.marks import (
    Mark,
    SharedModule,
    marks_of,
    private,
    record_marks,
    restore_marks,
    sharded,
    shared,
    unmark,
)
from collective_strategy.sharing.roles import Role, UnmarkedPolicy, resolve_roles

__all__ = [
    "Mark",
    "Role",
    "SharedModule",
    "UnmarkedPolicy",
    "marks_of",
    "private",
    "record_marks",
    "resolve_roles",
    "restore_marks",
    "sharded",
    "shared",
    "unmark",
]
