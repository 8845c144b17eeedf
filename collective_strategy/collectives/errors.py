"""Errors that a collective raises. Each message says what happened, why it is refused and what to do."""

from __future__ import annotations

import os


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


def was_forked(what: str, parent: int) -> CollectiveStateError:
    """The refusal of ``what`` in a child of the process that was set up."""
    return CollectiveStateError(
        f"{what}: process {os.getpid()} was forked from {parent}, the one that was set up. The connections and threads "
        "of a collective belong to that process; here it would wait for ever, or answer in its place. "
        "Communicate in the process that called setup(), not in workers of a data loader, and start further ranks by "
        "spawning, not by forking."
    )
