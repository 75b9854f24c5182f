"""What an inspection has seen, on disk: columns of numbers that grow with the text.

trace.json         what was read by which model
trace.safetensors  tokens, text, losses; densities, histograms, places, coefficients by layer
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fairseq_inf.errors import Failure
from fairseq_inf.memory import CellDensity, GaussianDensity, Move, Places, Weights

FORMAT = "fairseq_inf trace 1"
CODES = {"f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "u1": "U8"}


class TraceWriter:
    """Columns go to files of their own as they grow; `close` makes one file of them, so that the
    memory in use does not depend on the length of the text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.files: dict[str, IO[bytes]] = {}
        self.rows: dict[str, int] = {}
        self.kinds: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        self.moves: dict[str, tuple[Any, list[int]]] = {}

    def add(self, name: str, rows: np.ndarray) -> None:
        """Append rows, along the first dimension."""
        if name not in self.files:
            self.files[name] = open(self.folder / f"{len(self.files)}.column", "wb")
            self.kinds[name], self.rows[name] = (rows.dtype, rows.shape[1:]), 0
        assert self.kinds[name] == (rows.dtype, rows.shape[1:]), name
        self.files[name].write(np.ascontiguousarray(rows).tobytes())
        self.rows[name] += len(rows)

    def add_move(self, name: str, move: Move) -> None:
        """Append a write; one that equals the last one is kept once."""
        parts = {
            "knots": torch.stack([move.knots, move.landed], dim=1).double().cpu().numpy(),
            "new": move.new.double().cpu().numpy(),
        }
        known, spans = self.moves.get(name, ({}, []))
        spans = list(spans) or [0, 0, 0, 0]
        for number, (kind, values) in enumerate(parts.items()):
            if not np.array_equal(known.get(kind), values):
                self.add(f"{name}.{kind}", values)
                end = self.rows[f"{name}.{kind}"]
                spans[2 * number : 2 * number + 2] = [end - len(values), len(values)]
        self.moves[name] = (parts, spans)
        self.add(f"{name}.writes", np.array([[*spans, move.forgets]], dtype="i8"))
        self.add(f"{name}.begin", np.array([move.begin]))

    def close(self, info: dict[str, Any]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
        end = 0
        for name, file in self.files.items():
            dtype, shape = self.kinds[name]
            size = file.tell()
            header[name] = {
                "dtype": CODES[dtype.str[1:]],
                "shape": [self.rows[name], *shape],
                "data_offsets": [end, end + size],
            }
            end += size
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % 8)
        with open(self.folder / "trace.safetensors", "wb") as out:
            out.write(struct.pack("<Q", len(words)) + words)
            for file in self.files.values():
                file.close()
                with open(file.name, "rb") as column:
                    shutil.copyfileobj(column, out, 1 << 20)
                Path(file.name).unlink()
        text = json.dumps({"format": FORMAT, **info}, indent=1)
        (self.folder / "trace.json").write_text(text + "\n", "utf-8")


