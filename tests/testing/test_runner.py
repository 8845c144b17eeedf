"""``run_ranks`` on itself: what it reports when a function on the ranks goes wrong."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest
import torch

from collective_strategy.collectives import TorchDistributedCollective
from collective_strategy.testing import (
    LeakedStateError,
    RankTimeoutError,
    RemoteError,
    Unpicklable,
    WorkerDiedError,
    run_ranks,
)


def rank_and_process(_collective):
    return int(os.environ["RANK"]), os.getpid()


def processes_of_the_pool():
    return [outcome.result()[1] for outcome in run_ranks(2, rank_and_process, backend=None)]


def my_rank():
    return int(os.environ["RANK"])


class Awkward(Exception):
    """Pickles, but cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


# What comes back


def test_every_rank_calls_the_function_with_its_own_collective():
    outcomes = run_ranks(2, lambda collective: (collective.rank, collective.world_size))
    assert [outcome.result() for outcome in outcomes] == [(0, 2), (1, 2)]
    assert [outcome.rank for outcome in outcomes] == [0, 1]


def test_the_ranks_really_communicate():
    outcomes = run_ranks(
        2, lambda collective, x: collective.all_reduce(x * (collective.rank + 1)).tolist(), torch.ones(2)
    )
    assert [outcome.result() for outcome in outcomes] == [[3.0, 3.0], [3.0, 3.0]]


def test_one_rank_is_a_process_of_its_own():
    (outcome,) = run_ranks(1, lambda collective: (collective.world_size, os.getpid()))
    assert outcome.result()[0] == 1
    assert outcome.result()[1] != os.getpid()


def test_options_reach_the_constructor():
    outcomes = run_ranks(
        2, lambda c: (c["model"].world_size, c.timeout.total_seconds()), mesh={"data": -1, "model": 2}, timeout=33
    )
    assert [outcome.result() for outcome in outcomes] == [(2, 33.0)] * 2


def test_a_backend_is_given_by_its_class_too():
    class Renamed(TorchDistributedCollective):
        backend_name = "renamed"

    outcomes = run_ranks(2, lambda c: (c.backend_name, c.all_gather_object(c.rank)), backend=Renamed)
    assert [outcome.result() for outcome in outcomes] == [("renamed", [0, 1])] * 2


def test_a_closure_sees_the_values_around_it():
    offset = 10
    outcomes = run_ranks(2, lambda _, x: my_rank() + offset + x, 100, backend=None)
    assert [outcome.result() for outcome in outcomes] == [110, 111]


def test_each_rank_has_its_own_copy_of_the_arguments():
    shared = [0]

    def count(_collective, numbers):
        numbers.append(my_rank())
        return numbers

    outcomes = run_ranks(2, count, shared, backend=None)
    assert [outcome.result() for outcome in outcomes] == [[0, 0], [0, 1]]
    assert shared == [0]


def test_an_exception_is_raised_by_result_with_the_traceback_of_the_rank():
    def fail_on_one(_collective):
        if my_rank() == 1:
            raise KeyError("lost")
        return "fine"

    first, second = run_ranks(2, fail_on_one, backend=None)
    assert first.result() == "fine"
    assert isinstance(second.error, KeyError)
    assert "test_runner.py" in second.traceback
    assert "in fail_on_one" in second.traceback
    assert "worker.py" not in second.traceback
    with pytest.raises(KeyError, match="lost") as caught:
        second.result()
    assert "in fail_on_one" in str(caught.value.__cause__)


def test_a_value_that_cannot_be_pickled_comes_back_as_its_description():
    (outcome,) = run_ranks(1, lambda _: threading.Lock(), backend=None)
    assert isinstance(outcome.result(), Unpicklable)
    assert "lock" in outcome.value.description
    assert "pickle" in outcome.value.reason


def test_an_exception_that_cannot_be_unpickled_comes_back_by_name():
    def fail(_collective):
        raise Awkward(1, 2)

    (outcome,) = run_ranks(1, fail, backend=None)
    with pytest.raises(RemoteError, match=r"Awkward: 1 and 2"):
        outcome.result()


