"""Norms, clipping and loss scaling: one value on all ranks, every weight counted once.

The weights: `shared` has gradient 12 everywhere, `piece` has 3 on model rank 0 and 4 on model rank 1; 13 together.
"""

import math
from typing import Any

import lightning as L
import pytest
import torch
from engine_ranks import MESH_2X2, MODEL_2, common, per_rank
from torch import nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy, GradientReducer
from collective_strategy.sharing import private, sharded, shared
from collective_strategy.testing import run_ranks

INF = float("inf")


class Pieces(nn.Module):
    """One weight of each kind."""

    def __init__(self, dtype: torch.dtype = torch.float64, unmarked: bool = False) -> None:
        super().__init__()
        self.shared = nn.ParameterList([nn.Parameter(torch.zeros((), dtype=dtype))])
        self.piece = nn.ParameterList([nn.Parameter(torch.zeros((), dtype=dtype))])
        shared(self.shared, over="model")
        if not unmarked:
            sharded(self.piece, "*", over="model", dim=0)

    def loss(self, common_part: float, own: float) -> torch.Tensor:
        """Gradients: `common_part` for the shared weight, of which each model rank has half, `own` for the piece."""
        return self.shared[0] * common_part / 2 + self.piece[0] * own


def reduced(collective, common_part: float = 12.0, own: tuple[float, float] = (3.0, 4.0), **how: Any):
    """A module with reduced gradients; data ranks differ, and have these on average."""
    module = Pieces(**how)
    reducer = GradientReducer(module, collective)
    spread = 1.0 if collective.world_size == 2 else 0.5 + collective["data"].rank
    with reducer.backward():
        (module.loss(common_part, own[collective["model"].rank]) * spread).backward()
    return module, reducer


def gradients(module: Pieces) -> list[float]:
    return [module.shared[0].grad.item(), module.piece[0].grad.item()]


@pytest.mark.parametrize("mesh", [MODEL_2, MESH_2X2], ids=["model 2", "data 2 x model 2"])
@pytest.mark.parametrize("unmarked", [False, True], ids=["sharded", "unmarked"])
def test_norms_count_replicas_once_and_pieces_all(mesh, unmarked):
    def norms(collective):
        _, reducer = reduced(collective, unmarked=unmarked)
        return [reducer.grad_norm(norm_type=p).item() for p in (1, 2, 3, INF)]

    n = math.prod(mesh.values())
    expected = [19.0, 13.0, (12**3 + 3**3 + 4**3) ** (1 / 3), 12.0]
    assert common(n, norms, mesh=mesh) == pytest.approx(expected, rel=1e-14)


def test_norms_of_one_process_are_those_of_torch():
    def norms(collective):
        torch.manual_seed(0)
        layer = nn.Linear(5, 3)
        reducer = GradientReducer(layer, collective)
        with reducer.backward():
            layer(torch.ones(2, 5)).square().sum().backward()
        ours = [reducer.grad_norm(norm_type=p) for p in (1, 2, 3, INF)]
        theirs = [torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()], p) for p in (1, 2, 3, INF)]
        return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]

    assert all(common(2, norms))


def test_norms_of_part_of_the_weights():
    def norms(collective):
        module, reducer = reduced(collective)
        return reducer.grad_norm(module.shared.parameters()).item(), reducer.grad_norm(module.piece.parameters()).item()

    assert common(4, norms, mesh=MESH_2X2) == (12.0, 5.0)


def test_pieces_over_two_axes():
    """p differs on all four ranks (1, 2, 3, 4), q over the first axis only (5, 6), r is equal (7)."""

    def norm(collective):
        tall, wide = collective["tall"].rank, collective["wide"].rank
        module = nn.ModuleDict({name: nn.ParameterList([nn.Parameter(torch.zeros(()))]) for name in "pqr"})
        shared(module["q"], over="wide", grad="mean")
        shared(module["r"], over=("tall", "wide"), grad="none")
        private(module["p"])
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            values = {"p": 1.0 + 2 * tall + wide, "q": 5.0 + tall, "r": 7.0}
            sum(module[name][0] * value for name, value in values.items()).backward()
        return (
            reducer.grad_norm().item(),
            reducer.grad_norm(norm_type=INF).item(),
            reducer.grad_norm(norm_type=1).item(),
        )

    squares = sum(k * k for k in range(1, 8))
    found = common(4, norm, mesh={"tall": 2, "wide": 2}, data_axis=None)
    assert found == pytest.approx((squares**0.5, 7.0, 28.0), rel=1e-6)


def test_clipping_to_one():
    def clip(collective):
        module, reducer = reduced(collective)
        norm = reducer.clip_grad_norm_(1.0)
        return norm.item(), gradients(module)

    results = per_rank(4, clip, mesh=MESH_2X2)
    assert [norm for norm, _ in results] == [13.0] * 4
    for rank, (_, (common_part, own)) in enumerate(results):
        assert common_part == pytest.approx(12 / 13, rel=1e-6)
        assert own == pytest.approx((3 + rank % 2) / 13, rel=1e-6)
    assert len({common_part for _, (common_part, _) in results}) == 1  # the same bits


def test_below_the_threshold_no_bit_changes():
    def clip(collective):
        module, reducer = reduced(collective, 0.1, (0.3, 0.7), dtype=torch.float32)
        before = gradients(module)
        reducer.clip_grad_norm_(100.0)
        return gradients(module) == before

    assert common(4, clip, mesh=MESH_2X2)


