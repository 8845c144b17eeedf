"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns two blanks apart under a ruled head; those named in ``right`` end flush."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        placed = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(cells, widths, head, strict=True)
        ]
        return "  ".join(placed).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, body)])
