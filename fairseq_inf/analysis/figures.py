"""The paper's analyses of a memory, drawn from the trace of an inspection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_inf.memory import Places

from .report import pyplot, save, write_csv
from .sample import phrases
from .trace import Trace

# colours that those who see no red or no green tell apart (Okabe and Ito)
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
GREY = "#8a8f98"
HEADS = (BLUE, ORANGE, GREEN, PINK, "#E69F00", SKY)


def shown(word: str, most: int = 24) -> str:
    """A word in a label, where a dollar sign begins no formula."""
    word = " ".join(word.replace("\n", " ⏎ ").split()) or "␣"
    word = word if len(word) <= most else word[: most - 1] + "…"
    return word.replace("$", r"\$")


def whole(trace: Trace, number: int) -> str:
    """The word of a vector, for a label."""
    return "⟨start⟩" if number == 0 else shown(trace.whole_word(number - 1))


def sharpest(trace: Trace) -> int:
    """The layer whose reads are the least spread out."""
    return max(trace.info["layers"], key=lambda entry: entry["focus"])["layer"]


def chosen(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the middle and the last one."""
    picks = sorted({0, len(layers) // 2, len(layers) - 1})
    return [layers[i] for i in picks]


def borders(trace: Trace, name: str, places: Places) -> np.ndarray:
    """Where what each write has brought begins, in the last state, if it is still there."""
    firsts, come = [], 0
    for move in trace.moves(name):
        if len(move.new):
            firsts.append(come)
            come += len(move.new)
    edges = places.edges().numpy()
    return np.array([edges[i - places.first] for i in firsts if i > places.first])


def attention(trace: Trace, plt: Any) -> Any:
    """How much of all reads falls on each part of the memory, and where the updates stand now."""
    layers = chosen(trace.info["layers"])
    figure, axes = plt.subplots(
        1, len(layers), figsize=(3.6 * len(layers), 2.8), sharey=True, squeeze=False
    )
    for axis, entry in zip(axes[0], layers, strict=True):
        name = f"own.{entry['layer']}"
        histogram = trace.column(f"{name}.histogram")
        read = histogram.sum(axis=1) > 0
        mean = histogram[read].mean(axis=0) * trace.info["bins"] if read.any() else histogram[0]
        t = (np.arange(len(mean)) + 0.5) / len(mean)
        axis.fill_between(t, mean, step="mid", color=BLUE, alpha=0.75, lw=0)
        axis.axhline(1, color=GREY, lw=0.8, ls=":")
        lines = borders(trace, name, trace.places(name))
        for border in lines[:: -(-len(lines) // 60) or 1]:
            axis.axvline(border, color=ORANGE, lw=0.7, alpha=0.5)
        axis.set_title(f"layer {entry['layer']}", fontsize=10)
        axis.set_xlabel("t: 0 oldest, 1 newest")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, None)
    axes[0][0].set_ylabel("density of all reads")
    figure.suptitle("Where the memory is read (lines: borders of the updates)", fontsize=11)
    return figure


def queries(trace: Trace, most: int = 4) -> list[int]:
    """The tokens that gain the most from the memory, far enough from one another, in order."""
    gain = trace.column("loss.off") - trace.column("loss.on")
    readable = np.arange(len(gain)) >= trace.info["tokens"] - readable_tokens(trace)
    found: list[int] = []
    for token in np.argsort(-np.where(readable, gain, -np.inf), kind="stable").tolist():
        if readable[token] and all(abs(token - other) > 8 for other in found):
            found.append(token)
        if len(found) == most:
            break
    return sorted(found)


def readable_tokens(trace: Trace) -> int:
    """How many tokens were predicted with something in the memory."""
    return int(trace.info["tokens"]) - trace.begins


def at_tokens(trace: Trace, layer: int, tokens: list[int]) -> Iterator[tuple[int, Places]]:
    """The tokens, in their order, and where everything was when each of them was predicted."""
    waiting = list(tokens)
    for segment, places in enumerate(trace.walk(f"own.{layer}")):
        while waiting and waiting[0] // trace.info["length"] == segment:
            yield waiting.pop(0), places
        if not waiting:
            return


def densities(trace: Trace, plt: Any) -> Any:
    """Through what heads look at the memory, for the words that gain most by it."""
    picks, layer = queries(trace), sharpest(trace)
    figure, axes = plt.subplots(len(picks), 1, figsize=(8, 1.7 * len(picks) + 0.6), sharex=True,
                                squeeze=False)  # fmt: skip
    edges = torch.linspace(0, 1, 513, dtype=torch.float64)
    t = (edges[1:] + edges[:-1]) / 2
    for axis, (token, places) in zip(axes[:, 0], at_tokens(trace, layer, picks), strict=True):
        density = trace.density(layer, token)
        masses = density.mass(edges) * len(t)  # H x D
        for head, mass in enumerate(masses):
            axis.plot(t, mass, lw=1, color=HEADS[head % len(HEADS)], label=f"head {head}")
        numbers = trace.numbers(f"own.{layer}", places)
        peak = density.mass(places.edges()).mean(dim=0)
        labelled: list[float] = []
        for i in peak.argsort(descending=True)[:20].tolist():
            if len(labelled) == 3 or any(abs(places.t[i] - x) < 0.08 for x in labelled):
                continue
            labelled.append(float(places.t[i]))
            axis.annotate(
                whole(trace, int(numbers[i])),
                (float(places.t[i]), axis.get_ylim()[1]),
                fontsize=8, ha="center", va="bottom", color=ORANGE,
            )  # fmt: skip
        word = trace.whole_word(token)
        bits = (trace.loss("off", token) - trace.loss("on", token)) / np.log(2)
        axis.set_ylabel(f"{shown(word, 14)}\n+{bits:.1f} bits", fontsize=8)
        axis.set_yticks([])
        axis.set_xlim(0, 1)
    axes[-1, 0].set_xlabel("t: 0 oldest, 1 newest")
    axes[0, 0].legend(
        fontsize=7, ncols=6, loc="lower right", bbox_to_anchor=(1, 1.15), frameon=False
    )
    figure.suptitle(
        f"Where the heads of layer {layer} looked for the words that gained most", fontsize=11
    )
    return figure


def memories(trace: Trace) -> list[tuple[str, str]]:
    """-> prefix of the columns and name of each memory, the linear one first"""
    first, other = trace.info["sticky"]
    found = [("own", "sticky" if first else "linear")]
    if other is not None:
        found.append(("other", "sticky" if other else "linear"))
    return sorted(found, key=lambda pair: pair[1])


def thinned(x: np.ndarray, y: np.ndarray, most: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """No more points than can be seen, with all peaks."""
    each = -(-len(x) // most)
    if each <= 1:
        return x, y
    starts = np.arange(0, len(x), each)
    return x[starts], np.maximum.reduceat(y, starts)


def space(trace: Trace, plt: Any) -> Any:
    """The space of each word at the end, and the words with the largest peaks."""
    layer, kinds = sharpest(trace), memories(trace)
    figure, axes = plt.subplots(len(kinds), 1, figsize=(9, 2.4 * len(kinds)), sharex=True,
                                squeeze=False)  # fmt: skip
    for axis, (kind, name) in zip(axes[:, 0], kinds, strict=True):
        places = trace.places(f"{kind}.{layer}")
        spaces = places.spaces().numpy()
        number = trace.numbers(f"{kind}.{layer}", places)
        x, y = thinned(number, spaces)
        axis.fill_between(x, y, step="mid", color=BLUE, alpha=0.8, lw=0)
        axis.plot(x, y, color=BLUE, lw=0.6, drawstyle="steps-mid")
        axis.set_ylabel(f"{name}\nspace of a word")
        axis.set_ylim(0, 1.35 * max(spaces.max(initial=0), 1e-12))
        gap, labelled = max(len(number) / 30, 1), []  # type: ignore[var-annotated]
        for i in np.argsort(-spaces, kind="stable").tolist():
            if len(labelled) == 10 or spaces[i] < max(1.5 * np.median(spaces), spaces.max() / 10):
                break
            if all(abs(i - j) > gap for j in labelled):
                labelled.append(i)
                axis.annotate(whole(trace, int(number[i])), (number[i], spaces[i]), fontsize=8,
                              rotation=30, ha="left", va="bottom", color=ORANGE)  # fmt: skip
    axes[-1, 0].set_xlabel("token of the text")
    figure.suptitle(f"The space that each word holds at the end, layer {layer}", fontsize=11)
    return figure


def reconstruction(trace: Trace, plt: Any) -> Any:
    """How far the memory's vectors are from those that it was given, by their age."""
    figure, axis = plt.subplots(figsize=(5.5, 3.4))
    layers = chosen(trace.info["layers"])
    for entry, color in zip(layers, (BLUE, ORANGE, GREEN), strict=False):
        error, size = trace.column(f"own.{entry['layer']}.errors").T
        known = size > 0
        ages = 2 ** ((np.arange(len(size))[known] + 0.5) / trace.info["ages"])
        axis.plot(ages, np.sqrt(error[known] / size[known]), "o-", ms=3, color=color,
                  label=f"layer {entry['layer']}")  # fmt: skip
    axis.axhline(1, color=GREY, lw=0.8, ls=":")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("age in tokens")
    axis.set_ylabel("|X̂ − X| / |X|")
    axis.set_ylim(0, None)
    axis.legend(fontsize=8, frameon=False)
    axis.set_title("What comes back of what was stored", fontsize=11)
    return figure


def saved(nats: Any) -> np.ndarray:
    """By how many percent the perplexity is less."""
    return 100 * (1 - np.exp(-np.asarray(nats)))


def gain(trace: Trace, plt: Any) -> Any:
    """What perplexity is less with the memory than without, by place and by frequency."""
    off, on = trace.column("loss.off").astype("f8"), trace.column("loss.on").astype("f8")
    tokens = trace.column("tokens")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2))
    parts = min(40, max(len(on) // 50, 1))
    by_place = [x.mean() for x in np.array_split(off - on, parts)]
    ends = np.linspace(0, len(on), parts + 1)
    left.bar((ends[1:] + ends[:-1]) / 2, saved(by_place), width=np.diff(ends) * 0.9,
             color=[BLUE if x >= 0 else ORANGE for x in by_place])  # fmt: skip
    left.axvspan(0, trace.begins, color=GREY, alpha=0.15, lw=0)
    left.set_xlabel("place in the text, tokens (grey: nothing in the memory yet)")
    left.set_ylabel("perplexity saved by the memory, %")
    _, which, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    octave = np.log2(counts[which]).astype(int)
    names, heights = [], []
    for number in range(octave.max() + 1):
        inside = octave == number
        if inside.any():
            low, high = 2**number, 2 ** (number + 1) - 1
            names.append(f"{low:,}" if low == high else f"{low:,}–{high:,}")
            heights.append(float(saved((off - on)[inside].mean())))
    right.bar(range(len(names)), heights, color=[BLUE if x >= 0 else ORANGE for x in heights])
    right.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    right.set_xlabel("how often the word is in the text")
    for axis in (left, right):
        axis.axhline(0, color=GREY, lw=0.8)
    return figure


FIGURES: dict[str, Callable[[Trace, Any], Any]] = {
    "attention": attention,
    "densities": densities,
    "space": space,
    "reconstruction": reconstruction,
    "gain": gain,
}


def draw(trace: Trace, folder: Path) -> list[str]:
    """Write every figure that the trace has the numbers for, as PNG and SVG.  -> their names"""
    plt = pyplot()
    names = list(FIGURES) if held(trace) else ["gain"]
    for name in names:
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        save(plt, FIGURES[name](trace, plt), *paths)
    return names


def held(trace: Trace) -> bool:
    """Whether anything has come to a place in a memory."""
    return bool(trace.info["layers"]) and trace.info["layers"][0]["density"] is not None


def phrase(words: list[str], numbers: np.ndarray) -> str:
    """Words in a row, with an ellipsis where they are no neighbours."""
    gaps = np.diff(numbers, prepend=numbers[:1] - 1) != 1
    return "".join(f" …{x}" if gap else x for x, gap in zip(words, gaps, strict=True))


def write_tables(trace: Trace, folder: Path) -> None:
    """attended.csv: the words that each of the words with the largest gains has looked at;
    phrases.csv: what holds the most space at the end."""
    rows = []
    tokens = queries(trace, 30)
    for entry in chosen(trace.info["layers"]):
        for token, places in at_tokens(trace, entry["layer"], tokens):
            [word] = trace.words(token, token + 1)
            bits = (trace.loss("off", token) - trace.loss("on", token)) / np.log(2)
            words = trace.vector_words(f"own.{entry['layer']}", places)
            numbers = trace.numbers(f"own.{entry['layer']}", places)
            masses = trace.density(entry["layer"], token).mass(places.edges()).mean(dim=0)
            for i in masses.argsort(descending=True, stable=True)[:5].tolist():
                rows.append({
                    "token": token, "word": word, "gain_bits": round(bits, 3),
                    "layer": entry["layer"], "attended_token": int(numbers[i]) - 1,
                    "attended": words[i], "mass": f"{float(masses[i]):.4g}",
                })  # fmt: skip
    columns = "token word gain_bits layer attended_token attended mass".split()
    write_csv(folder / "attended.csv", columns, rows)
    rows = []
    for kind, name in memories(trace):
        for entry in trace.info["layers"]:
            column = f"{kind}.{entry['layer']}"
            places = trace.places(column)
            spaces, numbers = places.spaces(), trace.numbers(column, places)
            words = trace.vector_words(column, places)
            for first, after in phrases(spaces.tolist()):
                rows.append({
                    "memory": name, "layer": entry["layer"], "first_token": int(numbers[first]) - 1,
                    "phrase": phrase(words[first:after], numbers[first:after]),
                    "space": f"{float(spaces[first:after].sum()):.4g}",
                })  # fmt: skip
    write_csv(folder / "phrases.csv", "memory layer first_token phrase space".split(), rows)
