"""Process-wide state that a function must leave as it found it, or the next test sees it."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ProcessState:
    """A snapshot of the state that is compared before and after a call."""

    default_dtype: torch.dtype
    grad_enabled: bool
    environment: dict[str, str]
    groups: int
    threads: dict[int, str]

    @classmethod
    def now(cls) -> ProcessState:
        """Takes a snapshot."""
        return cls(
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            environment=dict(os.environ),
            groups=_live_groups(),
            threads=_threads(),
        )

    def differences(self, patience: float = 1.0) -> list[str]:
        """What differs now, in words. Threads that are about to end get ``patience`` seconds to do so."""
        deadline = time.monotonic() + patience
        while (extra := _threads().keys() - self.threads.keys()) and time.monotonic() < deadline:
            time.sleep(0.005)
        now = ProcessState.now()
        found = []
        if now.default_dtype != self.default_dtype:
            found.append(f"the default dtype was {self.default_dtype} and is {now.default_dtype}")
        if now.grad_enabled != self.grad_enabled:
            found.append(f"torch.is_grad_enabled() was {self.grad_enabled} and is {now.grad_enabled}")
        for name in sorted(self.environment.keys() | now.environment.keys()):
            before, after = self.environment.get(name), now.environment.get(name)
            if before != after:
                found.append(f"the environment variable {name} was {before!r} and is {after!r}")
        if now.groups != self.groups:
            found.append(f"there were {self.groups} live torch.distributed groups and are {now.groups}")
        if extra:
            found.append("threads left running: " + ", ".join(sorted(now.threads.get(i, "?") for i in extra)))
        return found


def random_state() -> Callable[[], None]:
    """Remembers the random state of Python, torch and (where it is loaded) numpy; the result puts it back."""
    python, generator = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(generator)
        if numpy:
            numpy.random.set_state(numpy_state)

    return restore


def _live_groups() -> int:
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    return len(distributed._world.pg_map) if distributed else 0


def _threads() -> dict[int, str]:
    # A thread that Python did not start (autograd's, gloo's) shows up as a dummy once it ran Python code, for ever.
    # A backend's runtime that belongs to the process, not to a collective, names its threads "process-wide ...".
    return {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident is not None
        and not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith("process-wide ")
    }
