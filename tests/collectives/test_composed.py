"""What a backend lacks is composed: one with almost nothing of its own passes the whole suite."""

import pytest
import torch
from frugal_backend import FrugalCollective

from collective_strategy.collectives import Collective
from collective_strategy.testing import run_ranks
from collective_strategy.testing.conformance import CollectiveConformance


class TestFrugal(CollectiveConformance):
    backend = FrugalCollective
    world_sizes = (1, 2)


def test_what_is_composed_can_be_seen() -> None:
    assert FrugalCollective().capabilities.composed == {"reduce_scatter", "all_to_all", "send", "recv"}


@pytest.mark.parametrize("name", ["send", "recv"])
def test_point_to_point_names_what_there_is_instead(name: str) -> None:
    def call(c: Collective) -> None:
        getattr(c, name)(torch.ones(1), 1 - c.rank)

    for outcome in run_ranks(2, call, backend=FrugalCollective):
        with pytest.raises(NotImplementedError, match=r"'frugal' has no .*shift\(\) or permute\(\)"):
            outcome.result()
