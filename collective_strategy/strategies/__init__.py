"""Lightning strategies.

``CollectiveStrategy`` here is for the package ``lightning``; :mod:`collective_strategy.pytorch_lightning` has the one
for ``pytorch_lightning``. Each is loaded on first use, so that the other package need not be installed.
"""

from typing import TYPE_CHECKING, Any

from collective_strategy.strategies.module import CollectiveModule

if TYPE_CHECKING:
    from collective_strategy.strategies.lightning_package import CollectiveStrategy

__all__ = ["CollectiveModule", "CollectiveStrategy"]


def __getattr__(name: str) -> Any:
    if name == "CollectiveStrategy":
        from collective_strategy.strategies.lightning_package import CollectiveStrategy

        return CollectiveStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
