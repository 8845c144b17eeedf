"""Sums in memory that the ranks of one host share: right, cheap to fall back from, and nothing is left behind."""

import copy
import gc
import os
import pickle
import resource
import signal
import sys
import time
import weakref

import pytest
import torch

from collective_strategy.collectives import errors
from collective_strategy.testing import run_ranks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files without a name are Linux's")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.complex64]


def values(rank, numel, dtype, seed=0):
    """Small whole numbers, whose sum every dtype has exactly."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    real = torch.randint(-8, 8, (numel,), generator=generator)
    return (real + 1j * real.flip(0)).to(dtype) if dtype.is_complex else real.to(dtype)


def filled(collective, numel, dtype, seed=0):
    """A tensor of shared memory with this rank's values."""
    tensor = collective.shared_empty(numel, dtype, torch.device("cpu"))
    return tensor.copy_(values(collective.rank, numel, dtype, seed))


def total(n, numel, dtype, seed=0):
    """The sum, computed by one process."""
    return sum((values(rank, numel, dtype, seed) for rank in range(1, n)), values(0, numel, dtype, seed))


def ended(fn, n=2, **options):
    """What became of the ranks of a function, in processes of its own."""
    return run_ranks(n, fn, fresh=True, check=False, **options)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_equal_one_process(n):
    """Lengths around a cache line and a page, every dtype, several in flight, waited for in another order."""
    cases = [(length, dtype) for length in (1, 15, 17, 63, 1024, 100_003) for dtype in DTYPES]

    def work(collective):
        assert collective.share_memory()
        tensors = [filled(collective, *case) for case in cases]
        handles = [collective.all_reduce_(tensor, async_op=True) for tensor in tensors]
        for handle in reversed(handles):
            handle.wait()
        assert all(handle.is_completed() for handle in handles)
        return tensors

    for outcome in run_ranks(n, work):
        for (numel, dtype), result in zip(cases, outcome.result(), strict=True):
            assert torch.equal(result, total(n, numel, dtype)), (numel, dtype)


def test_the_mean_and_a_sum_that_is_waited_for_at_once():
    """The other ways to call all_reduce_."""

    def work(collective):
        collective.share_memory()
        mean, at_once, most = (filled(collective, 1000, torch.float64) for _ in range(3))
        collective.all_reduce_(mean, "mean")
        collective.all_reduce_(at_once)
        collective.all_reduce_(most, "max")
        return mean, at_once, most

    right = total(4, 1000, torch.float64)
    largest = torch.stack([values(rank, 1000, torch.float64) for rank in range(4)]).amax(0)
    for outcome in run_ranks(4, work):
        mean, at_once, most = outcome.result()
        assert torch.equal(mean, right / 4)
        assert torch.equal(at_once, right)
        assert torch.equal(most, largest)


def test_ranks_that_come_at_different_times():
    """300 rounds over the same tensors, some ranks asleep between any two acts; all-reduces through sockets between."""

    def work(collective):
        collective.share_memory()
        tensors = [collective.shared_empty(numel, torch.float32, torch.device("cpu")) for numel in (10, 5000, 70_001)]
        flag, wrong = torch.zeros(3), []

        def sleep(*what):
            if hash((collective.rank, *what)) % 29 == 0:
                time.sleep(0.003)

        for step in range(300):
            handles = []
            for k, tensor in enumerate(tensors):
                sleep(step, k, 0)
                tensor.copy_(values(collective.rank, tensor.numel(), torch.float32, step))
                sleep(step, k, 1)
                handles.append(collective.all_reduce_(tensor, async_op=True))
                if (step + k) % 3 == 0:  # before, between or after the sums
                    handles.append(collective.all_reduce_(flag, "max", async_op=True))
            for handle in handles if step % 2 else reversed(handles):
                sleep(step, 2)
                handle.wait()
            expected = [total(collective.world_size, t.numel(), torch.float32, step) for t in tensors]
            wrong += [step for t, right in zip(tensors, expected, strict=True) if not torch.equal(t, right)]
        return wrong

    assert [outcome.result() for outcome in run_ranks(4, work, timeout=100)] == [[]] * 4


