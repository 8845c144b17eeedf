"""Processes that do not find each other: one is missing or doubled, the port is taken, the settings differ."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from collective_strategy.collectives import LaunchEnvironment, TorchDistributedCollective, read_environment
from collective_strategy.testing import run_ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def place(**changes: Any) -> LaunchEnvironment:
    return dataclasses.replace(read_environment(), **changes)


def meeting(changes: Callable[[int], dict[str, Any]], **settings: Any) -> Callable[[None], tuple[str, str, float]]:
    """Sets up a collective, each rank with its own changes to its place; what came of it, and after how long."""

    def meet(_: None) -> tuple[str, str, float]:
        began = time.monotonic()
        own = place()
        changed = changes(own.rank)
        options = {**settings, **changed.pop("settings", {})}
        if changed.pop("absent", False):
            return "absent", "", 0.0
        c = TorchDistributedCollective(**{"timeout": 3, **options})
        try:
            c.setup(dataclasses.replace(own, **changed))
            return "set up", str(c.all_reduce(1).item()), time.monotonic() - began
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - began
        finally:
            c.teardown()

    return meet


def outcomes(n: int, meet: Callable[[None], Any]) -> list[tuple[str, str, float]]:
    return [outcome.result() for outcome in run_ranks(n, meet, backend=None, fresh=True, timeout=15)]


def test_a_missing_rank_is_named_within_the_time_out() -> None:
    port = free_port()
    first, second, _ = outcomes(3, meeting(lambda rank: {"master_port": port, "absent": rank == 2}))
    for kind, _, waited in (first, second):
        assert kind == "RendezvousError"
        assert waited < 15
    assert "2 of 3 processes joined" in first[1]
    assert "missing ranks: [2]" in first[1]


def test_a_missing_rank_zero_is_named_with_its_address() -> None:
    port = free_port()
    _, (kind, text, waited) = outcomes(2, meeting(lambda rank: {"master_port": port, "absent": rank == 0}))
    assert kind == "RendezvousError"
    assert f"127.0.0.1:{port}" in text
    assert "rank 0" in text
    assert waited < 15


@pytest.mark.parametrize("doubled", [0, 1])
def test_two_processes_that_claim_one_rank_are_both_refused(doubled: int) -> None:
    port = free_port()
    ended = outcomes(3, meeting(lambda rank: {"master_port": port, "rank": doubled if rank == 2 else rank}))
    assert all(kind == "RendezvousError" for kind, _, _ in ended), ended
    assert all(waited < 15 for _, _, waited in ended)
    assert any(f"rank {doubled}" in text for _, text, _ in ended)


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = outcomes(2, meeting(lambda rank: {"master_port": port, "absent": rank == 1}))
    kind, text, waited = ended[0]
    assert kind == "RendezvousError"
    assert str(port) in text
    assert "taken" in text
    assert waited < 5


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"mesh": {"data": 1, "model": 2}}, "mesh"),
        ({"check": False}, "check"),
        ({"timeout": 4}, "timeout"),
    ],
)
def test_different_settings_are_told_to_all_ranks(other: dict[str, Any], words: str) -> None:
    port = free_port()
    ended = outcomes(2, meeting(lambda rank: {"master_port": port, "settings": other if rank else {}}))
    for kind, text, _ in ended:
        assert kind == "RendezvousError"
        assert "set up differently" in text
        assert words in text


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_opened() -> None:
    ended = outcomes(2, meeting(lambda rank: {}, mesh={"data": -1, "model": 3}))
    for kind, text, _ in ended:
        assert kind == "ValueError"
        assert "2 ranks cannot be divided by 3" in text


def test_after_a_failed_set_up_the_next_one_works() -> None:
    port = free_port()

    def twice(_: None) -> tuple[str, int]:
        own = place(master_port=port)
        c = TorchDistributedCollective(timeout=2, check=own.rank == 0)
        try:
            c.setup(own)
            first = "set up"
        except Exception as error:
            first = type(error).__name__
        c.teardown()
        with TorchDistributedCollective(timeout=10).setup(own) as other:
            return first, other.all_reduce(1).item()

    assert outcomes(2, twice) == [("RendezvousError", 2)] * 2  # type: ignore[comparison-overlap]


def test_two_jobs_that_meet_at_one_port_do_not_mix() -> None:
    port = free_port()

    def meet(_: None) -> tuple[int, int]:
        own = read_environment()
        job, rank = divmod(own.rank, 2)
        mine = LaunchEnvironment(
            rank, 2, rank, 2, 0, "127.0.0.1", port, "standard", job_id=f"job{job}", store_is_served=own.rank > 0
        )
        with TorchDistributedCollective(timeout=10).setup(mine) as c:
            found = c.all_gather_object(own.rank)
            c.barrier()
        return found[0], found[1]

    found = [outcome.result() for outcome in run_ranks(4, meet, backend=None, fresh=True, timeout=20)]
    assert found == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_the_single_process_collective_refuses_several_processes() -> None:
    def refuse(_: None) -> str:
        from collective_strategy import init

        try:
            init("single")
        except ValueError as error:
            return str(error)
        return ""

    for outcome in run_ranks(2, refuse, backend=None):
        assert "2 processes" in outcome.result()


def test_ctrl_c_is_heard_while_other_processes_are_missing() -> None:
    """Both wait in native code: rank 0 for the others to join, rank 1 for rank 0 to listen."""
    script = (
        "import signal, collective_strategy as c; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "print('waits', flush=True); c.init('torch', timeout=500)"
    )
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **place, "RANK": rank, "MASTER_PORT": str(free_port())},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
    time.sleep(2)
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        error = process.communicate(timeout=100)[1]
        assert error.endswith("KeyboardInterrupt\n")
