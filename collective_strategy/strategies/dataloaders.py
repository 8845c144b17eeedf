"""How the Trainer's dataloaders are split over the data axis."""

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveMismatchError
from collective_strategy.strategies.evaluation import (
    AgreedOrder,
    DealtBatchSampler,
    EvaluationBatchSampler,
    SharedPermutation,
)
from collective_strategy.strategies.names import LightningNames


class LockstepLoader:
    """Iterates a training loader whose length nobody knows, and sees to it that all ranks get equally many batches.

    Before each batch the ranks tell each other whether they have one; iterating is collective.

    Raises:
        CollectiveMismatchError: on all ranks, when some have a batch and others do not; it names them.
    """

    def __init__(self, loader: Any, collective: Collective) -> None:
        self.loader, self._collective = loader, collective

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_collective"):  # while being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        iterator, count = iter(self.loader), 0
        collective = self._collective
        have = torch.zeros((collective.world_size, 1), dtype=torch.int64, device=collective.device)
        while True:
            try:
                batch, more = next(iterator), 1
            except StopIteration:
                batch, more = None, 0
            collective.all_gather_(have, torch.tensor([more], dtype=torch.int64, device=collective.device))
            flags = have.flatten().tolist()
            if not any(flags):
                return
            if not all(flags):
                ended = [collective.ranks[i] for i, flag in enumerate(flags) if not flag]
                going = [collective.ranks[i] for i, flag in enumerate(flags) if flag]
                raise _uneven(
                    f"after {count} batches the training data of rank(s) {_listed(ended)} ended while rank(s)"
                    f" {_listed(going)} had more",
                    count,
                )
            yield batch
            count += 1


