"""Every test that the pages name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "page",
    [
        "checkpoints.md",
        "gradients.md",
        "moving_from_gradient_hooks.md",
        "random_numbers.md",
        "shared_weights.md",
        "truth_tools.md",
    ],
)
def test_the_tests_that_a_page_names_exist(page):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / page).read_text())
    assert len(named) > 4
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (ROOT / path).read_text()]
    assert missing == []