def test_bfloat16_gradients_have_a_float32_norm():
    """4096 ones and 1: bfloat16 has no 64.0078, and cannot count to 4097."""

    def norm(collective):
        module = nn.ParameterList([nn.Parameter(torch.zeros(4097, dtype=torch.bfloat16))])
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            module[0].sum().backward()
        found = reducer.grad_norm()
        return str(found.dtype), found.item(), reducer.clip_grad_norm_(1.0).item(), module[0].grad.float().norm().item()

    dtype, norm_found, _, clipped = common(2, norm)
    assert (dtype, norm_found) == ("torch.float32", pytest.approx(4097**0.5, rel=1e-6))
    assert clipped == pytest.approx(1.0, rel=1e-2)
    dtype, norm_found, *_ = common(2, norm, mesh=MODEL_2)
    assert (dtype, norm_found) == ("torch.float32", pytest.approx((2 * 4097) ** 0.5, rel=1e-6))


def test_the_norm_has_one_dtype_where_ranks_use_different_weights():
    def norm(collective):
        module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False, dtype=torch.float64)])
        reducer = GradientReducer(module, collective)
        loss = module[0](torch.ones(1, 1)).sum()
        if collective.rank == 0:
            loss = loss + module[1](torch.ones(1, 1).double()).sum() * 0.1
        with reducer.backward():
            loss.backward()
        found = reducer.grad_norm()
        return str(found.dtype), found.item()

    assert common(2, norm, mesh=MODEL_2) == ("torch.float64", pytest.approx(2.01**0.5))


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_value_that_is_not_a_number_reaches_every_norm(bad_rank):
    def norms(collective):
        own = (math.nan, 1.0) if bad_rank == 0 else (1.0, math.nan)
        _, reducer = reduced(collective, 1.0, own)
        return [math.isnan(reducer.grad_norm(norm_type=p).item()) for p in (1, 2, INF)]

    assert common(2, norms, mesh=MODEL_2) == [True, True, True]


def test_an_infinite_value_reaches_every_norm():
    def norms(collective):
        _, reducer = reduced(collective, 1.0, (INF, 1.0))
        return [reducer.grad_norm(norm_type=p).item() for p in (1, 2, INF)]

    assert common(2, norms, mesh=MODEL_2) == [INF, INF, INF]


def test_sparse_and_complex_gradients_have_a_norm():
    def norm(collective):
        module = nn.ModuleList([nn.Embedding(3, 1, sparse=True)])
        module.append(nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.complex64))]))
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            (module[0](torch.tensor([0, 0])).sum() + (module[1][0] * (1 - 2j)).real.sum() * 2).backward()
        before = reducer.clip_grad_norm_(1.0).item()
        return before, reducer.grad_norm().item()

    assert common(2, norm) == (pytest.approx(24**0.5), pytest.approx(1.0, rel=1e-5))


def test_ranks_without_weights_take_part():
    def norm(collective):
        module = nn.ParameterList([nn.Parameter(torch.zeros(()))] if collective["model"].rank == 0 else [])
        reducer = GradientReducer(module, collective)
        with reducer.backward():
            if len(module):
                (module[0] * 3).backward()
        return reducer.clip_grad_norm_(1.0).item(), reducer.grad_norm(norm_type=INF).item()

    assert common(4, norm, mesh=MESH_2X2) == (3.0, pytest.approx(1.0, rel=1e-5))


# Loss scaling


@pytest.mark.parametrize("optimizes_on_rank_1", [True, False], ids=["used", "without gradients on rank 1"])
def test_one_model_rank_with_an_infinite_gradient_makes_all_skip(optimizes_on_rank_1):
    def train(collective):
        module = Pieces(torch.float32)
        optimizer = torch.optim.SGD(module.piece.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        reducer = GradientReducer(module, collective)
        seen = []
        for own in (1.0, INF, 1.0):
            optimizer.zero_grad()
            used = collective["model"].rank == 0 or optimizes_on_rank_1
            with reducer.backward():
                if used:
                    scaler.scale(module.piece[0] * (own if collective["model"].rank == 0 else 1.0)).backward()
            reducer.unscale_(scaler, optimizer)
            reducer.clip_grad_norm_(10.0, module.piece.parameters())
            scaler.step(optimizer)
            scaler.update()
            seen.append((module.piece[0].item() if used else None, scaler.get_scale()))
        return seen

    for rank, seen in enumerate(per_rank(4, train, mesh=MESH_2X2)):
        weights = [-1.0, -1.0, -2.0] if rank % 2 == 0 or optimizes_on_rank_1 else [None] * 3
        assert seen == list(zip(weights, [4.0, 2.0, 2.0], strict=True))


# Under the Trainer


class Fitted(L.LightningModule):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.parts = Pieces()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.parts.loss(12.0, 3.0 + self.collective["model"].rank)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(by_hand: bool) -> list[float]:
    strategy = CollectiveStrategy(mesh=MESH_2X2, timeout=30)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=None if by_hand else 1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Fitted(by_hand)
    trainer.fit(module, DataLoader([0.0], batch_size=1))
    strategy.collective.teardown()
    return [module.parts.shared[0].item(), module.parts.piece[0].item()]


def test_the_trainer_clips_with_the_norm_of_the_whole_model():
    def both(_):
        return fit(by_hand=False), fit(by_hand=True)

    results = [outcome.result() for outcome in run_ranks(4, both, backend=None, fresh=True, timeout=60)]
    for rank, fits in enumerate(results):
        for found in fits:
            assert found == pytest.approx([-12 / 13, -(3 + rank % 2) / 13], rel=1e-6)
