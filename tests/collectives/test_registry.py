"""Backends by name: built in, registered, or published by another package."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from collective_strategy.collectives import (
    Collective,
    SingleProcessCollective,
    TorchDistributedCollective,
    available_collectives,
    collective_class,
    create_collective,
    register_collective,
)
from collective_strategy.collectives import registry as registry_module
from collective_strategy.collectives.registry import automatic_backend


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_registry", dict(registry_module._registry))


class Mine(SingleProcessCollective):
    backend_name = "mine"


def test_the_built_in_names() -> None:
    assert {"torch", "single"} <= set(available_collectives())
    assert collective_class("torch") is TorchDistributedCollective
    assert isinstance(create_collective("single", timeout=3), SingleProcessCollective)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gloo'.*known: .*single.*torch"):
        create_collective("gloo")


@pytest.mark.usefixtures("_own_registry")
def test_a_class_can_be_registered_once() -> None:
    register_collective("mine", Mine)
    assert type(create_collective("mine")) is Mine
    assert "mine" in available_collectives()
    with pytest.raises(ValueError, match="overwrite=True"):
        register_collective("mine", Mine)
    register_collective("mine", TorchDistributedCollective, overwrite=True)
    assert collective_class("mine") is TorchDistributedCollective


@pytest.mark.usefixtures("_own_registry")
@pytest.mark.parametrize(
    ("name", "collective", "error"),
    [("Mine", Mine, ValueError), ("", Mine, ValueError), ("mine", object, TypeError), ("mine", Mine(), TypeError)],
)
def test_what_cannot_be_registered(name: str, collective: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        register_collective(name, collective)  # type: ignore[arg-type]


def test_an_entry_point_of_another_package_is_found_and_loaded_on_use(tmp_path: Path) -> None:
    (tmp_path / "other_package.py").write_text(
        "from collective_strategy.collectives import SingleProcessCollective\n"
        "class Theirs(SingleProcessCollective):\n    backend_name = 'theirs'\n"
    )
    info = tmp_path / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[collective_strategy.collectives]\n"
        "theirs = other_package:Theirs\n"
        "wrong = other_package:SingleProcessCollective.setup\n"
    )
    script = """
        import sys
        from collective_strategy.collectives import available_collectives, create_collective
        assert "theirs" in available_collectives()
        assert "other_package" not in sys.modules
        assert type(create_collective("theirs")).__name__ == "Theirs"
        try:
            create_collective("wrong")
        except TypeError as error:
            assert "'wrong'" in str(error)
        else:
            raise AssertionError("a function passed for a class")
    """
    path = [str(tmp_path), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}\n" + textwrap.dedent(script)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_abstract_classes_cannot_be_constructed() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Collective()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("variables", "backend"),
    [
        ({}, "torch"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torch"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovod"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "COLLECTIVE_STRATEGY_BACKEND": "torch"}, "torch"),
        ({"COLLECTIVE_STRATEGY_BACKEND": "single"}, "single"),
    ],
)
def test_what_auto_means(variables: dict[str, str], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "COLLECTIVE_STRATEGY_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert automatic_backend() == backend
