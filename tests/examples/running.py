"""How the tests run an example: as a script in one process or several, and its functions on ranks."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

from collective_strategy.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    """The example as a module, also on the ranks."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def on_ranks(number, function, *arguments, mesh=None):
    """What the function returns on rank 0; all ranks must return the same."""
    first, *others = [outcome.result() for outcome in run_ranks(number, function, *arguments, mesh=mesh)]
    assert all(other == first for other in others)
    return first


def output_of_main(example, processes):
    """What the script prints on the first of the processes, on warm processes with a launcher's variables."""

    def printed(_):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            example.main()
        return output.getvalue()

    first, *others = [outcome.result() for outcome in run_ranks(processes, printed, backend=None)]
    assert not any(others), "only the first rank prints"
    return first


def output_of_script(name, processes):
    """What the example prints when it is started as a user starts it. Takes some seconds, so one example stands for
    all of them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(EXAMPLES / f"{name}.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def run_script(name, *arguments, directory):
    """What the example prints when it starts its processes by itself; its files go to the directory."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def without_gradient_sum(collective):
    """Forgets Megatron's f: `replicate` that hands the gradient on instead of summing the ranks' gradients."""
    collective.replicate = lambda x: x
    return collective