@pytest.mark.parametrize("leave", [sys.exit, pytest.fail, pytest.skip])
def test_leaving_in_another_way_than_by_an_exception_is_reported(leave):
    (outcome,) = run_ranks(1, lambda _: leave("enough"), backend=None)
    assert isinstance(outcome.error, BaseException)
    assert "enough" in str(outcome.error)


# The pool


def test_the_processes_are_kept():
    assert processes_of_the_pool() == processes_of_the_pool()


def test_an_exception_on_one_rank_keeps_the_processes():
    def fail_on_one(_collective):
        assert my_rank() == 0

    before = processes_of_the_pool()
    first, second = run_ranks(2, fail_on_one, backend=None)
    assert first.error is None
    assert isinstance(second.error, AssertionError)
    assert processes_of_the_pool() == before


def test_fresh_processes_are_new_and_do_not_come_back():
    before = processes_of_the_pool()
    fresh = [outcome.result()[1] for outcome in run_ranks(2, rank_and_process, backend=None, fresh=True)]
    assert not set(fresh) & set(before)
    assert processes_of_the_pool() == before
    for process in fresh:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_fresh_processes_take_variables_and_may_leave_them_changed():
    def read_and_change(_collective):
        os.environ["LEFT_BEHIND"] = "1"
        return os.environ["EXTRA"]

    outcomes = run_ranks(2, read_and_change, backend=None, fresh=True, env={"EXTRA": "7"})
    assert [outcome.result() for outcome in outcomes] == ["7", "7"]
    with pytest.raises(ValueError, match="fresh=True"):
        run_ranks(2, read_and_change, backend=None, env={"EXTRA": "7"})


def test_warm_processes_see_the_environment_and_directory_of_the_moment(monkeypatch, tmp_path):
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.chdir(tmp_path)
    outcomes = run_ranks(2, lambda _: (os.environ["SET_LATER"], os.getcwd()), backend=None)
    assert [outcome.result() for outcome in outcomes] == [("yes", str(tmp_path))] * 2


def test_every_call_starts_from_the_same_random_state():
    def draw(_collective):
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    first = [outcome.result() for outcome in run_ranks(2, draw, backend=None)]
    second = [outcome.result() for outcome in run_ranks(2, draw, backend=None)]
    assert first == second


# Hanging and dying


def test_a_hanging_rank_is_reported_with_the_place_where_it_stands_and_the_pool_is_rebuilt():
    def hang_on_one(_collective):
        if my_rank() == 1:
            time.sleep(1000)
        return "done"

    before = processes_of_the_pool()
    start = time.monotonic()
    place = r"rank 1: in hang_on_one \(test_runner.py:\d+\)"
    with pytest.raises(RankTimeoutError, match=rf"1 of 2 ranks\nrank 0: returned\n{place}") as caught:
        run_ranks(2, hang_on_one, backend=None, timeout=1, grace=0)
    assert time.monotonic() - start < 10
    assert list(caught.value.stacks) == [1]
    assert "in hang_on_one" in caught.value.stacks[1]
    assert [outcome.value for outcome in caught.value.outcomes] == ["done"]
    assert not set(processes_of_the_pool()) & set(before)


def test_taken_signals_do_not_hide_where_a_rank_hangs_or_how_it_died():
    def take_all_signals(_collective):
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)  # as a Trainer does at its end

    def hang(_collective):
        time.sleep(1000)

    def take_and_hang(_collective):
        take_all_signals(None)
        hang(None)

    def crash(_collective):
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankTimeoutError, match="rank 0: in hang"):
        run_ranks(1, take_and_hang, backend=None, timeout=1, grace=0)
    (outcome,) = run_ranks(1, take_all_signals, backend=None)
    assert outcome.error is None
    (outcome,) = run_ranks(1, crash, backend=None)
    with pytest.raises(WorkerDiedError, match=r"(?s)SIGSEGV.*in crash"):
        outcome.result()


def test_a_rank_that_waits_for_another_is_reported_with_its_caller():
    def wait_for_nobody(_collective):
        threading.Event().wait()

    with pytest.raises(
        RankTimeoutError,
        match=r"rank 0: in wait \(threading.py:\d+\), called by wait_for_nobody \(test_runner.py:\d+\)",
    ):
        run_ranks(1, wait_for_nobody, backend=None, timeout=1, grace=0)


