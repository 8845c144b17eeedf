"""The suite that every backend must pass, unchanged, on XLA:CPU devices."""

import pytest

from collective_strategy.testing.conformance import CollectiveConformance
from collective_strategy.testing.conformance.suite import templates


class TestTwoDevices(CollectiveConformance):
    """Gradients are in test_autograd."""

    backend = "xla"
    world_sizes = (2,)
    names = tuple(template.name for template in templates() if not template.module.endswith(".gradients"))


class TestGroupsOfFourDevices(CollectiveConformance):
    backend = "xla"
    world_sizes = (4,)
    names = tuple(template.name for template in templates() if template.module.endswith((".groups", ".meaning")))


@pytest.mark.extended
class TestFourDevices(CollectiveConformance):
    backend = "xla"
    world_sizes = (4,)
    names = TestTwoDevices.names
