"""How results are shown: a table in markdown, a CSV file, a figure."""

import csv


def table(head, lines):
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_csv(path, columns, rows):
    """rows: dicts, of which only these columns are written."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(plt, figure, path):
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
