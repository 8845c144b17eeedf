"""Gradients under the Trainer: two ranks, losses whose weights can be worked out by hand.

The toy has loss = mean((w + u) * x) and SGD with lr 1, so w is minus the sum over steps of the mean of x over ranks.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from launched import Ended, run

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)

NAMES = (
    "accumulation",
    "incomplete_window",
    "used_on_one_rank",
    "used_on_no_rank",
    "manual_backward",
    "plain_backward_is_refused",
    "plain_backward_with_a_raw_optimizer_is_refused",
    "reduce_gradients",
    "two_optimizers",
    "toggled_frozen",
    "two_backwards",
    "local_increments_are_reduced_once",
    "step_without_reduction_is_refused",
    "clipping",
    "averaged_copy",
    "frozen_during_training",
    "frozen_on_one_rank_is_refused",
    "unfrozen_and_replaced",
    "weighting_by_count",
    "non_finite_gradient",
    "loss_scaling_by_lightning",
    "loss_without_forward",
    "sparse_gradients",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run("part_c.py", *NAMES, out=tmp_path_factory.mktemp("gradients"))
    assert ended.codes == [0], ended.output
    return ended


def _same(job: Ended, name: str) -> Any:
    first, second = job.values(name)
    assert first == second
    return first


def test_gradient_accumulation_syncs_on_the_last_micro_batch_only(job: Ended) -> None:
    result = _same(job, "accumulation")
    assert result["w"] == -9.0  # the sum of 1..8, over 2 ranks and 2 micro-batches
    first, second, third, fourth = result["reductions"]
    assert first == third == 0
    assert second == fourth
    assert 1 <= second <= 2  # one bucket, and perhaps the flags


def test_last_incomplete_accumulation_window_equals_one_process(job: Ended, tmp_path: Path) -> None:
    one = run("part_c.py", "one_process_window", out=tmp_path, env={"RANKS": "1"})
    assert _same(job, "incomplete_window") == one.values("one_process_window")[0] == -1.5


def test_parameter_used_on_one_rank_only(job: Ended) -> None:
    assert _same(job, "used_on_one_rank") == [-1.5, -1.0]


def test_parameter_used_on_no_rank_keeps_no_gradient(job: Ended) -> None:
    assert _same(job, "used_on_no_rank") == [1.0, True]


def test_manual_backward_synchronises(job: Ended) -> None:
    assert _same(job, "manual_backward") == -5.0


@pytest.mark.parametrize("name", ["plain_backward_is_refused", "plain_backward_with_a_raw_optimizer_is_refused"])
def test_backward_called_directly_is_refused(job: Ended, name: str) -> None:
    for error in job.errors(name):
        assert "self.manual_backward(loss)" in error
        assert "strategy.reduce_gradients()" in error
        assert "gradients of w" in error


def test_reduce_gradients_is_the_way_out(job: Ended) -> None:
    assert _same(job, "reduce_gradients") == -5.0


def test_gan_with_two_optimizers_and_alternating_parameters(job: Ended) -> None:
    """The generator's old gradient (2) is not reduced again with the discriminator's."""
    assert _same(job, "two_optimizers") == {"g": -2.0, "d": -20.0, "half": 0.0, "stale_g": 2.0}


def test_toggling_optimizers_leaves_frozen_parameters_frozen(job: Ended) -> None:
    assert _same(job, "toggled_frozen") == [5.0, True, False]


def test_two_losses_two_backwards_one_step(job: Ended) -> None:
    assert _same(job, "two_backwards") == -18.0


def test_local_increments_are_reduced_exactly_once(job: Ended) -> None:
    """Reduced 2, then 2x and 3x of x = 1 and 3: seen 2, then 2 + own 2x, then 2 + 4 + 6."""
    assert job.values("local_increments_are_reduced_once") == [[-12.0, [2.0, 4.0, 12.0]], [-12.0, [2.0, 8.0, 12.0]]]


def test_a_step_with_gradients_that_were_never_reduced_is_refused(job: Ended) -> None:
    for error in job.errors("step_without_reduction_is_refused"):
        assert "gradients of w that were never averaged over the 2 ranks" in error


def test_clipping_comes_after_the_average(job: Ended) -> None:
    assert _same(job, "clipping") == pytest.approx([-0.70711, -0.70711], abs=1e-5)


def test_averaged_copy_inside_the_module_and_deepcopy_during_training(job: Ended) -> None:
    """Steps of -1.5 and -3.5: the copy is at -0.75 and then -2.875."""
    assert _same(job, "averaged_copy") == [-5.0, -2.875, 2]


def test_layer_frozen_during_training(job: Ended) -> None:
    assert _same(job, "frozen_during_training") == [-3.0, -1.5]


def test_layer_frozen_on_one_rank_only_is_refused_on_all(job: Ended) -> None:
    for error in job.errors("frozen_on_one_rank_is_refused"):
        assert re.search(r"[Pp]arameter u (is trainable on 1 of 2|has requires_grad True on rank 0 and False)", error)


def test_parameters_that_are_unfrozen_or_replaced_during_training_are_reduced(job: Ended) -> None:
    """x is 1 and 2 in both epochs; w is replaced, u is unfrozen for the second."""
    assert _same(job, "unfrozen_and_replaced") == [-1.5, -1.5]


def test_samples_can_be_weighted_by_their_number(job: Ended) -> None:
    assert _same(job, "weighting_by_count") == -2.0


def test_non_finite_gradient_on_one_rank_makes_all_ranks_skip(job: Ended) -> None:
    assert _same(job, "non_finite_gradient") == [[False, True, False], 2.0, -4.0]


def test_loss_scaling_skips_alike_and_clips_unscaled_averages(job: Ended) -> None:
    """Two steps of (2, 2) clipped to norm 1, and a scale that went from 4 to 2."""
    w, scale = _same(job, "loss_scaling_by_lightning")
    assert w == pytest.approx(-2 * 0.70711, abs=1e-4)
    assert scale == 2.0


def test_loss_computed_without_forward(job: Ended) -> None:
    assert _same(job, "loss_without_forward") == [[-1.5]]


def test_sparse_gradients_are_averaged_row_by_row(job: Ended) -> None:
    """Rank r uses rows r and 2."""
    assert _same(job, "sparse_gradients") == [[-0.5, -0.5], [-0.5, -0.5], [-1.0, -1.0], [0.0, 0.0]]
