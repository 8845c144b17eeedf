"""Trainer scenarios whose results can be worked out by hand; see tests/cases/test_part_c_*.py."""

import copy
import io
import os
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from toys import Toy, Values, fit, loader, main, rank, scenario, trainer

from collective_strategy import CollectiveModule, CollectiveStrategy, TorchDistributedCollective


def shared_directory() -> str:
    return os.environ["SHARED_DIRECTORY"]


@scenario
def accumulation() -> Any:
    """Counts the all-reduces between entering and leaving each backward."""
    counts = [0]
    original = TorchDistributedCollective.all_reduce_

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(self, *args, **kwargs)

    class Counting(CollectiveStrategy):
        def backward(self, *args: Any, **kwargs: Any) -> Any:
            counts.append(0)
            TorchDistributedCollective.all_reduce_ = counting
            try:
                return super().backward(*args, **kwargs)
            finally:
                TorchDistributedCollective.all_reduce_ = original

    model = Toy()
    fit(model, [1.0, 2, 3, 4, 5, 6, 7, 8], accumulate_grad_batches=2, strategy=Counting(timeout=20))
    return {"w": model.w, "reductions": counts[1:]}


@scenario
def incomplete_window() -> Any:
    model = Toy()
    fit(model, [1.0] * 6, accumulate_grad_batches=2)
    return model.w


@scenario
def one_process_window() -> Any:
    model = Toy()
    fit(model, [1.0] * 3, n=1, accumulate_grad_batches=2)
    return model.w


@scenario
def used_on_one_rank() -> Any:
    class Branch(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).mean() if rank() == 0 else ((self.w + self.u) * batch).mean()

    model = Branch()
    fit(model, own=[[1.0], [2.0]])
    return [model.w, model.u]


@scenario
def used_on_no_rank() -> Any:
    class Unused(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.u = nn.Parameter(torch.tensor(1.0))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)

    model = Unused()
    fit(model, own=[[1.0, 1.0], [1.0, 1.0]])
    return [model.u, model.u.grad is None]


class Manual(Toy):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = (self.w * batch).mean()
        if self.how == "manual_backward":
            self.manual_backward(loss)
        else:
            loss.backward()
            if self.how == "reduce_gradients":
                self.trainer.strategy.reduce_gradients()
        if self.how == "raw":
            torch.optim.SGD(self.parameters(), lr=1.0).step()
        else:
            optimizer.step()


@scenario
def manual_backward() -> Any:
    model = Manual("manual_backward")
    fit(model, [1.0, 2, 3, 4])
    return model.w


@scenario
def plain_backward_is_refused() -> Any:
    fit(Manual("backward"), [1.0, 2, 3, 4])


@scenario
def plain_backward_with_a_raw_optimizer_is_refused() -> Any:
    fit(Manual("raw"), [1.0, 2, 3, 4])


@scenario
def reduce_gradients() -> Any:
    model = Manual("reduce_gradients")
    fit(model, [1.0, 2, 3, 4])
    return model.w


class Gan(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Parameter(torch.tensor(0.0))
        self.d = nn.Parameter(torch.tensor(0.0))
        self.d_after_half = None

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        opt_g, opt_d = self.optimizers()
        self.toggle_optimizer(opt_g)
        self.manual_backward((self.g * batch).mean())
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.d_after_half = self.d.detach().clone()
        self.toggle_optimizer(opt_d)
        self.manual_backward((self.d * 10 * batch).mean())
        opt_d.step()
        self.untoggle_optimizer(opt_d)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.g], lr=1.0), torch.optim.SGD([self.d], lr=1.0)


@scenario
def two_optimizers() -> Any:
    model = Gan()
    fit(model, own=[[1.0], [3.0]])
    return {"g": model.g, "d": model.d, "half": model.d_after_half, "stale_g": model.g.grad}


@scenario
def toggled_frozen() -> Any:
    class Frozen(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.u = nn.Parameter(torch.tensor(5.0), requires_grad=False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.g, self.u], lr=1.0), torch.optim.SGD([self.d], lr=1.0)

    model = Frozen()
    fit(model, own=[[1.0] * 3, [3.0] * 3])
    return [model.u, model.u.grad is None, model.u.requires_grad]


