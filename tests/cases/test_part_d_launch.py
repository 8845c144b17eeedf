"""Launching on real processes: ports, missing and doubled ranks, forked and spawned ranks."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from launched import commands, free_port, run, run_commands

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two jobs of two ranks at the same time, while Lightning's default port is taken."""
    outs = [tmp_path_factory.mktemp(f"job{i}") for i in range(2)]
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 12910))
        taken.listen()
        jobs = [
            (command, variables | {"JOB_NUMBER": str(i)})
            for i, out in enumerate(outs)
            for command, variables in commands("part_d.py", [str(out), "job_number"], "self", 2)
        ]
        ended = run_commands(jobs, timeout=240)
    assert ended.codes == [0, 0], ended.output
    return [[json.loads((out / f"rank{r}.json").read_text())["job_number"] for r in range(2)] for out in outs]


def test_two_jobs_on_one_machine_choose_free_ports_and_do_not_mix(two_jobs: Any) -> None:
    ports = set()
    for number, ranks in enumerate(two_jobs):
        for result in ranks:
            assert result["value"][:2] == [number, 2], result
            ports.add(result["value"][2])
    assert len(ports) == 2
    assert "12910" not in ports


@pytest.mark.parametrize("launcher", ["variables", "torchrun"])
def test_other_launchers(launcher: str, tmp_path: Path) -> None:
    """``variables`` sets no LOCAL_RANK."""
    ended = run("part_d.py", "places", out=tmp_path, launcher=launcher)
    assert not any(ended.codes), ended.output
    local = [None, None] if launcher == "variables" else ["0", "1"]
    assert ended.values("places") == [[-1.5, r, r, 0, 2, local[r]] for r in range(2)]


def test_a_port_that_the_user_chose_and_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = run("part_d.py", "short_timeout", out=tmp_path, env={"MASTER_PORT": port}, timeout=120)
    error = ended.ranks[0]["short_timeout"]["error"]
    assert port in error, error


def test_a_missing_rank_is_told_within_the_timeout(tmp_path: Path) -> None:
    alone = commands("part_d.py", [str(tmp_path), "short_timeout"], "variables", 2)[:1]
    ended = run_commands(alone, out=tmp_path, timeout=120)
    error = ended.ranks[0]["short_timeout"]["error"]
    assert "1 of 2" in error, error
    assert ended.seconds < 60  # on a busy machine; the default time-out is half an hour


def test_a_doubled_rank_is_refused(tmp_path: Path) -> None:
    outs = [tmp_path / str(i) for i in range(2)]
    shared = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = []
    for out in outs:
        out.mkdir()
        command = commands("part_d.py", [str(out), "short_timeout"], "self", 1)[0][0]
        jobs.append((command, shared))
    ended = run_commands(jobs, timeout=120)
    errors = [json.loads((out / "rank0.json").read_text())["short_timeout"]["error"] for out in outs]
    assert any("claims rank 0" in error or "rank 0 cannot listen" in error for error in errors), errors
    assert ended.seconds < 60  # on a busy machine; the default time-out is half an hour


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_results_of_forked_and_spawned_ranks_come_back(method: str, tmp_path: Path) -> None:
    """Weights, metrics, progress, the best checkpoint; with layers made in setup(); fitting the same Trainer again."""
    ended = run("notebook.py", str(tmp_path), method, timeout=240)
    assert ended.codes == [0], ended.output
    result = json.loads((tmp_path / "rank0.json").read_text())
    assert result["w"] == -5.0
    assert result["metric"] == 10.0
    assert result["best"]
    assert result["score"] == 10.0
    assert result["progress"] == [2, 1]
    assert result.get("again", -5.0) == -5.0
    assert result["second_epoch"] == [-10.0, 4, 2]
    assert result["late"] == -5.0
    assert "late.weight" in ended.output
    assert "head.weight" in ended.output
