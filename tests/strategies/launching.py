"""Starts the scripts of tests/strategies/scripts on real processes and collects what each rank wrote."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "COLLECTIVE_STRATEGY_JOB_ID",
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def clean_environment(**extra: str) -> dict[str, str]:
    """This process' environment without any launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(("SLURM_", "TORCHELASTIC_", "PL_"))
    }
    path = os.pathsep.join([str(ROOT), str(SCRIPTS), str(Path(__file__).parent), kept.get("PYTHONPATH", "")])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | extra


@dataclass
class Ended:
    """How a launched job ended."""

    codes: list[int]
    output: str
    seconds: float
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def values(self, name: str) -> list[Any]:
        """One scenario's result on each rank; fails with the rank's traceback where it raised."""
        results = [ranks[name] for ranks in self.ranks]
        for i, result in enumerate(results):
            assert "value" in result, f"rank {i}: {result.get('traceback')}"
        return [result["value"] for result in results]

    def errors(self, name: str) -> list[str]:
        """One scenario's error on each rank; fails where there was none."""
        return [ranks[name]["error"] for ranks in self.ranks]


def commands(script: str, args: list[str], launcher: str, n: int) -> list[tuple[list[str], dict[str, str]]]:
    """Command lines and extra variables: one for self-launch and torchrun, n where we are the launcher."""
    target = [str(SCRIPTS / script), *args]
    if launcher == "self":
        return [([sys.executable, *target], {})]
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", f"--nproc-per-node={n}", "--master-addr=127.0.0.1"]
        return [([sys.executable, *run, f"--master-port={free_port()}", *target], {})]
    assert launcher == "variables"
    shared = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [([sys.executable, *target], shared | {"RANK": str(r)}) for r in range(n)]


def run(
    script: str,
    *args: str,
    out: Path | None = None,
    launcher: str = "self",
    n: int = 2,
    timeout: float = 150,
    env: dict[str, str] | None = None,
) -> Ended:
    """Runs a script to its end; a job that does not end in time fails the test with its output."""
    full = [str(out), *args] if out is not None else list(args)
    return run_commands(commands(script, full, launcher, n), out=out, timeout=timeout, env=env)


def run_commands(
    jobs: list[tuple[list[str], dict[str, str]]],
    *,
    out: Path | None = None,
    timeout: float = 150,
    env: dict[str, str] | None = None,
) -> Ended:
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            command,
            env=clean_environment(**(env or {}), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, variables in jobs
    ]
    outputs, late = [], False
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(1.0, timeout - (time.monotonic() - started)))[0])
        except subprocess.TimeoutExpired:
            late = True
            # the whole session, children included
            os.killpg(process.pid, signal.SIGKILL)
            outputs.append(process.communicate()[0])
    seconds = time.monotonic() - started
    output = "\n".join(outputs)
    assert not late, f"still running after {timeout:g} s:\n{output[-6000:]}"
    for process in processes:
        # multiprocessing's resource tracker, and the children of Lightning's own launcher, end a moment later
        patience = time.monotonic() + 10
        while _session_members(process.pid) and time.monotonic() < patience:
            time.sleep(0.05)
        assert not _session_members(process.pid), f"a process was left behind:\n{output[-3000:]}"
    ranks = []
    if out is not None:
        ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]
    return Ended([process.returncode for process in processes], output, seconds, ranks)


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members
