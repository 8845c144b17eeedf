"""Every way to start a job: the same weights as with torch.distributed, and an end in words."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from horovod_jobs import LAUNCHERS, clean_environment, free_port, launch

from collective_strategy.collectives import EnvironmentConfigError, read_environment
from collective_strategy.strategies.environments import check_devices

pytestmark = pytest.mark.timeout(300)
MEET = "import collective_strategy as c; print(c.init('horovod', timeout=4))"


def _same_weights(parity: list[dict[str, Any]]) -> None:
    """Equal in float64 to 1e-12 and in float32 to 1e-6, as were the logged values; and they had moved."""
    for result in parity:
        for name, value in result.items():
            if name.endswith("logged"):
                torch_, horovod = value
                assert torch_.keys() == horovod.keys()
                assert all(abs(torch_[key] - horovod[key]) < 1e-6 for key in torch_), value
            elif name.endswith("moved"):
                assert value > 0.01, name
            elif name.endswith("lr"):
                assert value in (0.01, 0.1, 0.2), "no scaling by the number of ranks"
            else:
                assert value < (1e-6 if "32-true" in name else 1e-12), (name, value)
    assert parity[0] == parity[1]


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=pytest.mark.extended if name in ("horovod.run", "mpirun") else ()) for name in LAUNCHERS],
)
def test_the_weights_are_those_of_torch_distributed(launcher: str, tmp_path: Path) -> None:
    """Accumulation with an open window, clipping, AdamW, batch norm, dropout, metrics; nothing but the name differs."""
    ended = launch("parity.py", str(tmp_path), "2", "accumulated and clipped", launcher=launcher, out=tmp_path)
    assert not any(ended.codes), ended.output
    assert len(ended.ranks) == 2
    _same_weights(ended.values("parity"))


def test_weights_on_a_mesh_are_those_of_torch_distributed(tmp_path: Path) -> None:
    """Weights shared over 2 x 2 ranks, two optimizers, and a resumed training."""
    ended = launch("parity.py", str(tmp_path), "4", launcher="self", n=4, out=tmp_path, timeout=250)
    assert not any(ended.codes), ended.output
    assert len(ended.ranks) == 4
    for value in ended.values("parity"):
        _same_weights([value, value])
        assert value["resumed"] < 1e-12


@pytest.mark.parametrize("launcher", ["self", "horovodrun"])
def test_an_exception_on_one_rank_ends_the_job(launcher: str, tmp_path: Path) -> None:
    ended = launch("ending.py", str(tmp_path), "raise", "1", launcher=launcher)
    assert ended.codes[0] != 0
    assert "ValueError: boom" in ended.output
    assert (tmp_path / "saw1").read_text() == "ValueError: boom"
    assert "terminate called" not in ended.output


@pytest.mark.parametrize(("launcher", "n"), [("self", 2), ("variables", 4)])
def test_survivors_of_a_killed_rank_say_so_and_leave_a_complete_checkpoint(
    launcher: str, n: int, tmp_path: Path
) -> None:
    """With four ranks there are process sets, whose end makes stock Horovod abort."""
    ended = launch("ending.py", str(tmp_path), "kill", str(n - 1), str(n), launcher=launcher, n=n)
    assert ended.codes[0] != 0
    assert "terminate called" not in ended.output
    if launcher == "variables":  # nobody ends the survivors
        for rank in range(n - 1):
            assert "CollectiveError" in (tmp_path / f"saw{rank}").read_text(), ended.output
        assert ended.codes == [1] * (n - 1) + [-signal.SIGKILL]
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    assert saved["global_step"] == 3


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "ending.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "wait", "0"],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    child = int((tmp_path / "ready1").read_text())
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "terminate called" not in output
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, output
        time.sleep(0.1)


def _start(variables: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", MEET]
    return subprocess.Popen(command, env=clean_environment(**variables), stderr=subprocess.PIPE, text=True)


def test_a_rank_that_is_missing_at_the_start_is_named() -> None:
    """Stock Horovod aborts the others after half a minute."""
    standard = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nobody = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_port())}
    nobody |= {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    processes = {
        "missing ranks: [1]": _start(standard | {"RANK": "0"}),
        "did not meet rank 0 through the launcher's server": _start(nobody),
        "MASTER_PORT": _start({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),
    }
    for words, process in processes.items():
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 1, error
        assert words in error
        assert "terminate called" not in error


HOROVOD = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
}  # fmt: skip


def test_the_place_of_a_process_that_horovodrun_started() -> None:
    place = read_environment(HOROVOD)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert (place.node_rank, place.source, place.key_value) == (1, "horovod", "http://10.0.0.1:1234")
    assert not place.is_loopback


def test_the_place_of_a_process_that_mpirun_started() -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    place = read_environment({f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, "3412", strict=True)})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert (place.node_rank, place.source, place.master_port) == (1, "mpirun", 0)
    hydra = read_environment({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_PORT": "29500"})
    assert (hydra.rank, hydra.world_size, hydra.master_port) == (1, 2, 29500)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_RANK, HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        ({**HOROVOD, "RANK": "0"}, "HOROVOD_RANK=3, but RANK=0"),
        ({**HOROVOD, "WORLD_SIZE": "8"}, "HOROVOD_SIZE=4, but WORLD_SIZE=8"),
        ({**HOROVOD, "HOROVOD_RANK": "x"}, "'x' is not a whole number"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=words.replace("[", r"\[")):
        read_environment(variables)


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (4, 1), (2, 1)])
def test_devices_that_do_not_fit_the_launcher_are_refused_with_both_numbers(devices: int, nodes: int) -> None:
    check_devices(read_environment(HOROVOD), 2, 2)
    with pytest.raises(EnvironmentConfigError) as refusal:
        check_devices(read_environment(HOROVOD), devices, nodes)
    assert f"devices={devices}" in str(refusal.value)
    assert "started 2 processes on this node and 4 in all" in str(refusal.value)
    assert "set devices=2 and num_nodes=2" in str(refusal.value)


def test_the_launchers_variables_stay_as_they_were(tmp_path: Path) -> None:
    """What Horovod itself reads is set for native code alone."""
    from collective_strategy.testing import run_ranks

    def names(collective: Any) -> list[str]:
        collective.split(collective.rank % 2).all_reduce(1)
        return [name for name in os.environ if name.startswith("HOROVOD")]

    assert [outcome.result() for outcome in run_ranks(4, names, backend="horovod")] == [[]] * 4
