"""Evaluation: every sample once, equally many batches on every rank, the same results on 1, 2 and 4 ranks."""

import math
from typing import Any

import pytest
from launching import Ended, run

from collective_strategy.strategies.evaluation import even_steps, repeated_steps, uneven_steps

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_steps_cover_each_sample_once_in_near_equal_pieces(batch_size: int, ranks: int) -> None:
    for samples in range(60):
        steps = even_steps(samples, batch_size, ranks)
        rest = samples % (ranks * batch_size)
        if (samples < ranks and samples) or (batch_size == 1 and rest):
            assert steps is None
            continue
        assert steps is not None
        assert len(steps) == math.ceil(samples / (ranks * batch_size))
        pieces = [piece for step in steps for piece in step]
        assert [i for start, stop in pieces for i in range(start, stop)] == list(range(samples))
        for step in steps:
            sizes = [stop - start for start, stop in step]
            assert len(step) == ranks
            assert 0 < min(sizes) <= max(sizes) <= min(batch_size, min(sizes) + 1)


def test_steps_where_an_even_split_cannot_be() -> None:
    assert repeated_steps(3, 2) == [[(0, 1), (1, 2)], [(2, 3), (0, 1)]]
    assert repeated_steps(1, 4) == [[(0, 1)] * 4]
    assert uneven_steps(3, 2) == [[(0, 1), (1, 2)], [(2, 3)]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ended]:
    ended = {}
    for n in (1, 2, 4):
        out = tmp_path_factory.mktemp(f"ranks{n}")
        ended[n] = run("evaluating.py", out=out, env={"RANKS": str(n)}, n=n)
        assert ended[n].codes == [0], ended[n].output
    return ended


def _seen(values: list[Any]) -> list[float]:
    return sorted(x for value in values for batch in value["batches"] for x in batch)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_101_samples_in_batches_of_10(jobs: dict[int, Ended], n: int) -> None:
    values = jobs[n].values("hundred_and_one")
    assert _seen(values) == [float(i) for i in range(101)]
    sizes = [[len(batch) for batch in value["batches"]] for value in values]
    assert {len(s) for s in sizes} == {math.ceil(101 / (10 * n))}
    assert max(map(max, sizes)) == 10
    if n == 2:
        assert sizes == [[10, 10, 10, 10, 6, 5], [10, 10, 10, 10, 5, 5]]
    # the pieces of a step, in rank order, are the data set's order
    for value in values:
        assert [x for step in value["gathered"] for x in step] == [float(i) for i in range(101)]
        assert value["warnings"] == []
        assert value["restored"]


@pytest.mark.parametrize("name", ["hundred_and_one", "drop_last", "shuffled"])
def test_metrics_do_not_depend_on_the_number_of_ranks(jobs: dict[int, Ended], name: str) -> None:
    """torchmetrics with tensor and list states, and sync_dist."""
    one = jobs[1].values(name)[0]["metrics"]
    if name == "hundred_and_one":
        assert one["mean"] == 50.0
        assert one["sum"] == 5050.0
    for n in (2, 4):
        for value in jobs[n].values(name):
            assert value["metrics"] == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_drop_last_drops_what_one_process_drops(jobs: dict[int, Ended], n: int) -> None:
    assert _seen(jobs[n].values("drop_last")) == [float(i) for i in range(100)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_limits_count_batches_per_rank(jobs: dict[int, Ended], n: int) -> None:
    values = jobs[n].values("limited")
    assert [len(value["batches"]) for value in values] == [2] * n
    assert len(set(_seen(values))) == len(_seen(values))


@pytest.mark.parametrize("n", [2, 4])
def test_shuffled_data_is_seen_once_by_all_ranks_together(jobs: dict[int, Ended], n: int) -> None:
    values = jobs[n].values("shuffled")
    assert _seen(values) == [float(i) for i in range(21)]
    assert values[0]["gathered"] != [[float(i) for i in range(21)]]


@pytest.mark.parametrize("n", [2, 4])
def test_what_cannot_be_split_is_repeated_and_said_with_numbers(jobs: dict[int, Ended], n: int) -> None:
    few = jobs[n].values("fewer_samples_than_ranks")
    assert [value["batches"] for value in few] == [[[float(i % (n - 1))]] for i in range(n)]
    assert len(few[0]["warnings"]) == 1
    assert f"has {n - 1} samples for {n} ranks: 1 sample(s) are evaluated twice" in few[0]["warnings"][0]
    single = jobs[n].values("single_samples_with_a_rest")
    assert {len(value["batches"]) for value in single} == {2}
    assert f"has {n + 1} samples in batches of 1, which {n} ranks cannot share evenly" in single[0]["warnings"][0]


def test_a_users_batch_sampler_is_dealt_out(jobs: dict[int, Ended]) -> None:
    values = jobs[2].values("own_batch_sampler")
    assert _seen(values) == [float(i) for i in range(28)]
    assert [len(batch) for batch in values[0]["batches"]] == [1, 3, 5, 4]
    assert [len(batch) for batch in values[1]["batches"]] == [2, 4, 6, 3]
    assert "its own batch sampler Own: of its 7 batches" in values[0]["warnings"][0]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_loaders_made_in_hooks_are_remade_with_their_arguments(jobs: dict[int, Ended], n: int) -> None:
    values = jobs[n].values("loaders_made_in_hooks")
    for i in range(2):
        assert sorted(x for seen, _ in values for x in seen[i]) == [float(k) for k in range(9)]
    assert {label for _, label in values} == {"mine"}


def test_iterable_data_is_left_to_the_user_with_a_message(jobs: dict[int, Ended]) -> None:
    values = jobs[2].values("iterable")
    assert [value["batches"] for value in values] == [[[0.0, 1.0], [2.0, 3.0]]] * 2
    assert "IterableDataset, which cannot be split: each of the 2 ranks" in values[0]["warnings"][0]


def test_switched_off_samplers_stay_off(jobs: dict[int, Ended]) -> None:
    values = jobs[2].values("sampler_off")
    assert [value["batches"] for value in values] == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]] * 2


@pytest.mark.parametrize("n", [1, 2, 4])
def test_predictions_come_with_their_indices(jobs: dict[int, Ended], n: int) -> None:
    """Nothing is dropped when predicting, as in Lightning."""
    pairs = sorted(pair for value in jobs[n].values("predicted") for pair in value)
    assert pairs == [[i, 2.0 * i] for i in range(101)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_overfitting_uses_the_first_batches_unshuffled(jobs: dict[int, Ended], n: int) -> None:
    seen = sorted(x for value in jobs[n].values("overfitting") for x in value)
    assert seen == [float(i) for i in range(5 * n)]


def test_no_advice_to_use_one_device(jobs: dict[int, Ended]) -> None:
    for ended in jobs.values():
        assert "it is recommended to use" not in ended.output
        assert "recommended to use `Trainer(devices=1" not in ended.output