class DataloaderPreparation:
    """Stands in for the Trainer's ``_prepare_dataloader`` while the strategy is set up.

    Training keeps Lightning's samplers, except that a user's own sampler keeps its order. Evaluation gives each
    sample to one rank and equally many batches to all.
    """

    def __init__(
        self, names: LightningNames, trainer: Any, collective: Collective, before_iteration: Callable[[], None]
    ) -> None:
        self._names, self._trainer = names, trainer
        # model-parallel ranks take part in every agreement, since they get the same samples in the same order
        self._everybody, self._collective = collective, collective.data
        self._before_iteration = before_iteration
        self._connector = trainer._data_connector
        self._announced: dict[int, int] = {}

    def __call__(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        training = mode == self._names.RunningStage.TRAINING
        prepared = self._training(dataloader, mode) if training else self._evaluation(dataloader, shuffle, mode)
        if isinstance(prepared, DataLoader):
            # model-parallel ranks draw the same augmentations, so the data rank seeds the workers; Lightning leaves
            # a worker_init_fn that is there alone
            self._names.auto_add_worker_init_fn(prepared, self._collective.rank)
        if training:
            self.announce_epoch(prepared, self._trainer.fit_loop.epoch_progress.current.processed)
            prepared = self._in_lockstep(prepared)
            self._before_iteration()
        return prepared

    def announce_epoch(self, dataloader: Any, epoch: int) -> None:
        """Tells a custom batch sampler the epoch, which Lightning does for samplers only; once per epoch."""
        batch_sampler = getattr(dataloader, "batch_sampler", None)
        set_epoch = getattr(batch_sampler, "set_epoch", None)
        if callable(set_epoch) and self._announced.get(id(batch_sampler)) != epoch:
            set_epoch(epoch)
            self._announced[id(batch_sampler)] = epoch

    # -- training ------------------------------------------------------------------------------------------------

    def _training(self, dataloader: Any, mode: Any) -> Any:
        stock = type(self._connector)._prepare_dataloader
        if not isinstance(dataloader, DataLoader) or not self._connector._requires_distributed_sampler(dataloader):
            return stock(self._connector, dataloader, shuffle=True, mode=mode)
        own_sampler = not isinstance(dataloader.sampler, (RandomSampler, SequentialSampler))
        if not own_sampler or type(dataloader.batch_sampler) is not BatchSampler:
            return stock(self._connector, dataloader, shuffle=True, mode=mode)
        # Lightning would shuffle the positions of a user's own sampler
        # (https://github.com/Lightning-AI/pytorch-lightning/issues/21447)
        sampler = self._names.DistributedSamplerWrapper(
            AgreedOrder(dataloader.sampler, self._everybody),
            num_replicas=self._collective.world_size,
            rank=self._collective.rank,
            shuffle=False,
        )
        args, kwargs = self._names.dataloader_arguments(dataloader, sampler, mode)
        return self._names.reinstantiate(dataloader, *args, **kwargs)

    def _in_lockstep(self, dataloader: Any) -> Any:
        if self._everybody.world_size == 1:
            return dataloader
        length = self._limited(dataloader)
        lengths = self._everybody.all_gather_object(length)
        if any(other is None for other in lengths):
            return LockstepLoader(dataloader, self._everybody)
        if len(set(lengths)) > 1:
            numbers = ", ".join(f"{n} on rank {rank}" for rank, n in zip(self._everybody.ranks, lengths, strict=True))
            raise _uneven(f"the ranks have {numbers}", min(lengths))
        return dataloader

    def _limited(self, dataloader: Any) -> int | None:
        """Batches per epoch, None where a length is not known for certain."""
        if self._names.has_iterable_dataset(dataloader):
            return None
        try:
            length = len(dataloader)
        except (TypeError, NotImplementedError):
            return None
        limit = self._trainer.limit_train_batches
        return min(length, limit) if isinstance(limit, int) else int(length * limit)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _evaluation(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        ranks, rank = self._collective.world_size, self._collective.rank
        stock = type(self._connector)._prepare_dataloader
        predicting = mode == self._names.RunningStage.PREDICTING
        if not isinstance(dataloader, DataLoader):
            return dataloader
        if (
            ranks == 1
            and not predicting
            and (self._everybody.world_size == 1 or isinstance(dataloader.sampler, SequentialSampler))
        ):
            return dataloader
        if self._names.has_iterable_dataset(dataloader):
            if ranks > 1 and self._trainer._accelerator_connector.use_distributed_sampler:
                text = (
                    f"is an IterableDataset, which cannot be split: each of the {ranks} ranks evaluates all that its"
                    " own copy yields. Let the dataset yield this rank's share only (self.collective.data.rank and"
                    " .world_size tell it)."
                )
                self._warn(dataloader, mode, text)
            return stock(self._connector, dataloader, shuffle=shuffle, mode=mode)
        batches: Any = dataloader.batch_sampler
        if (
            self._everybody.world_size == 1
            or batches is None
            or not self._connector._requires_distributed_sampler(dataloader)
        ):
            return stock(self._connector, dataloader, shuffle=shuffle, mode=mode)
        if type(batches) is BatchSampler:
            share: Any = EvaluationBatchSampler(
                self._order(dataloader, shuffle),
                batches.batch_size,
                batches.drop_last and not predicting,
                rank=rank,
                ranks=ranks,
                each_once=predicting,
            )
            self._report_uneven(dataloader, share, mode)
        else:
            share = DealtBatchSampler(AgreedOrder(batches, self._everybody), rank=rank, ranks=ranks)
            if len(batches) % ranks:
                rest = len(batches) % ranks
                text = (
                    f"has its own batch sampler {type(batches).__name__}: of its {len(batches)} batches whole ones go"
                    f" to the {ranks} ranks in turn, and the last {rest} (or {rest + ranks}, if they are small) are"
                    " split between all."
                )
                self._warn(dataloader, mode, text)
        return self._with_batches(dataloader, self._names.IndexBatchSamplerWrapper(share) if predicting else share)

    def _order(self, dataloader: Any, shuffle: bool) -> Any:
        sampler = dataloader.sampler
        if isinstance(sampler, SequentialSampler):
            return sampler
        plain = type(sampler) is RandomSampler and not sampler.replacement
        if plain and sampler.num_samples == len(dataloader.dataset):
            if self._trainer.overfit_batches:
                return SequentialSampler(dataloader.dataset)
            return SharedPermutation(len(dataloader.dataset), int(os.getenv("PL_GLOBAL_SEED", "0")))
        return AgreedOrder(sampler, self._everybody)

    def _with_batches(self, dataloader: Any, batch_sampler: Any) -> Any:
        """The same dataloader with another batch sampler, made as Lightning remakes dataloaders."""
        plain = copy.copy(dataloader)
        # else Lightning would try to put a sampler into the user's batch sampler
        plain.__dict__["batch_sampler"] = BatchSampler(SequentialSampler(dataloader.dataset), 1, False)
        args, kwargs = self._names.dataloader_arguments(plain, SequentialSampler(dataloader.dataset), None)
        arg_names = dataloader.__dict__.get("__pl_saved_arg_names", ())
        if len(arg_names) == len(args):
            kwargs, args = {**dict(zip(arg_names, args, strict=True)), **kwargs}, ()
        kwargs |= {
            "batch_sampler": batch_sampler,
            "sampler": None,
            "shuffle": False,
            "batch_size": 1,
            "drop_last": False,
        }
        return self._names.reinstantiate(dataloader, *args, **kwargs)

    def _report_uneven(self, dataloader: Any, share: EvaluationBatchSampler, mode: Any) -> None:
        if share.is_even or not share.samples:
            return
        samples, ranks = share.samples, self._collective.world_size
        repeated = -samples % ranks
        why = (
            f"has {samples} samples for {ranks} ranks"
            if samples < ranks
            else f"has {samples} samples in batches of 1, which {ranks} ranks cannot share evenly"
        )
        if samples >= ranks and mode == self._names.RunningStage.PREDICTING:
            what = (
                f"{ranks - samples % ranks} rank(s) get one batch less, so do not call collectives in predict_step; a"
                " batch size of 2 or more avoids it."
            )
        else:
            what = (
                f"{repeated} sample(s) are evaluated twice, so that all ranks have equally many batches and none waits"
                " for ever. Results differ slightly from those of one process; fewer ranks"
                f"{'' if samples < ranks else ' or a batch size of 2 or more'} avoid it."
            )
        self._warn(dataloader, mode, f"{why}: {what}")

    def _warn(self, dataloader: Any, mode: Any, text: str) -> None:
        name = type(dataloader.dataset).__name__
        self._names.rank_zero_warn(f"The {mode.dataloader_prefix} dataloader ({name}) {text}")


def _uneven(what: str, batches: int) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"Uneven training batches: {what}. A rank that trains on would wait for gradients of ranks that have none."
        f" Give every rank equally many batches, e.g. with Trainer(limit_train_batches={batches})."
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