def test_a_crash_names_the_signal_and_the_pool_is_rebuilt():
    def crash_on_one(_collective):
        if my_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return "alive"

    before = processes_of_the_pool()
    first, second = run_ranks(2, crash_on_one, backend=None)
    assert first.result() == "alive"
    assert isinstance(second.error, WorkerDiedError)
    assert second.error.exit_code == -signal.SIGSEGV
    with pytest.raises(WorkerDiedError, match=r"(?s)rank 1 was killed by SIGSEGV.*in crash_on_one"):
        second.result()
    assert not set(processes_of_the_pool()) & set(before)


def test_ending_the_process_names_the_exit_code():
    (outcome,) = run_ranks(1, lambda _: os._exit(3), backend=None)
    with pytest.raises(WorkerDiedError, match="rank 0 ended with exit code 3"):
        outcome.result()


def test_a_rank_that_waits_for_one_that_failed_does_not_wait_for_the_time_out():
    def fail_on_one(collective):
        if collective.rank == 1:
            raise ValueError("first")
        collective.all_reduce_(torch.ones(1))

    start = time.monotonic()
    first, second = run_ranks(2, fail_on_one, timeout=60)
    assert time.monotonic() - start < 30
    assert isinstance(first.error, RuntimeError)
    assert isinstance(second.error, ValueError)
    assert [outcome.result() for outcome in run_ranks(2, lambda c: c.rank)] == [0, 1]


def test_a_rank_that_is_done_stays_connected_for_the_others():
    def one_is_late(collective):
        if collective.rank == 1:
            time.sleep(0.5)
        return collective.all_gather_object(collective.rank)

    for outcome in run_ranks(2, one_is_late):
        assert outcome.result() == [0, 1]


def test_no_process_survives_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from collective_strategy.testing import run_ranks

        def tell(_collective):
            os.write(1, f"{os.getpid()} {os.getppid()}\\n".encode())  # in one piece
            time.sleep(1000)

        run_ranks(2, tell, backend=None)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    processes = {int(word) for _ in range(2) for word in parent.stdout.readline().split()}
    assert len(processes) == 3  # two workers and the process that forked them
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while (alive := {process for process in processes if is_alive(process)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The guard


def leave_a_variable(_collective):
    os.environ["LEFT_BEHIND"] = "1"


def change_the_default_dtype(_collective):
    torch.set_default_dtype(torch.float64)


def switch_gradients_off(_collective):
    torch.set_grad_enabled(False)


def leave_a_thread(_collective):
    threading.Thread(target=time.sleep, args=(1000,), name="forgotten", daemon=True).start()


def leave_a_group(_collective):
    torch.distributed.init_process_group("gloo")


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (leave_a_variable, "variable LEFT_BEHIND was None and is '1'"),
        (change_the_default_dtype, "default dtype was torch.float32 and is torch.float64"),
        (switch_gradients_off, r"is_grad_enabled\(\) was True and is False"),
        (leave_a_thread, "threads left running: forgotten"),
        (leave_a_group, "were 0 live torch.distributed groups and are 1"),
    ],
)
def test_a_function_that_leaves_the_process_changed_fails_and_the_pool_is_rebuilt(leak, message):
    before = processes_of_the_pool()
    for outcome in run_ranks(2, leak, backend=None):
        with pytest.raises(LeakedStateError, match=message):
            outcome.result()
    assert not set(processes_of_the_pool()) & set(before)


def test_the_own_error_of_a_function_is_not_hidden_by_what_it_left_behind():
    def leave_and_fail(_collective):
        os.environ["LEFT_BEHIND"] = "1"
        raise ValueError("mine")

    (outcome,) = run_ranks(1, leave_and_fail, backend=None)
    assert isinstance(outcome.error, ValueError)
    assert "LEFT_BEHIND" in outcome.traceback


def test_a_thread_that_is_about_to_end_is_no_leak():
    def start_a_short_thread(_collective):
        threading.Thread(target=time.sleep, args=(0.2,)).start()

    (outcome,) = run_ranks(1, start_a_short_thread, backend=None)
    assert outcome.error is None


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        run_ranks(0, rank_and_process)
