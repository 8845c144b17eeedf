"""The quickstart keeps its promises, and its comparison with one process can fail."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"
PNG = b"\x89PNG\r\n\x1a\n"


def run(script, *arguments, directory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("devices", [1, 2])
def test_training_on_several_processes_gives_what_one_process_gives(devices, tmp_path):
    finished = run(SCRIPT, "--epochs", "4", "--devices", str(devices), "--picture", "map.png", directory=tmp_path)
    assert finished.returncode == 0, finished.stderr
    output = finished.stdout
    assert output.count("held-out digits") == 1, "only the first process may print"
    before = float(re.search(r"before training +([\d.]+)%", output).group(1))
    after = float(re.search(rf"after +20 steps on {devices} processes +([\d.]+)%", output).group(1))
    assert before < 40
    assert after > 80
    assert float(re.search(r"float64, +20 steps +(\S+)", output).group(1)) < 1e-9
    assert (tmp_path / "map.png").read_bytes().startswith(PNG)


def test_the_comparison_fails_when_the_gathered_embeddings_lose_their_gradient(tmp_path):
    text = SCRIPT.read_text()
    gathering = "self.collective.all_gather(points, dim=0)"
    assert gathering in text
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace(gathering, "self.collective.all_gather(points.detach(), dim=0)"))
    finished = run(broken, "--epochs", "1", directory=tmp_path)
    assert finished.returncode != 0
    assert "did not do what one process does" in finished.stderr
