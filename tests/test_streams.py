import numpy as np
import pytest
import torch
from fairseq.data import Dictionary

from fairseq_inf.data.streams import SegmentBatches, StreamDataset


class Lines:
    """What the streams use of fairseq's indexed datasets."""

    def __init__(self, lines):
        self.lines = [torch.tensor(line, dtype=torch.int) for line in lines]
        self.sizes = np.array([len(line) for line in lines])

    def __getitem__(self, index):
        return self.lines[index]


def make_dataset(sizes, layout, separator=None):
    """Every token is another word, so that a target tells where it comes from; lines end in eos."""
    dictionary = Dictionary()
    for i in range(1000):
        dictionary.add_symbol(f"w{i}")
    words = iter(range(4, 1004))
    lines = [[next(words) for _ in range(size - 1)] + [dictionary.eos()] for size in sizes]
    separator = dictionary.eos() if separator is None else separator
    return StreamDataset(Lines(lines), dictionary, layout, separator, "train")


def flat(dataset):
    return torch.cat([line for line in dataset.lines.lines]).tolist()


def play(dataset, rows, length, world=1, seed=None):
    """What each row reads: a list of (starts, inputs, targets) a segment."""
    spans = dataset.spans(rows * world, length, seed)
    shards = [
        SegmentBatches(dataset, spans, length, slice(rows * r, rows * r + rows))
        for r in range(world)
    ]
    assert len({len(shard) for shard in shards}) == 1
    told = [[] for _ in range(rows * world)]
    for i in range(len(shards[0])):
        for shard in shards:
            batch = shard[i]
            assert batch["target"].shape == shards[0][i]["target"].shape
            assert batch["ntokens"] == batch["target"].ne(dataset.dictionary.pad()).sum()
            for row in range(rows):
                size = int(batch["net_input"]["src_lengths"][row])
                told[int(batch["id"][row])].append(
                    (
                        bool(batch["net_input"]["starts"][row]),
                        batch["net_input"]["src_tokens"][row, :size].tolist(),
                        batch["target"][row, :size].tolist(),
                    )
                )
    return told


@pytest.mark.parametrize("layout", ["corpus", "documents"])
@pytest.mark.parametrize("rows,world", [(1, 1), (4, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("length", [1, 7, 64, 500])
def test_every_token_is_a_target_exactly_once(layout, rows, world, length):
    dataset = make_dataset([5, 1, 40, 63, 2, 100, 17], layout)
    told = play(dataset, rows, length, world, seed=3)
    targets = [t for row in told for _, _, target in row for t in target]
    assert sorted(targets) == sorted(flat(dataset))


def test_corpus_rows_are_even_pieces_in_order():
    dataset = make_dataset([50, 53], "corpus")
    told = play(dataset, 4, 10)
    rows = [[t for _, _, target in row for t in target] for row in told]
    assert sum(rows, []) == flat(dataset)
    assert {len(row) for row in rows} <= {25, 26}


@pytest.mark.parametrize("layout", ["corpus", "documents"])
def test_a_token_is_predicted_from_the_one_before_and_the_first_from_eos(layout):
    dataset = make_dataset([30, 11, 8], layout)
    eos, text = dataset.dictionary.eos(), flat(dataset)
    before = dict(zip(text[1:], text, strict=False))
    for row in play(dataset, 2, 4):
        for starts, inputs, targets in row:
            for i, (a, b) in enumerate(zip(inputs, targets, strict=True)):
                if b == eos:
                    continue  # occurs more than once
                fresh = i == 0 and starts and layout == "documents"
                assert a == (eos if fresh or b == text[0] else before[b])


def test_corpus_rows_start_once_and_documents_each_time():
    dataset = make_dataset([30, 11, 8], "corpus")
    for row in play(dataset, 2, 5):
        assert [starts for starts, _, _ in row] == [True] + [False] * (len(row) - 1)
    dataset = make_dataset([30, 11, 8, 3], "documents")
    ends = set(np.cumsum([30, 11, 8, 3]).tolist())
    text = flat(dataset)
    for row in play(dataset, 2, 5):
        position = None
        for starts, _, targets in row:
            if not targets:
                continue
            begin = text.index(targets[0]) if targets[0] != dataset.dictionary.eos() else position
            assert starts == (begin in {0, *ends})
            position = begin + len(targets)


def test_documents_are_balanced_by_length():
    dataset = make_dataset([90, 30, 30, 30, 5, 5], "documents")
    told = play(dataset, 2, 10)
    loads = [sum(len(target) for _, _, target in row) for row in told]
    assert sorted(loads) == [95, 95]


def test_documents_are_shuffled_by_seed_and_stay_whole():
    dataset = make_dataset([9] * 20, "documents")
    a, b, c = (play(dataset, 2, 4, seed=s) for s in (1, 1, 2))
    assert a == b != c
    assert play(dataset, 1, 4)[0][0][2] == flat(dataset)[:4]


def test_documents_end_with_a_separator_of_ones_own():
    dataset = make_dataset([10, 10, 10], "documents", separator=4 + 4)
    assert dataset.documents.tolist() == [0, 5, 30]
    # at the end of a line, the line's own eos goes with the document that it ends
    dataset = make_dataset([10, 10, 10], "documents", separator=4 + 8)
    assert dataset.documents.tolist() == [0, 10, 30]


def test_two_processes_read_the_rows_that_one_reads():
    dataset = make_dataset([40, 63, 2, 100, 17], "documents")
    assert play(dataset, 4, 8, world=1) == play(dataset, 2, 8, world=2)


def test_more_rows_than_tokens_is_refused():
    with pytest.raises(ValueError, match="--batch-size on all processes wants 12 streams"):
        make_dataset([5, 6], "corpus").spans(12, 4)


def test_words_outside_the_dictionary_are_refused():
    dataset = make_dataset([5, 6], "corpus")
    dataset.lines.lines[1][0] = 2000
    with pytest.raises(ValueError, match="train has words that are not among the 1004"):
        SegmentBatches(dataset, dataset.spans(1, 20), 20, slice(0, 1))[0]


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="split train holds no tokens"):
        make_dataset([], "corpus")


@pytest.mark.parametrize("layout", ["corpus", "documents"])
def test_windows_overlap_by_their_context_and_stay_in_their_document(layout):
    """Every token is scored once; before it are `context` tokens, or all of its stream."""
    dataset = make_dataset([5, 1, 40, 63], layout, separator=20 if layout == "documents" else None)
    length, context = 4, 6
    spans = dataset.spans(2, length)
    batches = SegmentBatches(dataset, spans, length, slice(0, 2), context)
    text, eos = flat(dataset), dataset.dictionary.eos()
    begins = [span[0] for row in spans for span in row]
    scored = []
    for i in range(len(batches)):
        batch = batches[i]
        assert all(batch["net_input"]["starts"])
        for row, skipped in enumerate(batch["start_indices"]):
            size = int(batch["net_input"]["src_lengths"][row])
            inputs = batch["net_input"]["src_tokens"][row, :size].tolist()
            target = batch["target"][row, :size].tolist()
            if not size:
                continue
            assert skipped <= context and inputs[1:] == target[:-1]
            first = next(
                at for at in range(len(text)) if text[at : at + size] == target and size - skipped
            )
            assert skipped == context or first in begins
            fresh = first == 0 or (layout == "documents" and first in begins)
            assert inputs[0] == (eos if fresh else text[first - 1])
            scored += range(first + skipped, first + size)
    assert sorted(scored) == list(range(len(text)))