def test_an_operation_that_began_before_is_no_meeting():
    """Rank 1 takes part in the all-reduce, and only later fills its tensor: rank 0 must not read it before."""

    def work(collective):
        collective.share_memory()
        early = collective.all_reduce_(torch.zeros(1), async_op=True)
        tensor = collective.shared_empty(1000, torch.float32, torch.device("cpu")).fill_(-1)
        if collective.rank == 1:
            early.wait()
            time.sleep(1)
        handle = collective.all_reduce_(tensor.fill_(1), async_op=True)
        early.wait()
        handle.wait()
        return tensor.unique().tolist()

    assert [outcome.result() for outcome in run_ranks(2, work)] == [[2.0]] * 2


def test_an_all_reduce_of_nothing_is_no_meeting():
    """No rank waits for another in it."""

    def work(collective):
        collective.share_memory()
        tensor = collective.shared_empty(1000, torch.float32, torch.device("cpu")).fill_(-1)
        if collective.rank == 1:
            time.sleep(1)
        handle = collective.all_reduce_(tensor.fill_(1), async_op=True)
        collective.all_reduce_(torch.zeros(0), async_op=True).wait()
        handle.wait()
        return tensor.unique().tolist()

    assert [outcome.result() for outcome in run_ranks(2, work)] == [[2.0]] * 2


def used_bytes(collective):
    """Of this rank's file."""
    gc.collect()
    return os.fstat(collective._memory._own).st_blocks * 512


def test_memory_is_given_back():
    """With the last view of a tensor; not before; and the other ranks' maps do not keep it."""

    def work(collective):
        collective.share_memory()
        before = used_bytes(collective)
        kept = []
        for step in range(200):
            tensor = filled(collective, 100_000, torch.float32, step)
            collective.all_reduce_(tensor)
            kept = [*kept[-1:], (step, tensor[::7])]
        assert used_bytes(collective) - before < 3 * 500_000
        assert len(collective._memory._mapped) < 130  # places of tensors that were dropped are forgotten
        for step, view in kept:
            assert torch.equal(view, total(2, 100_000, torch.float32, step)[::7])
        del kept, tensor, view
        return used_bytes(collective) - before

    assert all(outcome.result() < 10_000 for outcome in run_ranks(2, work))


def test_a_forked_process_takes_nothing_away():
    """As a worker of a DataLoader, which drops the tensors that it got with its parent's memory."""

    def work(collective):
        collective.share_memory()
        held = [filled(collective, 10_000, torch.float32)]
        child = os.fork()
        if not child:
            held.clear()
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        collective.all_reduce_(held[0])
        return held[0]

    assert all(torch.equal(o.result(), total(2, 10_000, torch.float32)) for o in ended(work))


def test_copies_of_a_shared_tensor():
    """Deep copies, pickles and memory of torch's own are apart from the tensor."""

    def work(collective):
        collective.share_memory()
        tensor = filled(collective, 100, torch.float32)
        copies = [copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), tensor.clone()]
        collective.all_reduce_(tensor)
        own = values(collective.rank, 100, torch.float32)
        return all(torch.equal(other, own) for other in copies)

    assert all(outcome.result() for outcome in run_ranks(2, work))


def open_files():
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_tensors_take_no_open_files():
    """However many there are, and however many of them were: a process has a thousand files, often."""

    def work(collective):
        collective.share_memory()
        before = open_files()
        for step in range(5):
            tensors = [filled(collective, 1000, torch.float32, step) for _ in range(100)]
            for handle in [collective.all_reduce_(tensor, async_op=True) for tensor in tensors]:
                handle.wait()
            assert all(torch.equal(tensor, total(4, 1000, torch.float32, step)) for tensor in tensors)
        return open_files() - before

    assert [outcome.result() for outcome in run_ranks(4, work)] == [0] * 4


