"""All places x ranks x launchers of an exception, one after the other; too long for the suite.

    python tests/strategies/exception_matrix.py

Prints one line each: exit code, seconds, whether the user's exception is shown first. Exits with 1 if one is not as it
should be.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from launching import run
from test_exceptions import BUSY, IMPORTS, LAUNCHED_TIMEOUT, PLACES

FIRST = {"on_exception": "KeyError: 'first'", "loader_worker": "ValueError: Caught ValueError in DataLoader"}


def main() -> int:
    """Runs them all."""
    wrong = 0
    for launcher in ("self", "torchrun"):
        for place in PLACES:
            for rank in (0,) if place == "prepare_data" else (0, 1):
                with tempfile.TemporaryDirectory() as folder:
                    env = {"RAISING_TIMEOUT": str(LAUNCHED_TIMEOUT)}
                    ended = run("raising.py", place, str(rank), folder, launcher=launcher, env=env, timeout=120)
                first = re.search(r"\w+(Error|Exception)\b[^\n]*", ended.output)
                shown = first.group(0)[:60] if first else "nothing"
                in_time = ended.seconds < IMPORTS + LAUNCHED_TIMEOUT + BUSY
                good = ended.codes[0] != 0 and in_time and shown.startswith(FIRST.get(place, "ValueError: boom"))
                wrong += not good
                print(f"{'ok ' if good else 'BAD'} {launcher:8s} {place:16s} rank {rank}: code {ended.codes[0]}, "
                      f"{ended.seconds:.1f} s, first: {shown}", flush=True)  # fmt: skip
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
