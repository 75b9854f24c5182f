"""What the tests of the tasks on lines share, those of recall and of sorting."""

import re

import torch
from conftest import MODEL
from fairseq import options, tasks
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_inf.data import StreamDataset

L = 8
TRAIN = (
    f"--criterion cross_entropy_with_kl --report-accuracy --tokens-per-sample {L} --dropout 0 "
    "--optimizer adam --lr 0.01 --log-format json --log-interval 5"
).split()
TINY = """optimization.max_update=2 task.tokens_per_sample=8 model.decoder_embed_dim=16
    model.decoder_ffn_embed_dim=16 model.stm_length=8""".split()


def lines_of(folder, split):
    """The lines of a split, in words."""
    dataset = streams(folder, split)
    assert all(int(line[-1]) == dataset.dictionary.eos() for line in dataset.lines)
    return [[dataset.dictionary[int(i)] for i in line[:-1]] for line in dataset.lines]


def streams(folder, split="valid"):
    words = Dictionary.load(str(folder / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(folder / split), words, "mmap")
    dataset = StreamDataset(lines, words, "documents", words.eos(), split)
    dataset.lines = lines
    return dataset


def build(name, data, *args, model=MODEL):
    """-> task, model and criterion as fairseq-train builds them"""
    argv = [str(data), "--task", name, "--cpu", "--num-workers", "0", *model, *TRAIN, *args]
    parsed = options.parse_args_and_arch(options.get_training_parser(), argv)
    cfg = convert_namespace_to_omegaconf(parsed)
    task = tasks.setup_task(cfg.task)
    torch.manual_seed(1)
    model = task.build_model(cfg.model)
    return task, model, task.build_criterion(cfg.criterion)


@torch.no_grad()
def likeliest(model, words, line):
    """A line, segment by segment from an empty memory.  -> the likeliest word at each place"""
    inputs = torch.tensor([[words.eos(), *map(words.index, line)]])
    state, found = model.decoder.initial_state(1), []
    for part in inputs.split(L, dim=1):
        x, state, _ = model.decoder(part, state)
        found += x[0].argmax(dim=-1).tolist()
    return [words[i] for i in found]


def last(printed, name):
    return float(re.findall(rf'"(?:valid_|test_)?{name}": "([-\d.e]+)"', printed)[-1])
