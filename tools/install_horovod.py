#!/usr/bin/env python3
"""Builds and installs Horovod before or without this package: ``python tools/install_horovod.py``.

With the package installed it is ``python -m collective_strategy.install_horovod``, which is the same program.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    program = Path(__file__).parents[1] / "collective_strategy" / "install_horovod.py"
    runpy.run_path(str(program), run_name="__main__")
