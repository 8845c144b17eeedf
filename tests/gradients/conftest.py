"""The engine's tests run with both ways of a sum on one host."""

import os

import pytest

SOCKETS_TOO = {"test_equals_one_process"}
if os.environ.get("COLLECTIVE_STRATEGY_BACKEND", "torch") == "torch":
    SOCKETS_TOO |= {"test_engine", "test_engine_counts"}


def pytest_generate_tests(metafunc):
    if "way" in metafunc.fixturenames:
        marks = () if metafunc.module.__name__ in SOCKETS_TOO else pytest.mark.extended
        metafunc.parametrize("way", ["memory", pytest.param("sockets", marks=marks)], indirect=True)


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    """Gradients are summed in memory that the ranks share, as is usual on one host, or sent as between hosts."""
    monkeypatch.setenv("COLLECTIVE_STRATEGY_SHARED_MEMORY", "1" if request.param == "memory" else "0")
