"""The suite that every backend must pass, unchanged, on XLA:CPU devices."""

import pytest

from collective_strategy.testing.conformance import CollectiveConformance
from collective_strategy.testing.conformance.suite import templates


class TestTwoDevices(CollectiveConformance):
    backend = "xla"
    world_sizes = (2,)


class TestGroupsOfFourDevices(CollectiveConformance):
    backend = "xla"
    world_sizes = (4,)
    names = tuple(template.name for template in templates() if template.module.endswith((".groups", ".meaning")))


@pytest.mark.extended
class TestFourDevices(CollectiveConformance):
    backend = "xla"
    world_sizes = (4,)
