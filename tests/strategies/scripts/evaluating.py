"""What each rank evaluates: ``evaluating.py OUT`` on 1, 2 or 4 ranks."""

import os
import warnings
from typing import Any

import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.utilities import dim_zero_cat
from toys import Toy, Values, loader, main, scenario, trainer

N = int(os.environ.get("RANKS", "2"))


class Collecting(Metric):
    """Keeps everything it saw: a list state, of another length on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, x: Tensor) -> None:
        self.values.append(x)

    def compute(self) -> Tensor:
        return dim_zero_cat(self.values).sum()


class Evaluates(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[float]] = []
        self.gathered: list[list[float]] = []
        self.mean, self.accuracy, self.collecting = MeanMetric(), BinaryAccuracy(), Collecting()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.batches.append(batch.tolist())
        pieces = self.collective.data.all_gather(batch, ragged=True)
        self.gathered.append([x for piece in pieces for x in piece.tolist()])
        self.log("logged", batch.mean(), sync_dist=True, batch_size=len(batch))
        self.mean.update(batch)
        self.accuracy.update(batch % 3 / 3, (batch % 2).long())
        self.collecting.update(batch)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.log("accuracy", self.accuracy)
        self.log("sum", self.collecting.compute())


def validated(data: DataLoader, **kwargs: Any) -> dict[str, Any]:
    model = Evaluates()
    t = trainer(N, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = t.validate(model, data, verbose=False)[0]
    texts = [str(w.message) for w in caught if "dataloader" in str(w.message) or "devices=1" in str(w.message)]
    return {
        "batches": model.batches,
        "gathered": model.gathered,
        "metrics": metrics,
        "warnings": [text for text in texts if "many workers" not in text],
        "restored": model.mean.dist_sync_fn is None,
    }


def numbers(n: int, batch_size: int, **kwargs: Any) -> DataLoader:
    return loader([float(i) for i in range(n)], batch_size, **kwargs)


@scenario
def hundred_and_one() -> Any:
    return validated(numbers(101, 10))


@scenario
def drop_last() -> Any:
    return validated(numbers(101, 10, drop_last=True))


@scenario
def limited() -> Any:
    return validated(numbers(101, 10), limit_val_batches=2)


@scenario
def shuffled() -> Any:
    return validated(numbers(21, 5, shuffle=True))


@scenario
def fewer_samples_than_ranks() -> Any:
    return validated(numbers(max(1, N - 1), 10))


@scenario
def single_samples_with_a_rest() -> Any:
    return validated(numbers(N + 1, 1))


class Loader(DataLoader):
    """A subclass with an argument of its own, and attributes set later."""

    def __init__(self, dataset: Values, batch_size: int, label: str, **kwargs: Any) -> None:
        super().__init__(dataset, batch_size, **kwargs)
        self.label = label


@scenario
def loaders_made_in_hooks() -> Any:
    """Positional arguments, a subclass, workers; two loaders."""

    class Hooks(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[list[float]] = [[], []]
            self.label = ""

        def val_dataloader(self) -> list[DataLoader]:
            values = Values([float(i) for i in range(9)])
            return [DataLoader(values, 2, False), Loader(values, 4, "mine", num_workers=1)]

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            self.seen[dataloader_idx] += batch.tolist()
            self.label = getattr(self.trainer.val_dataloaders[1], "label", "lost")

    model = Hooks()
    trainer(N).validate(model, verbose=False)
    return [model.seen, model.label]


class Own(BatchSampler):
    """Seven batches of 1, 2, ... 7 samples."""

    def __init__(self) -> None:
        self.batch_size, self.drop_last = 7, False

    def __iter__(self):
        start = 0
        for size in range(1, 8):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return 7


@scenario
def own_batch_sampler() -> Any:
    return validated(DataLoader(Values([float(i) for i in range(28)]), batch_sampler=Own()))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4.0))


@scenario
def iterable() -> Any:
    return validated(DataLoader(Stream(), batch_size=2))


@scenario
def sampler_off() -> Any:
    return validated(numbers(6, 2), use_distributed_sampler=False)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.pairs: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.pairs += list(zip(batch_indices, prediction.tolist(), strict=True))


@scenario
def predicted() -> Any:
    class Predicts(Toy):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return batch * 2

    writer = Writer()
    t = trainer(N, callbacks=[writer])
    t.predict(Predicts(), numbers(101, 10, drop_last=True))
    return writer.pairs


@scenario
def overfitting() -> Any:
    class Sees(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.seen += batch.tolist()

    model = Sees()
    trainer(N, overfit_batches=1).fit(model, numbers(40, 5, shuffle=True), numbers(40, 5, shuffle=True))
    return model.seen


if __name__ == "__main__":
    main()