class Trace:
    """What a TraceWriter has left.  Columns stay on disk until they are asked for."""

    def __init__(self, folder: str | Path) -> None:
        from safetensors import SafetensorError, safe_open

        path = Path(folder) / "trace.json"
        if not path.is_file():
            raise Failure(f"{folder} is no trace: it has no trace.json")
        try:
            self.info = json.loads(path.read_text("utf-8"))
            found = self.info["format"]
        except (ValueError, KeyError, TypeError):
            raise Failure(f"{path} is damaged: inspect the text again") from None
        if found != FORMAT:
            raise Failure(
                f"{path} is of another version ({found!r}, where this one reads {FORMAT!r}): "
                "inspect the text again"
            )
        try:
            self.file = safe_open(Path(folder) / "trace.safetensors", framework="np")
        except (SafetensorError, OSError) as error:
            raise Failure(
                f"{folder}/trace.safetensors cannot be read ({error}): inspect the text again"
            ) from None
        self.names = set(self.file.keys())
        self.ends: dict[str, Places] = {}

    def column(self, name: str, first: int = 0, after: int | None = None) -> np.ndarray:
        """Some rows of a column, or all."""
        part = self.file.get_slice(name)
        size = part.get_shape()[0]
        if first == 0 and (after is None or after >= size):
            return self.file.get_tensor(name)
        return part[first : size if after is None else min(after, size)]

    def loss(self, kind: str, token: int) -> float:
        """In nats.  kind: on, off or other"""
        return float(self.column(f"loss.{kind}", token, token + 1)[0])

    def words(self, first: int, after: int) -> list[str]:
        """What each token adds to the text."""
        ends = self.column("ends", max(first - 1, 0), after)
        begin = 0 if first == 0 else int(ends[0])
        ends = ends if first == 0 else ends[1:]
        data = self.column("text", begin, int(ends[-1]) if len(ends) else begin).tobytes()
        starts = [begin, *ends[:-1].tolist()]
        cuts = zip(starts, ends.tolist(), strict=True)
        return [data[a - begin : b - begin].decode("utf-8", "replace") for a, b in cuts]

    def numbers(self, name: str, places: Places) -> np.ndarray:
        """Which vectors of the stream are at these places.  The end of a text is read first, so
        that vector i is of token i - 1.  -> K"""
        return self.column(f"{name}.numbers", places.first, places.after)

    @property
    def begins(self) -> int:
        """The first token that was predicted with something in a memory; all of them if none."""
        found = [self._begins(f"own.{own['layer']}") for own in self.info["layers"]]
        return min([*found, self.info["tokens"]])

    def _begins(self, name: str) -> int:
        for segment, move in enumerate(self.moves(name)):
            if len(move.new):
                return segment * int(self.info["length"])
        return int(self.info["tokens"])

    def perplexity(self, kind: str, first: int = 0) -> float:
        """Of the tokens from `first` on.  kind: on, off or other"""
        losses = self.column(f"loss.{kind}", first).astype("f8")
        return float(np.exp(min(losses.mean(), 700))) if len(losses) else float("nan")

    def whole_word(self, token: int) -> str:
        """A token with the rest of its word."""
        first = max(token - 8, 0)
        pieces = self.words(first, min(token + 9, self.info["tokens"]))
        at = token - first
        if not pieces[at].strip():
            return pieces[at]
        begin, end = at, at + 1
        while begin > 0 and _joins(pieces[begin - 1], pieces[begin]):
            begin -= 1
        while end < len(pieces) and _joins(pieces[end - 1], pieces[end]):
            end += 1
        return "".join(pieces[begin:end])

    def vector_words(self, name: str, places: Places) -> list[str]:
        """-> K"""
        numbers = self.numbers(name, places)
        if not len(numbers):
            return []
        first = int(numbers[0])
        words = ["⟨start⟩"] * (first == 0) + self.words(max(first - 1, 0), int(numbers[-1]))
        return [words[i] for i in (numbers - first).tolist()]

    def moves(self, name: str) -> Iterator[Move]:
        """The writes of a memory, one a segment.  name: own.LAYER or other.LAYER"""
        writes = self.column(f"{name}.writes").tolist()
        begins = self.column(f"{name}.begin").tolist()
        for (at, knots, new_at, new, forgets), begin in zip(writes, begins, strict=True):
            pairs = torch.from_numpy(self.column(f"{name}.knots", at, at + knots))
            places = torch.zeros(0, dtype=torch.float64)
            if new:
                places = torch.from_numpy(self.column(f"{name}.new", new_at, new_at + new))
            before, after = pairs.T.contiguous()
            yield Move(places, before, after, None, bool(forgets), begin)

    def walk(self, name: str) -> Iterator[Places]:
        """Where the vectors are when each segment reads: the same object all the way."""
        places = Places()
        for move in self.moves(name):
            places.follow(move)
            yield places

    def places(self, name: str) -> Places:
        """Where the vectors are at the end."""
        if name not in self.ends:
            *_, self.ends[name] = self.walk(name)
        return self.ends[name]

    def density(self, layer: int, token: int) -> GaussianDensity | CellDensity:
        """Through which each head looked when the token was predicted: of H."""
        name = f"own.{layer}"

        def part(kind: str) -> Tensor:
            return torch.from_numpy(self.column(f"{name}.{kind}", token, token + 1)[0]).double()

        if f"{name}.mu" in self.names:
            mu, sigma = (part(x) for x in ("mu", "sigma"))
            return GaussianDensity(mu, sigma.square())
        cell, mass, rest = (part(x) for x in ("cell", "mass", "rest"))
        [cells] = [entry["cells"] for entry in self.info["layers"] if entry["layer"] == layer]
        return Weights(spread(cell, mass, rest, cells))


def _joins(before: str, piece: str) -> bool:
    """Whether a piece goes on with the word that another one ends in."""
    return before[-1:].isalnum() and piece[:1].isalnum()


def spread(cell: Tensor, mass: Tensor, rest: Tensor, cells: int) -> Tensor:
    """Masses of all cells, of which the largest are known and the others share the rest evenly.
    cell, mass: ... x k, rest: ...  -> ... x cells"""
    others = max(cells - cell.size(-1), 1)
    masses = (rest / others)[..., None].expand(*rest.shape, cells).clone()
    return masses.scatter(-1, cell.long(), mass)
