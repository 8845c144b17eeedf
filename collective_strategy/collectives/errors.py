"""Errors that a collective raises. Each message says what happened, why it is refused and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence


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


def call_failed(where: str, waited: float, error: Exception) -> CollectiveError:
    """What to raise for the library's ``error`` in the call ``where``, after ``waited`` seconds."""
    return CollectiveError(
        f"{where} failed after {waited:.1f} s: {error}. Probably another rank ended, or made another call or none: "
        "look at its output. The collective is broken from now on."
    )


def call_timed_out(
    where: str, waited: float, timeout: float, missing: Sequence[str], error: Exception
) -> CollectiveTimeoutError:
    """The same for a time-out (seconds); ``missing`` describes the ranks that did not come, as far as is known."""
    whom = "missing: " + ", ".join(missing) if missing else "the missing rank is not known"
    return CollectiveTimeoutError(
        f"{where} timed out after {waited:.1f} s (timeout {timeout:g} s); {whom}. Every rank must make the same calls "
        "in the same order; look for a call inside `if rank == 0`, uneven batches, or an error on the missing rank. "
        f"The collective is broken from now on. [{type(error).__name__}: "
        f"{str(error).splitlines()[0][:200] if str(error) else ''}]"
    )
