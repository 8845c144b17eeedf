"""The numbers of the page on gradients are what the ranks measure today."""

import importlib.util
from pathlib import Path

import torch

from collective_strategy.collectives import CollectiveTimeoutError
from collective_strategy.testing import run_ranks

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_are_measured():
    spec = importlib.util.spec_from_file_location("measure_gradients", DOCS / "measure_gradients.py")
    measure_gradients = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure_gradients)
    text = measure_gradients.PAGE.read_text()
    assert measure_gradients.page(text) == text, "run: python docs/measure_gradients.py"
    for number in ("| **right** (1.000) | 2.000, 3.000 |", "| 0.500, 0.333 | **right** (1.000) |", "wrong direction"):
        assert number in text


def gradients_if_one_rank_ignores_the_result(collective, takes_part):
    x = torch.tensor([1.0 + collective.rank], requires_grad=True)
    gathered = collective.all_gather(x, dim=0)
    without = x.sum() + 0 * gathered.sum() if takes_part else x.sum()
    (3 * gathered.sum() if collective.rank == 0 else without).backward()
    return x.grad.item()


def test_a_rank_that_ignores_the_result_takes_part_with_zero():
    outcomes = run_ranks(2, gradients_if_one_rank_ignores_the_result, True)
    assert [outcome.result() for outcome in outcomes] == [3, 4]  # rank 1: 3 of rank 0's loss, 1 of its own


def test_or_else_the_others_wait_for_it_until_they_time_out():
    waiting, _ = run_ranks(2, gradients_if_one_rank_ignores_the_result, False, timeout=2)
    assert isinstance(waiting.error, CollectiveTimeoutError)
    assert "backward of all_gather" in str(waiting.error)
