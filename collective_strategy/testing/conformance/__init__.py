"""The suite that a backend must pass. It needs numpy beside the extra ``collective_strategy[testing]``.

A backend of your own is tested in a file like this::

    from collective_strategy.testing.conformance import CollectiveConformance
    from my_package import MyCollective

    class TestMyCollective(CollectiveConformance):
        backend = MyCollective        # or its registered name
        world_sizes = (1, 2, 4)       # mesh axes are tested with 4 ranks

Without pytest, ``for check in suite(MyCollective): check()`` runs the same checks; each raises AssertionError with the
findings of all ranks, or unittest.SkipTest where the backend's capabilities exclude it. The expected values come from
numpy on the list of all ranks' inputs. `broken.BROKEN_BACKENDS` lists backends with one fault each and the check that
must find it: the proof that the checks can fail.
"""

from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import (
    Check,
    CollectiveConformance,
    NotApplicable,
    Template,
    check,
    suite,
    templates,
)

__all__ = [
    "Check",
    "CollectiveConformance",
    "Expect",
    "NotApplicable",
    "Template",
    "check",
    "suite",
    "templates",
]
