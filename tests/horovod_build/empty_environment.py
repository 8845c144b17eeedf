"""Environments that have this one's torch and this package, and no Horovod."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_ABSENT = ("horovod", "__pycache__")


class EmptyEnvironment:
    """A virtual environment in which all that is installed here can be imported, but Horovod.

    Args:
        folder: Where to make it.
    """

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=200)
        self.python = folder / "bin" / "python"
        links = folder / "linked"
        links.mkdir()
        for name in ("torch", "collective_strategy"):  # two folders where the package runs from its checkout
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            package = Path(spec.origin).parent
            # an installed package brings along what is installed beside it
            beside = package.parent.iterdir() if package.parent.name == "site-packages" else [package]
            for entry in beside:
                if not entry.name.startswith(_ABSENT) and not (links / entry.name).exists():
                    (links / entry.name).symlink_to(entry)
        packages = next(iter(folder.glob("lib/python*/site-packages")))
        (packages / "linked.pth").write_text(f"{links}\n")

    def run(self, *arguments: str, path: str, timeout: float) -> "subprocess.CompletedProcess[str]":
        """Runs Python there, with the compilers of ``path`` and a low priority, to its end."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.python, *arguments],
            env={**variables, "PATH": path}, preexec_fn=lambda: os.nice(15), timeout=timeout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def install_horovod(self, wheels: Path, *, path: str, timeout: float) -> str:
        """Runs the script; what it printed."""
        program = ("-m", "collective_strategy.install_horovod", "--fast", "--wheel-dir", str(wheels))
        finished = self.run(*program, path=path, timeout=timeout)
        assert finished.returncode == 0, finished.stdout
        return finished.stdout
