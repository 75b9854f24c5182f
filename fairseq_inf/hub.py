"""Read once, ask later: a trained model, and the memories that it makes of texts."""

import copy
import os
from pathlib import Path

import torch
from fairseq import hub_utils
from omegaconf import open_dict
from tqdm import tqdm

from fairseq_inf.data import check_words, load_encoding
from fairseq_inf.memory import load_state, save_state
from fairseq_inf.models.generation import new_reading, read
from fairseq_inf.tasks import long_sequence_lm  # noqa: F401  (registers it)
from fairseq_inf.tasks.recovery import is_whole

CHUNK = 1 << 18  # characters that are encoded at a time


class Memory:
    """What a model remembers of a text."""

    def __init__(self, reading, fingerprint):
        self.reading, self.fingerprint = reading, fingerprint

    @property
    def tokens(self):
        """How many tokens it was made from."""
        return int(self.reading.memory.position + self.reading.count) - 1  # but for eos

    def save(self, path):
        """Write it to a file, for the model that made it; never leaves half a file."""
        save_state(self.reading, str(path), self.fingerprint)


class MemoryHub(hub_utils.GeneratorHubInterface):
    """fairseq's hub interface of one model, with its memory as a value that goes in and out."""

    def __init__(self, cfg, task, models):
        super().__init__(cfg, task, models)
        if len(models) != 1:
            raise ValueError(f"a memory belongs to one model, got {len(models)} checkpoints")
        self.model = models[0]
        self.model.eval()
        self.length = task.cfg.tokens_per_sample
        self.encoding = load_encoding(task.cfg.data.split(os.pathsep)[0])
        self.fingerprint = self.model.fingerprint()

    def read(self, text, memory=None, progress=False):
        """text: a string, or a pathlib.Path or open file to read in parts.  memory: to go on from.
        -> Memory"""
        reading = self._reading(memory)
        size, parts = _parts(text)
        total = unknown = 0
        with tqdm(total=size, unit="B", unit_scale=True, disable=not progress, leave=False) as bar:
            for part, bytes_read in parts:
                tokens = self.tokens_of(part)
                total += len(tokens)
                unknown += int((tokens == self.src_dict.unk()).sum())
                before = bar.n
                each = bytes_read / max(len(tokens), 1)
                reading = self._read(reading, tokens, report=lambda n, e=each: bar.update(n * e))
                bar.update(before + bytes_read - bar.n)
        self._check(total, unknown, "the text" if isinstance(text, str) else _name(text))
        return Memory(reading, self.fingerprint)

    def load_memory(self, path):
        """-> Memory, from a file that `save` wrote with this very model"""
        state = load_state(str(path), self._new_reading(), self.fingerprint)
        return Memory(state.to(self.device), self.fingerprint)

    def score(self, text, memory=None):
        """-> {"tokens", "positional_scores": natural logarithm of each one's probability after
        the memory and those before it, "score": their mean}"""
        tokens = self.tokens_of(text)
        self._check(len(tokens), int((tokens == self.src_dict.unk()).sum()), "the text")
        _, scores = self._read(self._reading(memory), tokens, score=True)
        return {"tokens": tokens, "positional_scores": scores[0], "score": scores[0].mean()}

    def generate(self, prompt, memory=None, max_tokens=100, beam=1, **settings):
        """The model's continuation of a prompt (or of each of a list), after the memory.  The
        prompt may be empty if there is a memory.

        settings: those of fairseq's generator, as sampling=True, sampling_topp=0.9,
        temperature=0.8, min_len=10, lenpen=1.0.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts = [self.tokens_of(p) for p in prompts]
        for number, text in enumerate(texts):
            if len(text) or memory is None:
                unknown = int((text == self.src_dict.unk()).sum())
                self._check(len(text), unknown, f"prompt {number}")
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        tokens = torch.full((len(texts), int(lengths.max())), self.src_dict.pad())
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        net_input = {"src_tokens": tokens.to(self.device), "src_lengths": lengths}
        if memory is not None:
            net_input["memory"] = self._reading(memory)
        args = copy.deepcopy(self.cfg.generation)
        with open_dict(args):
            args.beam, args.max_len_b = beam, max_tokens
            for name, value in settings.items():
                if name not in args:
                    raise ValueError(f"{name} is not a setting of fairseq's generator")
                setattr(args, name, value)
        generator = self.task.build_generator([self.model], args)
        hypotheses = self.task.inference_step(generator, [self.model], {"net_input": net_input})
        out = [self.text_of(best["tokens"]) for best, *_ in hypotheses]
        return out[0] if isinstance(prompt, str) else out

    def tokens_of(self, text):
        """The numbers of a text's tokens, encoded as the data was.  A line break is part of the
        encoding if the data came from whole documents, and eos otherwise."""
        if self.encoding is not None:
            words = [word for part in self.encoding.encode(text) for word in part]
            return torch.tensor([self.src_dict.index(word) for word in words], dtype=torch.long)
        lines = text.split("\n")
        encoded = [
            self.src_dict.encode_line(
                self.apply_bpe(self.tokenize(line)),
                add_if_not_exist=False,
                append_eos=i + 1 < len(lines),
            ).long()
            for i, line in enumerate(lines)
        ]
        return torch.cat(encoded)

    def text_of(self, tokens):
        if self.encoding is not None:
            special = {self.src_dict.eos(), self.src_dict.pad(), self.src_dict.bos()}
            words = [self.src_dict[i] for i in tokens.tolist() if i not in special]
            return self.encoding.decode(words)
        return self.decode(tokens)

    def _check(self, total, unknown, name):
        check_words(total, unknown, name, "use the data that the model was trained on")

    def _new_reading(self):
        return new_reading(self.model.decoder, 1, self.length)

    def _reading(self, memory):
        if memory is None:
            return self._new_reading()
        if memory.fingerprint != self.fingerprint:
            raise ValueError("this memory is another model's: read the text with this one")
        return memory.reading

    def _read(self, reading, tokens, **kwargs):
        tokens = tokens.to(self.device)[None]
        lengths = torch.tensor([tokens.size(1)], device=self.device)
        return read(self.model.decoder, reading, tokens, lengths, **kwargs)


def _name(file):
    return str(file) if isinstance(file, Path) else getattr(file, "name", "the file")


def _parts(text):
    """-> size in bytes or None, and an iterator of (part of the text, its bytes).  A file is cut
    before line breaks that follow a letter or sign, over which no token reaches."""
    if isinstance(text, str):
        size = len(text.encode())
        return size, iter([(text, size)])
    if isinstance(text, Path):
        if not text.is_file():
            raise FileNotFoundError(f"{text} does not exist or is not a file")
        return text.stat().st_size, _file_parts(text.open(encoding="utf-8", newline=""), text)
    return None, _file_parts(text, _name(text))


def _file_parts(file, name):
    rest = ""
    try:
        while chunk := file.read(CHUNK):
            rest += chunk
            at = rest.rfind("\n")
            while at > 0 and rest[at - 1].isspace():
                at = rest.rfind("\n", 0, at)
            if at > 0:
                yield rest[:at], len(rest[:at].encode())
                rest = rest[at:]
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8: convert it") from None
    if rest:
        yield rest, len(rest.encode())


def from_pretrained(folder, checkpoint, data, **settings):
    """folder: with the checkpoint in it.  data: the data-bin, for its dictionary and encoding; it
    may be in the folder, too."""
    for path in (folder, data):
        if path is data and not os.path.isdir(path):
            path = os.path.join(folder, data)
        if not os.path.isdir(path):
            raise FileNotFoundError(f"{path} is not a folder")
    data = data if os.path.isdir(data) else os.path.join(folder, data)
    path = os.path.join(folder, checkpoint)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    if not is_whole(path):
        raise ValueError(f"checkpoint {path} is truncated: name a whole one")
    found = hub_utils.from_pretrained(
        os.path.abspath(folder), checkpoint, os.path.abspath(data), **settings
    )
    return MemoryHub(found["args"], found["task"], found["models"])
