"""The backends of this package pass the conformance suite, and a backend with a fault fails the check made for it."""

import os
import subprocess
import sys
import textwrap

import pytest

from collective_strategy.collectives import OPERATIONS, Collective
from collective_strategy.testing.conformance import CollectiveConformance, suite, templates
from collective_strategy.testing.conformance.broken import BROKEN_BACKENDS


class TestTorch(CollectiveConformance):
    backend = "torch"


class TestSingle(CollectiveConformance):
    backend = "single"
    world_sizes = (1,)


def test_every_operation_of_the_table_has_checks() -> None:
    tested = {name for template in templates() for name in template.operations}
    assert tested == {row.name for row in OPERATIONS}


def test_checks_have_different_names() -> None:
    names = [template.name for template in templates()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("backend", "name", "world_size"), [pytest.param(*row, id=row[0].__name__) for row in BROKEN_BACKENDS]
)
def test_a_broken_backend_fails_the_check_made_for_it(backend: type[Collective], name: str, world_size: int) -> None:
    (check,) = suite(backend, world_sizes=[world_size], names=[name], timeout=4)
    with pytest.raises(AssertionError) as failure:
        check()
    assert check.name in str(failure.value)
    assert "rank " in str(failure.value)


def test_an_unknown_check_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no checks named.*all_gahter"):
        suite("torch", names=["all_gahter"])


def test_a_third_party_file_runs_the_suite(tmp_path) -> None:
    (tmp_path / "my_backend.py").write_text(
        textwrap.dedent(
            """
            from collective_strategy.collectives import TorchDistributedCollective

            class MyCollective(TorchDistributedCollective):
                backend_name = "mine"
            """
        )
    )
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent(
            """
            from my_backend import MyCollective
            from collective_strategy.testing.conformance import CollectiveConformance

            class TestMine(CollectiveConformance):
                backend = MyCollective
                world_sizes = (2,)
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "stacks_in_rank or decisions"]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout
