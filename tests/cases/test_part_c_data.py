"""Data under the Trainer: prediction order, uneven batches, shuffling, samplers, logging."""

from typing import Any

import pytest
from launched import Ended, run

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)

NAMES = (
    "log_on_rank_zero_only",
    "logged_means_are_weighted",
    "prediction_order",
    "uneven_training_batches",
    "weights_after_uneven_batches",
    "uneven_training_lengths",
    "even_iterable_batches",
    "shuffling",
    "own_sampler",
    "worker_seeds",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run("part_c.py", *NAMES, out=tmp_path_factory.mktemp("data"))
    assert ended.codes == [0], ended.output
    return ended


def _same(job: Ended, name: str) -> Any:
    first, second = job.values(name)
    assert first == second
    return first


def test_logging_on_rank_zero_only_does_not_communicate(job: Ended) -> None:
    assert _same(job, "log_on_rank_zero_only") == "finished"


def test_logged_means_are_weighted_by_samples_and_integers_are_exact(job: Ended) -> None:
    """1, 2 and 6: two samples on one rank, one on the other."""
    assert _same(job, "logged_means_are_weighted") == {"v": 3.0, "n": 9.0, "top": 6.0}


@pytest.mark.parametrize("batch_size", ["1", "2"])
def test_predictions_merge_by_index_to_the_data_sets_order(job: Ended, batch_size: str) -> None:
    result = _same(job, "prediction_order")[batch_size]
    assert result["pairs"] == [[i, float(i)] for i in range(5)]
    assert result["epoch"] == list(range(5))


@pytest.mark.parametrize("name", ["uneven_training_batches", "uneven_training_lengths"])
def test_uneven_training_batches_are_named_on_all_ranks(job: Ended, name: str) -> None:
    for error in job.errors(name):
        assert "Uneven training batches" in error
        assert "limit_train_batches=2" in error
    # Lightning fetches one batch ahead, so the first of the two common batches was trained on; on both ranks
    assert _same(job, "weights_after_uneven_batches") == -1.0


def test_even_iterable_data_trains_to_its_end(job: Ended) -> None:
    """3 batches in 2 epochs; and 3 against 2 batches limited to 2."""
    assert _same(job, "even_iterable_batches") == [-6.0, -2.0]


def test_shuffling_differs_by_epoch_and_is_disjoint_over_ranks(job: Ended) -> None:
    zero, one = job.values("shuffling")
    for epoch in range(2):
        assert sorted(zero["seen"][epoch] + one["seen"][epoch]) == [float(i) for i in range(8)]
    assert zero["seen"][0] != zero["seen"][1]
    assert zero["epochs"] == [0, 1]  # set_epoch of a batch sampler of one's own


def test_a_users_sampler_is_kept_and_split(job: Ended) -> None:
    zero, one = job.values("own_sampler")
    assert zero["weighted"] == [[3.0] * 3, [3.0] * 3]
    interleaved = [x for pair in zip(zero["ordered"][0], one["ordered"][0], strict=True) for x in pair]
    assert interleaved == [5.0, 4, 3, 2, 1, 0]
    assert zero["ordered"][1] + one["ordered"][1] == [5.0, 4, 3, 2, 1, 0]
    # each rank draws another order; rank 0's is used by both, so nothing is lost or doubled
    for stage in range(2):
        assert sorted(zero["random"][stage] + one["random"][stage]) == [float(i) for i in range(6)]


def test_loader_workers_draw_other_numbers_on_each_data_rank(job: Ended) -> None:
    zero, one = job.values("worker_seeds")
    assert zero != one
