"""The numbers of the page on gradients are what the ranks measure today."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_are_measured():
    spec = importlib.util.spec_from_file_location("measure_gradients", DOCS / "measure_gradients.py")
    measure_gradients = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure_gradients)
    text = measure_gradients.PAGE.read_text()
    assert measure_gradients.page(text) == text, "run: python docs/measure_gradients.py"
    for number in ("| **right** (1.000) | 2.000, 3.000 |", "| 0.500, 0.333 | **right** (1.000) |", "wrong direction"):
        assert number in text
