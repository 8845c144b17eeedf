"""What a check is, how it runs on ranks, and the list of all of them."""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.runner import run_ranks

_PACKAGE = "collective_strategy.testing.conformance"
_THEMES = (
    "movement", "domains", "reductions", "meaning", "layouts", "uneven", "containers", "objects", "decisions",
    "arguments", "purity", "in_place", "groups", "mismatches", "missing_ranks", "lifecycle", "gradients",
    "gradient_rules",
)  # fmt: skip
WORLD_SIZES = (1, 2, 3, 4)


class NotApplicable(Exception):
    """The backend's capabilities say that a check does not concern it."""


@dataclass(frozen=True)
class Template:
    """A check without a backend.

    Args:
        name: Says what must hold.
        module: Where its function lives.
        operations: The methods it tests, names out of `OPERATIONS`.
        world_sizes: With how many ranks it makes sense.
        settings: For the collective's constructor.
        function: Called on every rank with the collective and an `Expect`.
    """

    name: str
    module: str
    operations: tuple[str, ...]
    world_sizes: tuple[int, ...]
    settings: Mapping[str, Any]
    function: Callable[[Collective, Expect], None] = field(repr=False)


def check(
    *operations: str, world_sizes: tuple[int, ...] = WORLD_SIZES, **settings: Any
) -> Callable[[Callable[[Collective, Expect], None]], Template]:
    """Makes a function a check of ``operations``."""

    def decorate(function: Callable[[Collective, Expect], None]) -> Template:
        return Template(function.__name__, function.__module__, operations, world_sizes, settings, function)

    return decorate


@dataclass(frozen=True)
class Check:
    """A check of one backend with one number of ranks; call it.

    It raises AssertionError with every rank's findings, or unittest.SkipTest (which pytest knows) if the backend's
    capabilities exclude it.
    """

    template: Template
    backend: str | type[Collective]
    world_size: int
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What must hold."""
        return self.template.name

    def __str__(self) -> str:
        return f"{self.name}-{self.world_size}"

    def __call__(self) -> None:
        settings = {"timeout": 30, **self.settings, **self.template.settings}
        outcomes = run_ranks(
            self.world_size, perform, self.template.module, self.name, backend=self.backend, **settings
        )
        skipped = [outcome.error for outcome in outcomes if isinstance(outcome.error, NotApplicable)]
        if len(skipped) == len(outcomes):
            raise unittest.SkipTest(str(skipped[0]))
        failures = [
            f"rank {outcome.rank}: {error}"
            if isinstance(error, AssertionError)
            else f"rank {outcome.rank}: {type(error).__name__}: {error}\n{outcome.traceback}"
            for outcome in outcomes
            if (error := outcome.error) is not None
        ]
        if failures:
            raise AssertionError(f"{self} of {self.backend!r}\n" + "\n".join(failures))


def perform(collective: Collective, module: str, name: str) -> None:
    """Runs a check on this rank."""
    template: Template = getattr(importlib.import_module(module), name)
    expect = Expect()
    try:
        template.function(collective, expect)
    except Exception as error:
        expect.finish(f"after that, {type(error).__name__}: {error}")
        raise
    expect.finish()


def templates() -> list[Template]:
    """All checks, without a backend."""
    found: list[Template] = []
    for theme in _THEMES:
        module = importlib.import_module(f"{_PACKAGE}.{theme}")
        found += [
            value for value in vars(module).values() if isinstance(value, Template) and value.module == module.__name__
        ]
    return found


def suite(
    backend: str | type[Collective],
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    names: Iterable[str] | None = None,
    **settings: Any,
) -> list[Check]:
    """The checks that a backend must pass.

    Args:
        backend: A registered name, or a subclass of `Collective` that can be pickled by reference.
        world_sizes: With how many ranks to run; checks of mesh axes need 4.
        names: Only these checks.
        **settings: For the constructor, for example ``device="cuda"``.

    Returns:
        Callables with a ``name``, a ``world_size`` and a readable ``str``.
    """
    wanted = None if names is None else set(names)
    known = templates()
    if wanted is not None and (unknown := wanted - {template.name for template in known}):
        raise ValueError(f"there are no checks named {sorted(unknown)}")
    return [
        Check(template, backend, size, settings)
        for template in known
        if wanted is None or template.name in wanted
        for size in world_sizes
        if size in template.world_sizes
    ]


class CollectiveConformance:
    """The suite as a pytest class: derive from it, name the class ``Test...`` and set ``backend``."""

    backend: ClassVar[str | type[Collective]]
    world_sizes: ClassVar[Sequence[int]] = WORLD_SIZES
    names: ClassVar[Sequence[str] | None] = None  # only these checks
    settings: ClassVar[Mapping[str, Any]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Makes one test per check."""
        if "conformance_check" in metafunc.fixturenames:
            checks = suite(self.backend, world_sizes=self.world_sizes, names=self.names, **self.settings)
            metafunc.parametrize("conformance_check", checks, ids=str)

    def test_conformance(self, conformance_check: Check) -> None:
        """Runs one check."""
        conformance_check()
