"""The names by which a Trainer finds the strategy."""

from typing import Any

_NAMES = {
    "collective": "auto",
    "collective_torch": "torch",
    "collective_single": "single",
    "collective_horovod": "horovod",
    "collective_xla": "xla",
}


def register(registry: Any, strategy: Any) -> None:
    """Adds the names to one Lightning package's registry; called once, when the package's strategy is imported."""
    for name, collective in _NAMES.items():
        description = f"CollectiveStrategy with the collective {collective!r}"
        registry.register(name, strategy, description=description, override=True, collective=collective)