@scenario
def two_backwards() -> Any:
    class Twice(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward((self.w * batch).mean())
            self.manual_backward((2 * self.w * batch).mean())
            optimizer.step()
            optimizer.zero_grad()

    model = Twice()
    fit(model, own=[[1.0], [3.0]], max_epochs=3)
    return model.w


@scenario
def local_increments_are_reduced_once() -> Any:
    """Reduced, then a local increment, then another reduction: 2 + 4 + 6."""

    class Increments(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.seen: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward((self.w * batch).mean())
            self.seen.append(self.w.grad.item())
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward((2 * self.w * batch).mean())
            self.seen.append(self.w.grad.item())
            self.manual_backward((3 * self.w * batch).mean())
            self.seen.append(self.w.grad.item())
            optimizer.step()
            optimizer.zero_grad()

    model = Increments()
    fit(model, own=[[1.0], [3.0]])
    return [model.w, model.seen]


@scenario
def step_without_reduction_is_refused() -> Any:
    class Local(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward((self.w * batch).mean())
            self.optimizers().step()

    fit(Local(), own=[[1.0], [3.0]])


@scenario
def clipping() -> Any:
    model = Toy()
    fit(model, own=[[0.1], [5.0]], gradient_clip_val=1.0)
    return [model.w, model.u]


@scenario
def averaged_copy() -> Any:
    class Averaged(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(self.net.weight)
            self.ema = copy.deepcopy(self.net).requires_grad_(False)
            self.copies = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch.view(-1, 1)).mean()

        def on_train_batch_end(self, *args: Any) -> None:
            with torch.no_grad():
                self.ema.weight.lerp_(self.net.weight, 0.5)
            twin = copy.deepcopy(self)
            buffer = io.BytesIO()
            torch.save(self.net, buffer)
            assert torch.equal(twin.net.weight, self.net.weight)
            assert len(twin.net.weight._post_accumulate_grad_hooks or {}) == 0
            self.copies += 1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=1.0)

    model = Averaged()
    fit(model, own=[[1.0, 3.0], [2.0, 4.0]])
    # steps -1.5 and -3.5: net -1.5, -5; ema -0.75, -2.875
    return [model.net.weight.item(), model.ema.weight.item(), model.copies]


@scenario
def frozen_during_training() -> Any:
    class Freezing(Toy):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.u.requires_grad_(False)
                self.u.grad = None

    model = Freezing()
    fit(model, [1.0, 2.0], max_epochs=2)
    return [model.w, model.u]


@scenario
def frozen_on_one_rank_is_refused() -> Any:
    class Freezing(Toy):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1 and rank() == 1:
                self.u.requires_grad_(False)

    fit(Freezing(), [1.0, 2.0], max_epochs=2)


@scenario
def unfrozen_and_replaced() -> Any:
    class Changing(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.u.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.u.requires_grad_(True)
                self.w = nn.Parameter(torch.tensor(0.0))
                self.trainer.optimizers[0].param_groups[0]["params"][0] = self.w

    model = Changing()
    fit(model, [1.0, 2.0], max_epochs=2)
    return [model.w, model.u]


@scenario
def sync_batchnorm_on_cpu() -> Any:
    class Norm(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

    fit(Norm(), [1.0, 2.0], sync_batchnorm=True)


@scenario
def buffers() -> Any:
    class Buffers(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.tensor(float(rank())))
            self.register_buffer("flag", torch.tensor(rank() == 0), persistent=False)
            self.seen: dict[str, float] = {}

        def on_train_start(self) -> None:
            self.seen["start"] = self.k.item()
            self.seen["flag"] = self.flag.item()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.k.fill_(rank() + 7)
            return super().training_step(batch, batch_idx)

        def on_validation_start(self) -> None:
            self.seen["validation"] = self.k.item()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

        def on_train_epoch_end(self) -> None:
            self.k.fill_(rank() + 20)

    model = Buffers()
    t = trainer()
    t.fit(model, loader([1.0, 2.0]), loader([1.0, 2.0]))
    path = os.path.join(shared_directory(), "buffers.ckpt")
    t.save_checkpoint(path)
    return model.seen | {
        "file": torch.load(path, weights_only=False)["state_dict"]["k"].item(),
        "after": model.k.item(),
    }


class Momentum(Toy):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@scenario
def resume() -> Any:
    data = [1.0, 2.0, 3.0, 4.0]
    straight = Momentum()
    t = fit(straight, data, max_epochs=2)
    half = Momentum()
    first = fit(half, data, max_epochs=1)
    path = os.path.join(shared_directory(), "resume.ckpt")
    first.save_checkpoint(path)
    exists, half_way = os.path.exists(path), half.w.item()
    resumed = Momentum()
    second = trainer(max_epochs=2)
    second.fit(resumed, loader(data), ckpt_path=path)
    return {
        "half": half_way,
        "equal": straight.w.item() == resumed.w.item(),
        "steps": [t.global_step, second.global_step],
        "epochs": [t.current_epoch, second.current_epoch],
        "exists": exists,
        "left": sorted(name for name in os.listdir(shared_directory()) if "resume" in name),
    }


@scenario
def load_in_one_process() -> Any:
    """The checkpoint that ``resume`` made half-way."""
    model = Momentum()
    t = trainer(1, max_epochs=1)
    t.validate(model, loader([1.0]), ckpt_path=os.path.join(shared_directory(), "resume.ckpt"), verbose=False)
    return [model.w, t.world_size]


@scenario
def decisions() -> Any:
    t = fit(Toy(), [1.0, 2.0])
    s = t.strategy
    both = [s.reduce_boolean_decision(rank() == 0, all=True), s.reduce_boolean_decision(rank() == 0, all=False)]

    class Rising(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("v", float(self.current_epoch * (1 if rank() == 0 else -1)), sync_dist=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    t = trainer(max_epochs=8, callbacks=[EarlyStopping("v", patience=2, mode="min", check_on_train_epoch_end=True)])
    t.fit(Rising(), loader([1.0, 2.0]))
    return {"decisions": both, "types": [type(b).__name__ for b in both], "epoch": t.current_epoch}


@scenario
def reduce_and_gather() -> Any:
    t = fit(Toy(), [1.0, 2.0])
    s = t.strategy
    x = torch.tensor([2 + rank()])
    kept = torch.tensor([1.0 + rank()])
    sums = s.reduce(kept, reduce_op="sum")
    leaf = torch.tensor([1.0 + rank()], requires_grad=True)
    gathered = s.all_gather(leaf, sync_grads=True)
    (gathered * (1.0 + rank())).sum().backward()
    detached = s.all_gather(leaf)
    model = t.lightning_module
    return {
        "int_mean": s.reduce(x),
        "int_mean_dtype": str(s.reduce(x).dtype),
        "native": s.reduce(x, reduce_op=torch.distributed.ReduceOp.MAX),
        "sum": sums,
        "kept": kept,
        "text": s.reduce("a"),
        "shape": list(gathered.shape),
        "grad": leaf.grad,
        "detached": detached.requires_grad,
        "nested": model.all_gather({"a": rank(), "b": [torch.ones(2) * rank()]}),
        "object": s.broadcast({"rank": rank(), "none": None}),
    }


@scenario
def log_on_rank_zero_only() -> Any:
    class Logs(Toy):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if rank() == 0:
                self.log("v", 1.0, rank_zero_only=True)

    t = trainer()
    t.validate(Logs(), loader([1.0, 2.0]), verbose=False)
    return "finished"


@scenario
def logged_means_are_weighted() -> Any:
    """Ranks with 2 and 1 samples: the mean over samples, and of integers, is exact."""

    class Logs(Toy):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("v", batch.mean(), sync_dist=True, batch_size=len(batch), on_epoch=True)
            self.log("n", batch.long().sum(), sync_dist=True, reduce_fx="sum")
            self.log("top", batch.max(), sync_dist=True, reduce_fx="max")

    t = trainer()
    return t.validate(Logs(), loader([1.0, 2.0, 6.0], batch_size=2), verbose=False)[0]


@scenario
def fit_test_fit() -> Any:
    class Tested(Toy):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("w", self.w, sync_dist=True)

    model = Tested()
    t = trainer()
    t.fit(model, loader([1.0, 2.0]))
    tested = t.test(model, loader([1.0, 2.0]), verbose=False)
    t2 = trainer()
    t2.fit(model, loader([1.0, 2.0]))
    return {"w": model.w, "tested": tested[0]["w"]}


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.pairs: list[Any] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.pairs += list(zip(batch_indices, prediction.tolist(), strict=True))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epoch = [i for batch in batch_indices[0] for i in batch]


@scenario
def prediction_order() -> Any:
    class Predicts(Toy):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return batch

    results = {}
    for batch_size in (1, 2):
        writer = Writer()
        t = trainer(callbacks=[writer])
        model = Predicts()
        t.predict(model, loader([0.0, 1, 2, 3, 4], batch_size=batch_size))
        everywhere = t.strategy.collective.all_gather_object((writer.pairs, writer.epoch))
        results[batch_size] = {
            "pairs": sorted(pair for pairs, _ in everywhere for pair in pairs),
            "epoch": sorted(i for _, epoch in everywhere for i in epoch),
        }
    return results


class Ones(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(torch.ones(self.count))


@scenario
def uneven_training_batches() -> Any:
    model = Toy()
    try:
        trainer().fit(model, DataLoader(Ones(3 - rank()), batch_size=1))
    finally:
        uneven_training_batches.w = model.w.item()


@scenario
def weights_after_uneven_batches() -> Any:
    return uneven_training_batches.w


@scenario
def uneven_training_lengths() -> Any:
    fit(Toy(), own=[[1.0] * 3, [1.0] * 2])


@scenario
def even_iterable_batches() -> Any:
    model = Toy()
    trainer(max_epochs=2).fit(model, DataLoader(Ones(3), batch_size=1))
    limited = Toy()
    trainer(limit_train_batches=2).fit(limited, DataLoader(Ones(3 - rank()), batch_size=1))
    return [model.w, limited.w]


@scenario
def shuffling() -> Any:
    class Sees(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[list[float]] = [[], []]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen[self.current_epoch] += batch.tolist()
            return super().training_step(batch, batch_idx)

    model = Sees()
    trainer(max_epochs=2).fit(model, loader([float(i) for i in range(8)], shuffle=True))

    class Own(BatchSampler):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self):
            return iter([[0], [1]])

        def __len__(self) -> int:
            return 2

    own = Own()
    trainer(max_epochs=2, use_distributed_sampler=False).fit(Toy(), DataLoader(Values([1.0, 2.0]), batch_sampler=own))
    return {"seen": model.seen, "epochs": own.epochs}


class Listed(Sampler):
    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Random(Listed):
    """Draws from this process' own random numbers, which differ over the ranks."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(rank() + 1)
        return iter(torch.randperm(len(self.order), generator=generator).tolist())


@scenario
def own_sampler() -> Any:
    class Sees(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []
            self.validated: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen += batch.tolist()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validated += batch.tolist()

    values = [float(i) for i in range(6)]
    weighted, ordered, random = Sees(), Sees(), Sees()
    only_three = WeightedRandomSampler([0.0, 0, 0, 1, 0, 0], 6)
    trainer().fit(weighted, loader(values, sampler=only_three), loader(values, sampler=only_three))
    backwards = Listed([5, 4, 3, 2, 1, 0])
    trainer().fit(ordered, loader(values, sampler=backwards), loader(values, 3, sampler=backwards))
    trainer().fit(random, loader(values, sampler=Random([0] * 6)), loader(values, 3, sampler=Random([0] * 6)))
    return {
        name: [m.seen, m.validated] for name, m in (("weighted", weighted), ("ordered", ordered), ("random", random))
    }


class Drawn(Values):
    def __getitem__(self, i: int) -> Tensor:
        return torch.rand(())


@scenario
def worker_seeds() -> Any:
    class Sees(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen += batch.tolist()
            return super().training_step(batch, batch_idx)

    L.seed_everything(1, workers=True)
    model = Sees()
    trainer().fit(model, DataLoader(Drawn([0.0] * 8), num_workers=1))
    return model.seen


@scenario
def weighting_by_count() -> Any:
    class Weighted(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = torch.tensor([1.0] if rank() == 0 else [2.0, 3.0])
            data = self.collective.data
            return (self.w * x).sum() * data.world_size / data.reduce(len(x), "sum")

    model = Weighted()
    fit(model, [1.0, 2.0])
    return model.w


@scenario
def non_finite_gradient() -> Any:
    class Guarded(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.decisions: list[bool] = []
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = (self.w * batch).mean()
            if batch_idx == 1 and rank() == 0:
                loss = loss * float("inf")
            self.manual_backward(self.scaler.scale(loss))
            before = self.w.item()
            self.scaler.step(optimizer.optimizer)
            self.scaler.update()
            self.decisions.append(self.w.item() == before)

    model = Guarded()
    fit(model, own=[[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    return [model.decisions, model.scaler.get_scale(), model.w]


@scenario
def loss_scaling_by_lightning() -> Any:
    """fp16 autocast with Lightning's plugin: an infinite loss on one rank is skipped by both."""

    class Infinite(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 and rank() == 0 else loss

    model = Infinite()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    fit(model, own=[[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]], plugins=[plugin], gradient_clip_val=1.0)
    return [model.w, plugin.scaler.get_scale()]


@scenario
def loss_without_forward() -> Any:
    class Direct(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(self.net.weight)

        def encode(self, x: Tensor) -> Tensor:
            return F.linear(x, self.net.weight)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.encode(batch.view(-1, 1)).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    model = Direct()
    fit(model, [1.0, 2.0])
    return model.net.weight


@scenario
def different_models() -> Any:
    class Extra(Toy):
        def __init__(self) -> None:
            super().__init__()
            if rank() == 1:
                self.extra = nn.Linear(3, 2)

    fit(Extra(), [1.0, 2.0])


@scenario
def different_shapes() -> Any:
    class Shape(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3 + rank(), 2)

    fit(Shape(), [1.0, 2.0])


@scenario
def slow_prepare_data() -> Any:
    import time

    class Slow(Toy):
        def prepare_data(self) -> None:
            time.sleep(5)

    model = Slow()
    trainer(strategy=CollectiveStrategy(timeout=3)).fit(model, loader([1.0, 2.0]))
    return model.w


@scenario
def sparse_gradients() -> Any:
    class Sparse(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)
            nn.init.zeros_(self.table.weight)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.table(torch.tensor([rank(), 2])).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    model = Sparse()
    fit(model, [1.0, 2.0])
    return model.table.weight


@scenario
def collective_attribute() -> Any:
    class Early(Toy):
        def __init__(self) -> None:
            super().__init__()
            try:
                self.collective.barrier()
            except RuntimeError as error:
                self.message = str(error)
            self.places: dict[str, Any] = {}

        def setup(self, stage: str) -> None:
            self.places["setup"] = self.collective.all_reduce(1)

        def configure_model(self) -> None:
            self.places["configure_model"] = self.collective.data.all_gather(torch.tensor(rank()))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.places["training_step"] = self.collective.all_gather(torch.ones(3)).shape
            copy.deepcopy(self)
            return super().training_step(batch, batch_idx)

    class Data(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.place = [self.collective.data.rank, self.collective.data.world_size]

        def train_dataloader(self) -> DataLoader:
            return loader([1.0, 2.0])

    class Named(Toy):
        collective = "mine"

    class Assigned(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.collective = nn.Linear(1, 1)

    class Typed(CollectiveModule, Toy):
        def on_fit_start(self) -> None:
            self.size = self.collective.world_size

    model, data, typed = Early(), Data(), Typed()
    alone = typed.collective.world_size if rank() == 0 and "WORLD_SIZE" not in os.environ else 1
    trainer().fit(model, data)
    fit(typed, [1.0, 2.0])
    named, assigned = Named(), Assigned()
    fit(named, [1.0, 2.0])
    fit(assigned, [1.0, 2.0])
    return {
        "message": model.message,
        "places": model.places,
        "data": data.place,
        "typed": typed.size,
        "alone": alone,
        "named": named.collective,
        "assigned": type(assigned.collective).__name__,
    }


@scenario
def mixin_under_another_strategy() -> Any:
    class Typed(CollectiveModule, Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.found = [self.collective.world_size, self.collective.all_reduce(1), type(self.collective).__name__]
            return super().training_step(batch, batch_idx)

    class Plain(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            try:
                self.message = str(self.collective)
            except RuntimeError as error:
                self.message = str(error)
            return super().training_step(batch, batch_idx)

    typed, plain = Typed(), Plain()
    fit(typed, [1.0, 2.0], strategy="ddp")
    fit(plain, [1.0, 2.0], strategy="ddp")
    return {"found": typed.found, "message": plain.message}


if __name__ == "__main__":
    main()
