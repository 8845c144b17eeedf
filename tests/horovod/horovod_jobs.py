"""The ways to start a Horovod job on this machine."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "strategies"))

from launching import Ended, clean_environment, commands, free_port, run_commands

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
LAUNCHERS = ("self", "horovodrun", "horovod.run", "mpirun", "torchrun")
# as root, and with more processes than cores
_MPI = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]

__all__ = ["LAUNCHERS", "Ended", "clean_environment", "free_port", "launch"]


def launch(script: str, *args: str, launcher: str, n: int = 2, out: Path | None = None, timeout: float = 150,
           env: dict[str, str] | None = None) -> Ended:  # fmt: skip
    """Runs a script of this folder to its end under a launcher."""
    target = [sys.executable, str(SCRIPTS / script), *args]
    variables = {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")])}
    if launcher == "horovodrun":
        jobs = [([str(BIN / "horovodrun"), "-np", str(n), "--gloo", *target], variables)]
    elif launcher == "horovod.run":
        jobs = [([sys.executable, str(SCRIPTS / "by_horovod_run.py"), str(n), *target[1:]], variables)]
    elif launcher == "mpirun":
        port = free_port()
        jobs = [([str(BIN / "mpirun"), *_MPI, "-np", str(n), "-x", f"MASTER_PORT={port}", *target], variables)]
    else:
        jobs = commands(str(SCRIPTS / script), list(args), launcher, n)
    return run_commands(jobs, out=out, timeout=timeout, env=env)
