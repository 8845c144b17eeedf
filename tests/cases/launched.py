"""The helpers of tests/strategies that start real processes, for the cases here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "strategies"))

from launching import Ended, clean_environment, commands, free_port, run, run_commands

__all__ = ["Ended", "clean_environment", "commands", "free_port", "run", "run_commands"]
