"""One HTML file that shows a trace, with all its numbers inside: no network, no server, no build.

Numbers are packed as small integers in base64, those of the densities in chunks that the page opens
when a word of theirs is asked for.  Texts get into the page as data only, never as HTML.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from fairseq_inf.files import whole_file

from .trace import Trace

CHUNK = 2048  # tokens whose densities are unpacked together
BUDGET = 24_000_000  # bytes for all densities: of a long text a page knows fewer cells of each,
EACH = 6_000  # and so of a model with many layers and heads: bytes for the densities of a token
SHOTS = 8_000_000  # bytes for places that need not be worked out
WHOLE = 65535


def write_page(trace: Trace, path: Path) -> None:
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    head, tail = template.split("<!-- data -->")
    head = head.replace("<!-- title -->", html.escape(str(trace.info["text"])))
    with whole_file(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(head)
        kept, begins = kept_cells(trace), trace.begins
        file.write(_script("info", "application/json", _json(page_info(trace, kept))))
        for name, values in columns(trace):
            _write(file, name, values)
        for entry in trace.info["layers"]:
            if entry["density"] is not None:
                for number, first in enumerate(range(begins, trace.info["tokens"], CHUNK)):
                    name = f"d.{entry['layer']}.{number}"
                    _write(file, name, packed(trace, entry, first, first + CHUNK, kept))
        file.write(tail)


def _json(value: Any) -> str:
    """For a <script>: nothing in it ends one."""
    return json.dumps(value).replace("<", "\\u003c")


def _script(name: str, kind: str, content: str) -> str:
    return f'<script type="{kind}" id="data.{name}">{content}</script>\n'


def _write(file: IO[str], name: str, values: np.ndarray) -> None:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    content = base64.b64encode(little.tobytes()).decode()
    file.write(_script(name, "application/octet-stream", content))


def kept_cells(trace: Trace) -> int:
    """How many cells of each density the page knows one by one."""
    info = trace.info
    tokens = info["tokens"] - trace.begins  # the others have none
    densities = max(tokens * info["heads"] * len(info["layers"]), 1)
    budget = min(BUDGET, EACH * tokens)
    known = max([entry["kept"] for entry in info["layers"]], default=0)
    return int(np.clip((budget / densities - 2) // 4, min(2, known), known))


def page_info(trace: Trace, kept: int) -> dict[str, Any]:
    begins = trace.begins
    facts: dict[str, Any] = {"kept": kept, "chunk": CHUNK, "begins": begins, "since": None}
    if begins < trace.info["tokens"]:
        facts["since"] = {x: trace.perplexity(x, begins) for x in trace.info["perplexity"]}
    return {**trace.info, **facts}


def columns(trace: Trace) -> Iterator[tuple[str, np.ndarray]]:
    """All but the densities.  Losses are in thousandths of a bit."""
    yield "text", trace.column("text")
    yield "sizes", np.diff(trace.column("ends"), prepend=0).clip(0, WHOLE).astype("u2")
    off, on = (trace.column(f"loss.{kind}") / np.log(2) * 1000 for kind in ("off", "on"))
    yield "on", on.round().clip(0, WHOLE).astype("u2")
    yield "gain", (off - on).round().clip(-32767, 32767).astype("i2")
    kinds = ("own", "other") if trace.info["sticky"][1] is not None else ("own",)
    for entry in trace.info["layers"]:
        histogram = trace.column(f"own.{entry['layer']}.histogram")
        highest = histogram.max(axis=1, keepdims=True).clip(1e-9)
        yield f"histogram.{entry['layer']}", (histogram / highest * 255).round().astype("u1")
        for kind in kinds:
            name = f"{kind}.{entry['layer']}"
            numbers = trace.column(f"{name}.numbers")
            if np.array_equal(numbers, np.arange(len(numbers)) + numbers[:1]):
                numbers = numbers[:1]  # one after the other
            yield f"{name}.numbers", numbers
            yield f"{name}.shots", shots(trace, name, kinds)
            yield f"{name}.writes", trace.column(f"{name}.writes").astype("i4")
            for part in ("knots", "new", "begin"):
                yield f"{name}.{part}", trace.column(f"{name}.{part}").astype("f4")


def shots(trace: Trace, name: str, kinds: tuple[str, ...]) -> np.ndarray:
    """Where everything is at some segments, the last one among them, so that the page need not
    follow a long text from its beginning: [segment, first, begin, K, t_1 .. t_K] of each.  -> f4"""
    info, found = trace.info, []
    room = SHOTS / (4 * len(info["layers"]) * len(kinds))  # numbers
    count = int(np.clip(room / max(info["tokens"] / 2, 1), 1, 16))
    chosen = {info["segments"] - 1 - info["segments"] * i // count for i in range(count)}
    for segment, places in enumerate(trace.walk(name)):
        if segment in chosen:
            head = [segment, places.first, places.begin, len(places.t)]
            found += [np.array(head), places.t.numpy()]
    return np.concatenate(found).astype("f4")


def packed(trace: Trace, entry: dict[str, Any], first: int, after: int, kept: int) -> np.ndarray:
    """The densities of some tokens, head by head: of a Gaussian mu and log2 sigma, else cells,
    their masses and the mass of all others.  -> u2"""

    def column(part: str) -> np.ndarray:
        return trace.column(f"own.{entry['layer']}.{part}", first, after).astype("f8")

    def share(x: np.ndarray) -> np.ndarray:
        return (x.clip(0, 1) * WHOLE).round()

    if entry["density"] == "normal":
        sigma = np.log2(column("sigma").clip(2.0**-15, 2.0**15))
        parts = [share(column("mu")), ((sigma + 16) * 2048).round()]
        return np.stack(parts, axis=-1).astype("u2")
    kept = min(kept, entry["kept"])
    cell, mass = column("cell")[..., :kept], column("mass")
    rest = column("rest") + mass[..., kept:].sum(axis=-1)
    whole = np.concatenate([cell, share(mass[..., :kept]), share(rest)[..., None]], axis=-1)
    return whole.astype("u2")
