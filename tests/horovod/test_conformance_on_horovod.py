"""The suite that every backend must pass, unchanged, on Horovod."""

from collections.abc import Iterator

import pytest

from collective_strategy.testing import close_pools
from collective_strategy.testing.conformance import CollectiveConformance
from collective_strategy.testing.conformance.suite import templates


class OnHorovod(CollectiveConformance):
    backend = "horovod"

    @pytest.fixture(scope="class", autouse=True)
    def leave_the_processor(self) -> Iterator[None]:
        """Horovod's thread looks for work every millisecond, in idle processes too."""
        yield
        close_pools()


class TestTwoRanks(OnHorovod):
    world_sizes = (2,)


class TestGroupsOfFourRanks(OnHorovod):
    world_sizes = (4,)
    names = tuple(template.name for template in templates() if template.module.endswith((".groups", ".meaning")))


@pytest.mark.extended
class TestFourRanks(OnHorovod):
    world_sizes = (4,)
