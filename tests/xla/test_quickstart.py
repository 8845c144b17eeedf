"""The quickstart on two XLA:CPU devices: only the Trainer's argument is another one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_quickstart_runs_on_xla_devices(tmp_path):
    script = (ROOT / "examples" / "quickstart.py").read_text()
    assert script.count('strategy="collective"') == 1
    (tmp_path / "quickstart.py").write_text(script.replace('strategy="collective"', 'strategy="collective_xla"'))
    command = [sys.executable, "quickstart.py", "--epochs", "3", "--picture", "map.png"]
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "15 steps on 2 processes" in ended.stdout
    assert (tmp_path / "map.png").stat().st_size > 0
