"""Run a function on real ranks: for tests of collectives, of strategies and of your own backend.

Needs the extra ``collective_strategy[testing]`` (cloudpickle) and a POSIX system.
"""

from collective_strategy.testing.outcome import (
    LeakedStateError,
    Outcome,
    RankTimeoutError,
    RemoteError,
    Unpicklable,
    WorkerDiedError,
)
from collective_strategy.testing.runner import close_pools, run_ranks

__all__ = [
    "LeakedStateError",
    "Outcome",
    "RankTimeoutError",
    "RemoteError",
    "Unpicklable",
    "WorkerDiedError",
    "close_pools",
    "run_ranks",
]
