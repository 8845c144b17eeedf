"""Lightning strategies.

``CollectiveStrategy`` and the callbacks here are for the package ``lightning``;
:mod:`collective_strategy.pytorch_lightning` has those for ``pytorch_lightning``. Each is loaded on first use, so that
the other package need not be installed.
"""

from typing import TYPE_CHECKING, Any

from collective_strategy.strategies.module import CollectiveModule

if TYPE_CHECKING:
    from collective_strategy.strategies.lightning_package import AuditSharing as AuditSharing
    from collective_strategy.strategies.lightning_package import CollectiveStrategy as CollectiveStrategy
    from collective_strategy.strategies.lightning_package import ExplainSharing as ExplainSharing
    from collective_strategy.strategies.lightning_package import VerifyReplicas as VerifyReplicas

_BOUND_TO_LIGHTNING = ("AuditSharing", "CollectiveStrategy", "ExplainSharing", "VerifyReplicas")

__all__ = ["CollectiveModule", *_BOUND_TO_LIGHTNING]


def __getattr__(name: str) -> Any:
    if name in _BOUND_TO_LIGHTNING:
        from collective_strategy.strategies import lightning_package

        return getattr(lightning_package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