@pytest.mark.parametrize("n", [2, 4])
def test_no_file_stays_open(n):
    """After the collective is torn down and forgotten."""

    def work(_):
        import collective_strategy

        def opened():
            gc.collect()
            links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                     if os.path.exists(f"/proc/self/fd/{name}")]  # fmt: skip
            return sum("collective_strategy" in link for link in links)

        collective = collective_strategy.init(timeout=20)
        collective.share_memory()
        tensor = filled(collective, 100, torch.float32)
        collective.all_reduce_(tensor)
        during = opened()
        memory = weakref.ref(collective._memory)
        collective.teardown()
        del collective
        gc.collect()
        return during, memory() is None, opened(), tensor.sum().item()

    for outcome in ended(work, n, backend=None):
        during, forgotten, after, value = outcome.result()
        assert during > n
        assert forgotten
        assert not after
        assert value == total(n, 100, torch.float32).sum().item()


# -- where memory is not shared ----------------------------------------------------------------------------------------


def test_switched_off_on_one_rank(monkeypatch):
    """All ranks use sockets then."""

    def work(collective):
        if collective.rank == 1:
            os.environ["COLLECTIVE_STRATEGY_SHARED_MEMORY"] = "0"
        shares = collective.share_memory()
        return shares, collective.all_reduce_(filled(collective, 1000, torch.float32))

    for outcome in ended(work):
        shares, result = outcome.result()
        assert not shares
        assert torch.equal(result, total(2, 1000, torch.float32))


def test_a_rank_that_may_open_no_more_files():
    """Wherever in the opening it is that it fails, no rank shares then, and the sum is right; and so it is beyond."""

    def work(collective):
        groups = [collective.duplicate() for _ in range(8)]
        found = []
        for left, group in enumerate(groups):
            if collective.rank == 1:
                limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
                free = [number for number in range(1000) if not os.path.lexists(f"/proc/self/fd/{number}")]
                resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], most))
            shares = group.share_memory()
            if collective.rank == 1:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            found.append((shares, torch.equal(group.all_reduce_(filled(group, 99, torch.int64)), right)))
        return found

    right = total(2, 99, torch.int64)
    first, second = (outcome.result() for outcome in ended(work))
    assert first == second
    assert all(correct for _, correct in first)
    assert not first[0][0]
    assert first[-1][0]


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode], ids=["meta", "inference"])
def test_the_mode_in_which_memory_was_first_shared(mode):
    """Is no matter of the sums: a Trainer validates in inference mode, and makes models on no device."""

    def work(collective):
        with mode():
            assert collective.share_memory()
        return collective.all_reduce_(filled(collective, 1000, torch.float32))

    assert all(torch.equal(o.result(), total(2, 1000, torch.float32)) for o in ended(work))


