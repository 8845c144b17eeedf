"""Makes Trainer(strategy="collective") work whichever of Lightning and this package is imported first.

Lightning knows a strategy's name once it is in its registry, which exists when Lightning is imported. Importing
Lightning here would cost every plain PyTorch process seconds, so the registration waits for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LIGHTNING = "lightning.pytorch"
_BINDING = "collective_strategy.strategies.lightning_package"


def register_with_lightning() -> None:
    """Registers now if Lightning is imported, otherwise right after it is."""
    if _LIGHTNING in sys.modules:
        import_module(_BINDING)
    else:
        sys.meta_path.insert(0, _AfterLightning())


class _AfterLightning(MetaPathFinder):
    """Finds Lightning as Python would, once, and has our binding imported after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            import_module(_BINDING)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
