"""An exception on one rank, anywhere: both ranks end in time, the user's exception first, no lone barrier."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import Ended, clean_environment, free_port, run

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)

TIMEOUT = 4
BUSY = 60  # seconds that a busy machine may need; what hangs is ended by force after minutes, and fails
LAUNCHED_TIMEOUT, IMPORTS = 15, 30
PLACES = (
    "prepare_data",
    "setup",
    "configure_model",
    "sanity_check",
    "training_step",
    "backward_hook",
    "optimizer_step",
    "validation",
    "save",
    "loader_worker",
    "on_exception",
    "teardown",
)
# on alternating ranks (Lightning calls prepare_data on rank 0 only), the most common ones on both
CHOSEN = [(place, i % 2) for i, place in enumerate(PLACES)]
CHOSEN += [(place, 1 - rank) for place, rank in CHOSEN if place in ("training_step", "validation", "save")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("raising")
    ended = run("raising.py", "--all", str(out), timeout=280)
    assert ended.codes == [0], ended.output
    return json.loads((out / "rank0.json").read_text())


@pytest.mark.parametrize(("place", "rank"), CHOSEN)
def test_both_ranks_end_and_the_cause_comes_first(outcomes: dict[str, Any], place: str, rank: int) -> None:
    outcome = outcomes[f"{place}-{rank}"]
    log = outcome["log"]
    raised = re.search(r"RAISED \w+ at ([\d.]+)", log)
    assert raised is not None, log
    assert outcome["ended"] - float(raised.group(1)) < TIMEOUT + BUSY
    assert outcome["codes"][rank] == 1, log
    if place != "teardown":  # the other rank has nothing left to do then
        assert outcome["codes"][1 - rank] == 1, log
    first = re.search(r"\w+(Error|Exception)\b[^\n]*", log)
    assert first is not None
    expected = {"on_exception": "KeyError: 'first'", "loader_worker": "ValueError: Caught ValueError in DataLoader"}
    assert first.group(0).startswith(expected.get(place, "ValueError: boom")), first.group(0)
    assert "ValueError: boom" in log
    later = log[log.index("RAISED") :]
    assert f"BARRIER {rank}" not in later, later[:3000]


def _ended_with_boom(ended: Ended) -> None:
    assert ended.codes[0] != 0
    assert "ValueError: boom" in ended.output
    assert ended.seconds < IMPORTS + LAUNCHED_TIMEOUT + BUSY


@pytest.mark.parametrize(
    ("place", "rank", "launcher"),
    [
        ("training_step", 1, "self"),
        ("validation", 0, "self"),
        ("teardown", 1, "self"),
        ("optimizer_step", 1, "torchrun"),
        ("setup", 0, "torchrun"),
    ],
)
def test_a_launched_job_fails_as_a_whole(place: str, rank: int, launcher: str, tmp_path: Path) -> None:
    """The launching process reports the failure of the ranks it launched, and leaves none behind."""
    # the time-out is also the one for meeting, and launched ranks import everything first
    env = {"RAISING_TIMEOUT": str(LAUNCHED_TIMEOUT)}
    _ended_with_boom(run("raising.py", place, str(rank), str(tmp_path), launcher=launcher, env=env, timeout=240))


def test_a_rank_whose_launcher_was_killed_while_it_was_importing_ends(tmp_path):
    """Its parent is another process by then, so it cannot wait for the end of that one."""
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    script = tmp_path / "train.py"
    script.write_text(
        "import lightning as L\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from collective_strategy import CollectiveStrategy\n"
        "trainer = L.Trainer(accelerator='cpu', devices=2, max_steps=1, logger=False, enable_progress_bar=False,\n"
        "                    enable_checkpointing=False, strategy=CollectiveStrategy(timeout=60))\n"
        "trainer.fit(BoringModel())\n"
    )
    place = {"RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = clean_environment(**place, **meeting, COLLECTIVE_STRATEGY_LAUNCHER_PID=str(launcher.pid))
    orphan = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert orphan.returncode == 1
    assert "the launching process is gone; this rank ends" in orphan.stderr
