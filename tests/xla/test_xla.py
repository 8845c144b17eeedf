"""What is peculiar to XLA: graphs that must be alike, programs that are compiled, a runtime that ends the process."""

import fitted_nets
import pytest
import torch

from collective_strategy import GradientReducer
from collective_strategy.collectives import CollectiveStateError, create_collective
from collective_strategy.collectives.xla import XLACollective
from collective_strategy.sharing import SharedModule
from collective_strategy.testing import WorkerDiedError, run_ranks

INF, NAN = float("inf"), float("nan")


class Recording(XLACollective):
    """Notes of each reduction how many tensors it takes."""

    def _list_reduced(self, op, tensors):
        self._root.__dict__.setdefault("made", []).append(len(tensors))
        return super()._list_reduced(op, tensors)


def results(n, function, **options):
    return [outcome.result() for outcome in run_ranks(n, function, backend="xla", **options)]


def compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def test_a_nan_stays_where_it_belongs():
    """torch_xla's broadcast multiplies with 0, and its gathers add a number made from the last result."""

    def values(collective):
        mine = torch.full((2,), 7.0 if collective.rank == 1 else NAN).to(collective.device)
        sent = collective.broadcast(mine, 1)
        poison = torch.tensor([INF, 1.0]).to(collective.device)
        collective.all_to_all(poison)
        gathered = collective.all_gather(torch.ones(1).to(collective.device))
        scattered = collective.reduce_scatter(torch.ones(2).to(collective.device))
        return sent.tolist(), gathered.flatten().tolist(), scattered.tolist(), sent.device.type

    assert results(2, values) == [([7.0, 7.0], [1.0, 1.0], [2.0], "xla")] * 2


def test_what_one_rank_alone_has_pending_hangs_nobody():
    def values(collective):
        x = torch.tensor([1.0 + collective.rank]).to(collective.device)
        if collective.rank == 0:
            pending = (x * 3 + 1).sin()
        total = collective.all_reduce(x)
        collective.barrier()
        longest = collective.all_gather_object("x" * collective.rank)
        if collective.rank == 0:
            assert pending.item() == pytest.approx(torch.tensor(4.0).sin().item())
        return total.item(), longest, collective.any(collective.rank == 1)

    assert results(2, values) == [(3.0, ["", "x"], True)] * 2


def test_lengths_that_change_need_few_programs():
    def programs(collective):
        before = compiled()
        for length in range(1, 200):
            collective.all_gather_object("x" * length * (1 + collective.rank))
        return compiled() - before

    for count in results(2, programs):
        assert count <= 16  # a header, and lengths up to 512 in powers of two, with what pads and cuts them


def test_a_step_has_one_collective_per_group_with_gradients():
    """Over the data axis the private weights; over all ranks the shared ones, and the flags with both."""

    def calls(collective):
        model = torch.nn.Sequential(SharedModule(fitted_nets.layer(3, 3, 1), over="model"), fitted_nets.layer(3, 3, 2))
        model.to(collective.device)
        reducer = GradientReducer(model, collective)
        collective.made = []
        for _ in range(3):
            with reducer.backward():
                model(torch.ones(1, 3).to(collective.device)).sum().backward()
        return collective.made

    # weight, bias and flags of each of the two groups, in each of three backwards
    for outcome in run_ranks(4, calls, backend=Recording, mesh={"data": 2, "model": 2}):
        assert outcome.result() == [3, 3] * 3


def test_spmd_mode_is_refused():
    def refused(_):
        import torch_xla.runtime as runtime

        runtime.use_spmd()
        with pytest.raises(CollectiveStateError, match="SPMD mode"):
            create_collective("xla").setup()

    (outcome,) = run_ranks(1, refused, backend=None, fresh=True)
    outcome.result()


def test_processes_on_cpus_are_refused_because_they_cannot_meet():
    def refused(_):
        create_collective("xla").setup()

    for outcome in run_ranks(1, refused, backend=None, fresh=True):
        assert outcome.error is None  # one is enough for itself
    from collective_strategy.collectives import CollectiveError, LaunchEnvironment

    def two(_):
        with pytest.raises(CollectiveError, match=r"rank 1 of 2.*replica 0 of 1"):
            create_collective("xla").setup(LaunchEnvironment(rank=1, world_size=2))

    run_ranks(1, two, backend=None, fresh=True)[0].result()


def test_the_end_of_the_process_says_where_each_rank_stood():
    """Without check mode XLA ends all ranks 15 s after one waits for another in vain."""

    def waits_in_vain(collective):
        if collective.rank == 1:
            sleep_far_too_long()
        collective.barrier()

    def sleep_far_too_long():
        import time

        time.sleep(60)

    for outcome in run_ranks(2, waits_in_vain, backend="xla", check=False, timeout=40, fresh=True):
        assert isinstance(outcome.error, WorkerDiedError)
        assert "rank 1: in sleep_far_too_long" in str(outcome.error)
        assert "rank 0: in wait_for_own" in str(outcome.error)


def test_in_check_mode_the_missing_rank_is_named_first():
    def waits_in_vain(collective):
        if collective.rank == 0:
            collective.barrier()

    first, second = run_ranks(2, waits_in_vain, backend="xla", timeout=2)
    assert "missing: rank 1" in str(first.error)
    assert second.error is None


def test_a_trainer_on_a_tpu_host():
    """Lightning picks its own accelerator there, and accepts strategies only that derive from its own."""

    def fit(_):
        import lightning as L
        from lightning.fabric.accelerators import XLAAccelerator

        XLAAccelerator.is_available = staticmethod(lambda: True)
        XLAAccelerator.auto_device_count = staticmethod(lambda: 2)
        trainer = L.Trainer(
            strategy="collective_xla", max_steps=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        net = fitted_nets.Net(0, False)
        trainer.fit(net, fitted_nets.DataLoader(fitted_nets.data(1, 32), 4))
        trainer.strategy.collective.teardown()
        kinds = type(trainer.accelerator).__name__, type(trainer.precision_plugin).__name__
        return kinds, trainer.world_size, trainer.global_step, net.last.weight.detach().sum().item()

    outcomes = run_ranks(2, fit, backend=None, ranks="device", fresh=True)
    first, second = (outcome.result() for outcome in outcomes)
    assert first == second
    assert first[:3] == (("XLAAccelerator", "XLAPrecision"), 2, 2)
