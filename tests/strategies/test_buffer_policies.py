"""What becomes of buffers that each rank updates by itself: four policies, at four events, on a 2 x 2 mesh."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy, GradientReducer, shared
from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}


class Statistics(L.LightningModule):
    """``own`` is private to its model rank, ``common`` is shared; both become 10 + rank in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.own, self.common = nn.Module(), shared(nn.Module(), over="model")
        for part in (self.own, self.common):
            part.register_buffer("mean", torch.zeros(()))
            part.register_buffer("count", torch.zeros((), dtype=torch.int64))
            part.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.seen: dict[str, Any] = {}

    def look(self, event: str) -> None:
        self.seen.setdefault(event, [self.own.mean.item(), self.common.mean.item(), self.own.count.item()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.look("second step")
        for part in (self.own, self.common):
            part.mean.fill_(10 + self.collective.rank)
            part.count += 1 + self.collective.rank
        return self.layer(batch).sum()

    def on_validation_start(self) -> None:
        self.look("validation")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look("test")
        self.seen["verified"] = self.trainer.strategy.verify().tensors
        self.seen["mask"] = self.own.mask.tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def scenario(_: Any) -> dict[str, Any]:
    found = {}
    for policy in ("first", "first_each_step", "mean", "own"):
        model = Statistics()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=4,
            strategy=CollectiveStrategy(mesh=MESH, timeout=30, buffers=policy),
            max_epochs=1,
            limit_train_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        data = DataLoader(torch.ones(8, 1), batch_size=2)
        trainer.fit(model, data, data)
        for part in (model.own, model.common):
            part.mean.fill_(20 + model.collective.rank)
        trainer.test(model, data, verbose=False)
        table = str(trainer.strategy.explain())
        found[policy] = {**model.seen, "table": table}
        trainer.strategy.collective.teardown()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return [outcome.result() for outcome in run_ranks(4, scenario, backend=None, fresh=True, timeout=100)]


FIRST, MEAN = [[10, 10], [11, 10], [10, 10], [11, 10]], [[11, 11.5], [12, 11.5], [11, 11.5], [12, 11.5]]
OWN = [[10 + rank] * 2 for rank in range(4)]


@pytest.mark.parametrize(
    ("policy", "second_step", "validation"),
    [("first", OWN, FIRST), ("first_each_step", FIRST, FIRST), ("mean", OWN, MEAN), ("own", OWN, OWN)],
)
def test_floating_buffers_in_training_at_validation_and_at_test(ranks, policy, second_step, validation):
    seen = [rank[policy] for rank in ranks]
    assert [rank["second step"][:2] for rank in seen] == second_step
    assert [rank["validation"][:2] for rank in seen] == validation
    # a run of its own starts with set-up, after which no policy leaves differences
    at_test = FIRST if policy == "own" else validation
    assert [rank["test"][:2] for rank in seen] == [[value + 10 for value in row] for row in at_test]


def test_counters_are_the_first_ranks(ranks):
    # ranks count 1, 2, 3, 4 per step; model rank 1's first data rank is rank 1
    assert [rank["mean"]["validation"][2] for rank in ranks] == [2, 4, 2, 4]


def test_infinite_entries_of_masks_stay_what_they_are(ranks):
    assert all(rank[policy]["mask"] == [0.0, float("-inf")] for rank in ranks for policy in rank)


def test_verify_compares_buffers_while_evaluating_where_the_policy_makes_them_equal(ranks):
    assert [ranks[0][policy]["verified"] for policy in ("first", "mean", "own")] == [8, 8, 2]


def test_the_table_names_the_policy(ranks):
    for policy, text in (
        ("first", "over data at evaluation: the first rank's"),
        ("first_each_step", "over data before every batch: the first rank's"),
        ("mean", "over data, model at evaluation: the mean"),
        ("own", "over data at set-up only"),
    ):
        assert text in ranks[0][policy]["table"]


def test_a_plain_loop_makes_them_equal_when_it_wants():
    def check(collective):
        norm = nn.BatchNorm1d(2)
        reducer = GradientReducer(norm, collective)
        norm(torch.full((2, 2), 1.0 + collective.rank))
        own = norm.running_mean.tolist()
        reducer.make_buffers_equal("mean")
        mean = norm.running_mean.tolist(), norm.num_batches_tracked.item()
        equal = norm.running_var.clone()
        for _ in range(5):
            reducer.make_buffers_equal("mean")
        return own[0], mean[0][0], mean[1], torch.equal(equal, norm.running_var)

    found = [o.result() for o in run_ranks(3, check, timeout=20)]
    assert [rank[0] for rank in found] == pytest.approx([0.1, 0.2, 0.3])
    assert {rank[1] for rank in found} == {found[0][1]}
    assert found[0][1] == pytest.approx(0.2)
    assert [rank[2:] for rank in found] == [(1, True)] * 3


def test_buffers_of_unusual_memory_are_broadcast():
    def check(collective):
        module = nn.Module()
        value = float(collective.rank)
        module.register_buffer("expanded", torch.full((1, 2), value).expand(3, 2))
        module.register_buffer("conjugate", torch.full((2,), value, dtype=torch.complex64).conj())
        module.register_buffer("transposed", torch.full((2, 3), value).t())
        module.register_buffer("narrow", torch.full((2,), value).to(torch.float8_e4m3fn))
        GradientReducer(module, collective).broadcast_replicas()
        return [buffer.to(torch.complex64).real.sum().item() for buffer in module.buffers()], module.expanded.stride()

    assert [o.result() for o in run_ranks(2, check, timeout=20)] == [([0.0] * 4, (0, 1))] * 2
