"""What a function gives on real ranks: the values, or the errors."""

from collections.abc import Callable
from typing import Any

from collective_strategy.testing import run_ranks


def values(n: int, function: Callable[..., Any], **options: Any) -> list[Any]:
    """Every rank's result; raises the first rank's error."""
    return [outcome.result() for outcome in run_ranks(n, function, **{"timeout": 20, **options})]


def errors(n: int, function: Callable[..., Any], **options: Any) -> list[BaseException]:
    """Every rank's error; fails if a rank has none."""
    outcomes = run_ranks(n, function, **{"timeout": 20, **options})
    assert all(outcome.error is not None for outcome in outcomes), [outcome.value for outcome in outcomes]
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and message of the error that a call raises, on a rank that goes on afterwards."""
    try:
        result = call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing raised", repr(result)
