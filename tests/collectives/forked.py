"""What happens in a process that was forked from a rank."""

import os
from collections.abc import Callable


def error_in_child(act: Callable[[], object]) -> str:
    """The error of ``act`` in a forked process; empty if it had none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        return said.read()
