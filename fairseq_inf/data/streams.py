"""Which token of which stream is in which row of which segment."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset
from torch import Tensor

from .words import without_end, without_pad

Spans = list[list[tuple[int, int]]]  # of each row: where what it reads begins and ends


class StreamDataset(FairseqDataset):
    """A binarized split as one flat sequence of tokens, and the documents in it.

    A document ends with the separator.  The default separator, eos, ends every line that
    fairseq-preprocess wrote, so that the lines are the documents.
    """

    def __init__(
        self, lines: Any, dictionary: Dictionary, layout: str, separator: int, name: str
    ) -> None:
        """lines: fairseq's indexed dataset.  layout: 'corpus' or 'documents'."""
        self.lines, self.dictionary, self.layout, self.name = lines, dictionary, layout, name
        self.separator = separator
        self.ends = np.cumsum(lines.sizes, dtype=np.int64)  # where each line ends
        self.num_tokens_total = int(self.ends[-1]) if len(self.ends) else 0
        if self.num_tokens_total == 0:
            raise ValueError(f"split {name} holds no tokens: check what fairseq-preprocess got")
        try:
            lines[len(self.ends) - 1]
        except (ValueError, OSError, EOFError):
            raise ValueError(f"{name}.bin is truncated: binarize it again") from None
        if layout == "documents":
            self.documents = self._find_documents()  # D+1 borders
        else:
            self.documents = np.array([0, self.num_tokens_total])

    def _find_documents(self) -> np.ndarray:
        if self.separator == self.dictionary.eos():
            borders = self.ends
        else:
            begins = self.ends - self.lines.sizes
            found = [
                begin + 1 + np.flatnonzero(self.lines[i].numpy() == self.separator)
                for i, begin in enumerate(begins)
            ]
            borders = np.concatenate(found)
            # the end of a line that ends with the separator belongs to the document before it
            closing = np.isin(borders, self.ends - 1)
            borders = borders + closing
        borders = borders[borders < self.num_tokens_total]
        return np.concatenate([[0], borders, [self.num_tokens_total]])

    def read(self, begin: int, end: int) -> Tensor:
        """Tokens begin .. end-1 of the flat sequence."""
        line = int(np.searchsorted(self.ends, begin, side="right"))
        parts = []
        while begin < end:
            offset = begin - (int(self.ends[line]) - int(self.lines.sizes[line]))
            part = self.lines[line][offset : offset + end - begin]
            parts.append(part)
            begin += len(part)
            line += 1
        return without_pad(torch.cat(parts).long(), self.dictionary)

    def spans(self, rows: int, length: int, shuffle_seed: int | None = None) -> Spans:
        """For each row the (begin, end) of what it reads, in order.

        corpus: the sequence cut into `rows` pieces of even length.  documents: whole documents,
        longest first to the row with the fewest segments so far, then in the order of the
        corpus, or in a random one with a seed.
        """
        if self.layout == "corpus":
            if rows > self.num_tokens_total:
                raise ValueError(
                    f"--batch-size on all processes wants {rows} streams, split {self.name} has "
                    f"only {self.num_tokens_total} tokens: make it smaller"
                )
            borders = [self.num_tokens_total * r // rows for r in range(rows + 1)]
            return [[(borders[r], borders[r + 1])] for r in range(rows)]
        begins, ends = self.documents[:-1], self.documents[1:]
        segments = -((begins - ends) // length)
        order = np.arange(len(begins))
        if shuffle_seed is not None:
            np.random.RandomState(shuffle_seed % 2**32).shuffle(order)
        place = np.argsort(order)  # the place of a document in its row, relative to others
        load = np.zeros(rows, dtype=np.int64)
        chosen: list[list[int]] = [[] for _ in range(rows)]
        for document in order[np.argsort(-segments[order], kind="stable")]:
            row = int(load.argmin())
            load[row] += segments[document]
            chosen[row].append(document)
        return [
            [(int(begins[d]), int(ends[d])) for d in sorted(row, key=place.__getitem__)]
            for row in chosen
        ]

    def prompts(self) -> dict[int, Tensor]:
        """Number and tokens of each document, or line of a corpus, that has words; without the
        eos and the separator at its end."""
        documents = self.layout == "documents"
        ends = {self.dictionary.eos(), self.separator} if documents else {self.dictionary.eos()}
        found = {}
        for i in range(len(self) if documents else len(self.lines)):
            text = self[i] if documents else without_pad(self.lines[i].long(), self.dictionary)
            text = without_end(text, ends)
            if len(text):
                found[i] = text
        return found

    def __len__(self) -> int:
        return len(self.documents) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.read(int(self.documents[index]), int(self.documents[index + 1]))

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.documents)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens


class SegmentBatches(torch.utils.data.Dataset):
    """Item i is segment i of this process's rows, as a batch that fairseq's loops take.

    Every token is a target once; it is predicted from the token before it, the first of a stream
    from eos.  A document begins with a segment of its own.  Rows with nothing left are padding.

    With a context, for a model without a memory, each segment is a stream of its own that begins
    up to that many tokens earlier; those are no targets.
    """

    def __init__(
        self, dataset: StreamDataset, spans: Spans, length: int, shard: slice, context: int = 0
    ) -> None:
        """spans: for each row of all processes the (begin, end) of what it reads, in order.
        shard: which of the rows are this process's, a slice."""
        self.dataset, self.context = dataset, context
        tables = [_segments(row, length, context) for row in spans]
        self.num_segments = max(len(begin) for begin, _, _, _ in tables)
        # the width of a batch, the same in every process
        self.widths = np.zeros(self.num_segments, dtype=np.int64)
        for begin, end, _, _ in tables:
            np.maximum(self.widths[: len(begin)], end - begin, out=self.widths[: len(begin)])
        self.first_row = shard.start
        self.tables = tables[shard]
        self.eos, self.pad = dataset.dictionary.eos(), dataset.dictionary.pad()

    def __len__(self) -> int:
        return self.num_segments

    @property
    def num_rows(self) -> int:
        return len(self.tables)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows, width = len(self.tables), int(self.widths[index])
        tokens = torch.full((rows, width), self.pad)
        target = torch.full((rows, width), self.pad)
        lengths = torch.zeros(rows, dtype=torch.long)
        starts = torch.zeros(rows, dtype=torch.bool)
        earlier = torch.zeros(rows, dtype=torch.long)  # tokens that are context only
        for row, (begins, ends, fresh, contexts) in enumerate(self.tables):
            starts[row] = index == 0 or self.context > 0
            if index >= len(begins):
                continue
            begin, end, new = int(begins[index]), int(ends[index]), bool(fresh[index])
            size = end - begin
            starts[row] |= new
            lengths[row] = size
            earlier[row] = int(contexts[index])
            from_eos = begin == 0 or (new and self.dataset.layout == "documents")
            text = self.dataset.read(begin - (not from_eos), end)
            target[row, :size] = text[len(text) - size :]
            tokens[row, 0] = self.eos if from_eos else text[0]
            tokens[row, 1:size] = target[row, : size - 1]
        if target.max() >= len(self.dataset.dictionary):
            raise ValueError(
                f"{self.dataset.name} has words that are not among the "
                f"{len(self.dataset.dictionary)} of its dict.txt: binarize it with that dictionary"
            )
        batch = {
            "segment": index,
            "id": torch.arange(self.first_row, self.first_row + rows),
            "nsentences": rows,
            "ntokens": int((lengths - earlier).sum()),
            "net_input": {
                "src_tokens": tokens,
                "src_lengths": lengths.tolist(),
                "starts": starts.tolist(),
            },
            "target": target,
        }
        if self.context:
            batch["start_indices"] = earlier.tolist()  # fairseq's scorer counts from there
        return batch


class SequenceBatches(torch.utils.data.Dataset):
    """Item i is a batch of whole documents, one a row, as the list of their segments; only some of
    their tokens are targets."""

    def __init__(
        self,
        dataset: StreamDataset,
        rows: int,
        length: int,
        shard: slice,
        asked: Callable[[StreamDataset, int], np.ndarray],
        shuffle_seed: int | None = None,
    ) -> None:
        """rows: of all processes.  shard: which of them are this one's, a slice.
        asked: which tokens of a document are targets, at least one: bool for each"""
        self.dataset, self.length, self.asked = dataset, length, asked
        self.rows, self.shard = rows, shard
        self.order = np.arange(len(dataset))
        if shuffle_seed is not None:
            draw = np.random.RandomState(shuffle_seed % 2**32)
            draw.shuffle(self.order)
            segments = -(-dataset.sizes // length)
            if segments.min() < segments.max():
                self.order = _alike(self.order, segments, rows, draw)
        # the segment that each document's first target is in
        first = [int(asked(dataset, d).argmax()) for d in range(len(dataset))]
        self.first = np.array(first) // length

    def __len__(self) -> int:
        return -(-len(self.order) // self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen = self.order[index * self.rows : (index + 1) * self.rows]
        spans = [[tuple(self.dataset.documents[d : d + 2].tolist())] for d in chosen]
        spans += [[]] * (self.rows - len(spans))
        batches = SegmentBatches(self.dataset, spans, self.length, self.shard)
        real = torch.zeros(batches.num_rows, len(batches) * self.length, dtype=torch.bool)
        for row, document in enumerate(chosen[self.shard]):
            wanted = torch.from_numpy(self.asked(self.dataset, document))
            real[row, : len(wanted)] = wanted
        segments = []
        for i in range(len(batches)):
            batch = batches[i]
            target = batch["target"]
            kept = real[:, i * self.length :][:, : target.size(1)]
            batch["target"] = target.masked_fill(~kept, batches.pad)
            batch["ntokens"] = int(kept.sum())
            batch["segment"] = (index, i)
            segments.append(batch)
        return {
            "segments": segments,
            "first": int(self.first[chosen].min()),  # the first with a target, in any process
            "nsentences": sum(bool(row) for row in spans[self.shard]),
            "ntokens": sum(batch["ntokens"] for batch in segments),
        }


def _alike(
    order: np.ndarray, segments: np.ndarray, rows: int, draw: np.random.RandomState
) -> np.ndarray:
    """Documents in a random order, in which those of a batch have about as many segments, so that
    few rows wait for the longest.  segments: of each document"""
    batches = []
    for some in np.split(order, range(16 * rows, len(order), 16 * rows)):
        some = some[np.argsort(segments[some], kind="stable")]
        batches += np.split(some, range(rows, len(some), rows))
    last = [batches.pop()] if len(batches[-1]) < rows else []
    mixed = [batches[i] for i in draw.permutation(len(batches))]
    return np.concatenate(mixed + last)


def _segments(
    spans: list[tuple[int, int]], length: int, context: int = 0
) -> tuple[np.ndarray, ...]:
    """-> for each segment of a row its begin, its end, whether a stream begins with it, and how
    many tokens at its begin are context only"""
    columns = []
    for begin, end in spans:
        at = np.arange(begin, end, length, dtype=np.int64)
        first = np.maximum(at - context, begin)
        columns.append((first, np.minimum(at + length, end), first == begin, at - first))
    if not spans:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, np.zeros(0, bool), nothing
    return tuple(np.concatenate(column) for column in zip(*columns, strict=True))
