"""The script of the page on launching does what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "launching.md"


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        ([], "1 ranks: [0.0, 1.0, 2.0]"),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2"], "2 ranks: [1.0, 3.0, 5.0]"),
    ],
    ids=["alone", "torchrun"],
)
def test_the_script_prints_what_the_page_says(launcher, line, tmp_path):
    text = PAGE.read_text()
    script = tmp_path / "total.py"
    script.write_text(re.search(r"```python\n(# total\.py\n.*?)```", text, re.DOTALL).group(1))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *launcher, str(script)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == line
    assert line in text