def test_ranks_that_the_launcher_calls_two_nodes():
    """As in a test of a network on one machine."""

    def work(_):
        import collective_strategy

        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
        with collective_strategy.init(timeout=20) as collective:
            return collective.share_memory(), collective.all_reduce_(filled(collective, 1000, torch.float32))

    for outcome in ended(work, backend=None):
        shares, result = outcome.result()
        assert not shares
        assert torch.equal(result, total(2, 1000, torch.float32))


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["on one rank", "on all"])
def test_a_tensor_for_which_there_is_no_memory(ranks):
    """It is sent, beside others that are not."""

    def work(collective):
        collective.share_memory()
        before = filled(collective, 1000, torch.float32, 1)
        if collective.rank in ranks:
            end = os.fstat(collective._memory._own).st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (end, resource.RLIM_INFINITY))
        outside = filled(collective, 1000, torch.float32, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        after = filled(collective, 1000, torch.float32, 3)
        tensors = [before, outside, after]
        for handle in [collective.all_reduce_(tensor, async_op=True) for tensor in tensors]:
            handle.wait()
        return tensors

    for outcome in ended(work):
        for seed, result in enumerate(outcome.result(), start=1):
            assert torch.equal(result, total(2, 1000, torch.float32, seed))


# -- mistakes and accidents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("different", ["number", "size"])
def test_ranks_that_sum_other_tensors(different):
    """Refused on all ranks with the numbers, before anything is changed."""

    def work(collective):
        collective.share_memory()
        odd = collective.rank == 1
        lengths = [100, 50 if odd and different == "size" else 60, *([70] if odd and different == "number" else [])]
        tensors = [filled(collective, numel, torch.float32) for numel in lengths]
        handles = [collective.all_reduce_(tensor, async_op=True) for tensor in tensors]
        with pytest.raises(errors.CollectiveError) as caught:
            handles[0].wait()
        with pytest.raises(errors.CollectiveError, match="broken"):
            collective.all_reduce_(tensors[0])
        return str(caught.value), torch.equal(tensors[0], values(collective.rank, 100, torch.float32))

    texts = ("rank 0: 2", "rank 1: 3") if different == "number" else ("rank 0: 240", "rank 1: 200")
    for outcome in ended(work, timeout=10):
        message, untouched = outcome.result()
        assert all(text in message for text in texts), message
        assert untouched


@pytest.mark.parametrize("accident", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "is stopped"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_is_lost_before_it_adds_up(accident, n):
    """The others get an error that names the operation within the time-out, and do not wait for ever."""

    def work(collective):
        collective.share_memory()
        tensors = [filled(collective, 1000, torch.float32) for _ in range(2)]
        collective.all_reduce_(tensors[0])
        if collective.rank == 1:
            os.kill(os.getpid(), accident)
        began = time.monotonic()
        with pytest.raises(errors.CollectiveError, match=r"all_reduce_\(op=sum\)"):
            collective.all_reduce_(tensors[1])
        waited = time.monotonic() - began
        if accident == signal.SIGSTOP and collective.rank == 0:
            os.kill(collective.all_pids[1], signal.SIGCONT)
        return waited

    def all_know(collective):
        collective.all_pids = collective.all_gather_object(os.getpid())
        return work(collective)

    outcomes = ended(all_know, n, timeout=8)
    for rank in set(range(n)) - {1}:
        assert outcomes[rank].result() < 60


@pytest.mark.parametrize("way", ["teardown", "abort", "an error of its own", "forgotten"])
def test_a_rank_that_leaves_without_dying(way):
    """The others do not wait for the time-out of a minute."""

    def work(collective):
        collective.share_memory()
        tensor = filled(collective, 1000, torch.float32)
        collective.all_reduce_(tensor)
        if collective.rank == 1:
            if way == "teardown":
                collective.teardown()
            elif way == "abort":
                collective.abort("no more data")
            elif way == "forgotten":
                collective._memory = None
            else:
                collective.all_reduce_(tensor, async_op=True)
                collective._memory._meetings._timeout = 0.1
                with pytest.raises(TimeoutError, match=r"ranks \[0\] of the group timed out"):
                    collective._memory.complete()
            time.sleep(5)
            return 0.0, ""
        if way == "an error of its own":
            time.sleep(2)
        began = time.monotonic()
        with pytest.raises(errors.CollectiveError, match="rank 1 of the group has left") as caught:
            collective.all_reduce_(tensor)
        return time.monotonic() - began, str(caught.value)

    waited, message = ended(work, timeout=60)[0].result()
    assert waited < 30
    assert "all_reduce_(op=sum)" in message


def test_a_forked_process_that_ends_is_not_the_rank():
    """What is finalized at its end says nothing in the rank's name."""

    def work(collective):
        collective.share_memory()
        child = os.fork()
        if not child:
            weakref.finalize._exitfunc()  # as at the end of a process
            os._exit(0)
        os.waitpid(child, 0)
        return collective.all_reduce_(filled(collective, 1000, torch.float32))

    assert all(torch.equal(o.result(), total(2, 1000, torch.float32)) for o in ended(work))
