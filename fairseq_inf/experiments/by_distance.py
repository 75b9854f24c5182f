"""On which tokens is a memory ahead?  Bits a token, by the time since the token last stood.

    python -m fairseq_inf.experiments.by_distance quickstart/bin \\
        compare/transformer_xl/seed1/checkpoint_last.pt \\
        compare/infinite_former_gibbs/seed1/checkpoint_last.pt

Every document of the split is read from an empty memory, by each checkpoint in turn; those after
the first have their difference from it, too.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fairseq_inf.analysis.report import table
from fairseq_inf.errors import plain_errors
from fairseq_inf.models.generation import new_reading, read

from .recall.data import bin_edges, last_stood


def measure(checkpoint: Path, data: Path, split: str, rows: int) -> tuple[Any, Any, int]:
    """-> of each token of the split, its bits and how long ago it last stood, and L"""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(data), "stream_layout": "documents"}
    )
    task.load_dataset(split)
    dataset, length, bits, back = task.dataset(split), task.cfg.tokens_per_sample, [], []
    order = np.argsort(dataset.sizes)
    model.eval()
    for first in tqdm(range(0, len(order), rows), desc=checkpoint.parent.parent.name):
        texts = [dataset[i] for i in order[first : first + rows]]
        lengths = torch.tensor([len(text) for text in texts])
        padded = pad_sequence(texts, batch_first=True, padding_value=task.dictionary.pad())
        reading = new_reading(model.decoder, len(texts), length)
        _, scores = read(model.decoder, reading, padded, lengths, score=True)
        for text, score in zip(texts, scores, strict=True):
            bits.append(-score[: len(text)].numpy() / np.log(2))
            back.append(last_stood(text.numpy()))
    return np.concatenate(bits), np.concatenate(back), length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="data-bin that all checkpoints were trained on")
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--split", default="test")
    parser.add_argument("--batch-size", type=int, default=8, help="documents side by side")
    args = parser.parse_args()
    for path in args.checkpoints:
        if not path.is_file():
            parser.error(f"{path} does not exist")
    with plain_errors("by_distance"):
        found = [measure(path, args.data, args.split, args.batch_size) for path in args.checkpoints]
    (base, back, length), lines, below = found[0], [], 0
    bins = [("new", back == 0)]
    for edge in bin_edges(length, int(back.max()) + 1):
        bins.append((f"{below:,}–{edge:,}", (back > 0) & (back >= below) & (back < edge)))
        below = edge
    for name, inside in [*bins, ("all", np.ones_like(back, dtype=bool))]:
        if inside.any():
            cells = [f"{base[inside].mean():.3f}"]
            for other, _, _ in found[1:]:
                mean = other[inside].mean()
                cells.append(f"{mean:.3f} ({mean - base[inside].mean():+.3f})")
            lines.append([name, f"{100 * inside.mean():.1f}", *cells])
    names = [str(path.parent.relative_to(path.parent.parent.parent)) for path in args.checkpoints]
    print(table(["tokens since it last stood", "% of all", *names], lines))


if __name__ == "__main__":
    main()
