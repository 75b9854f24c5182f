"""How results are shown: a table in markdown, a CSV file, a figure."""

import csv
import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fairseq_inf.errors import Failure
from fairseq_inf.files import whole_file


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """rows: dicts, of which only these columns are written."""
    with whole_file(path) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise Failure("figures need matplotlib: pip install 'fairseq_inf[figures]'") from None
    matplotlib.use("Agg")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq lets all of it through
    import matplotlib.pyplot as plt

    return plt


def save(plt: Any, figure: Any, *paths: str | Path) -> None:
    """Each in the format that its name ends with."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box stands for it
        figure.tight_layout()
        for path in paths:
            with whole_file(path) as partial:
                figure.savefig(partial, format=Path(path).suffix[1:], dpi=150, bbox_inches="tight")
    plt.close(figure)
