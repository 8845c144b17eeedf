"""Errors that a collective raises. Each message says what happened, why it is refused and what to do."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """Base class of every error that concerns communication."""


class CollectiveStateError(CollectiveError):
    """The collective cannot be used now, or by this rank.

    Raised before set-up, after tear-down, on a collective that a time-out broke, and on a rank that is not a member
    of the group. Nothing was sent.
    """


class CollectiveMismatchError(CollectiveError):
    """The ranks made different calls (check mode). Raised alike on all ranks before data moved.

    The collective stays usable.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Somebody did not take part within the time-out. The collective is broken from then on."""


class RankLeftError(CollectiveError):
    """A rank that this one waits for has left after an error of its own. The collective is broken from then on."""


class RendezvousError(CollectiveError):
    """The processes did not find each other: one is missing or doubled, or the port is taken."""


class EnvironmentConfigError(ValueError):
    """The launcher's environment variables are half set or contradict each other."""
