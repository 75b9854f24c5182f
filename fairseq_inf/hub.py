"""Read once, ask later: a trained model, and the memories that it makes of texts."""

import copy
import functools
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from fairseq import hub_utils
from fairseq.data import encoders
from fairseq.registry import REGISTRIES
from fairseq.tasks import import_tasks
from omegaconf import open_dict
from torch import Tensor, nn
from tqdm import tqdm

from fairseq_inf import tasks
from fairseq_inf.data import LineEncoding, check_words, without_pad
from fairseq_inf.data.turns import Piece, Turns, load_turns
from fairseq_inf.files import open_text, read_text
from fairseq_inf.memory import load_state, not_finite, save_state
from fairseq_inf.models.generation import Opened, Reading, new_reading, read
from fairseq_inf.models.memory_lm import MemoryLM, check_numbers
from fairseq_inf.talk import Talk
from fairseq_inf.tasks.checkpoints import check_names, open_checkpoint

logger = logging.getLogger(__name__)

CHECKPOINTS = ("checkpoint.pt", "checkpoint_best.pt", "checkpoint_last.pt")
CHUNK = 1 << 18  # characters that are encoded at a time

import_tasks(tasks.__path__[0], tasks.__name__)  # all that the plugin has


class Memory:
    """What a model remembers of a text."""

    def __init__(self, reading: Any, fingerprint: str) -> None:
        self.reading, self.fingerprint = reading, fingerprint

    @property
    def tokens(self) -> int:
        """How many tokens it was made from."""
        return int(self.reading.memory.position + self.reading.count) - 1  # but for eos

    def save(self, path: str | Path) -> None:
        """Write it to a file, for the model that made it; never leaves half a file."""
        spoilt = not_finite(self.reading.tensors())
        if spoilt:
            raise FloatingPointError(f"{path} is not written: {spoilt} has NaN or infinity")
        save_state(self.reading, str(path), self.fingerprint)


class MemoryHub(nn.Module):
    """One model, with its memory as a value that goes in and out."""

    def __init__(self, cfg: Any, task: Any, model: MemoryLM) -> None:
        super().__init__()
        self.cfg, self.task, self.model = cfg, task, model
        self.model.eval()
        self.dictionary, self.length = task.source_dictionary, task.cfg.tokens_per_sample
        self.tokenizer = encoders.build_tokenizer(cfg.tokenizer)
        self.bpe = task.build_bpe(cfg.bpe)
        # of whole texts, with their line breaks
        self.encoding = self.bpe.encoding if isinstance(self.bpe, LineEncoding) else None
        self.fingerprint = f"{model.fingerprint()} {self.length}"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def read(
        self, text: str | Path | IO[str], memory: Memory | None = None, progress: bool = False
    ) -> Memory:
        """text: a string, or a pathlib.Path or open file to read in parts.  memory: to go on from.
        -> Memory"""
        reading = self.reading_of(memory)
        for piece in self.pieces(text, progress):
            reading = self._read(reading, piece)
        return Memory(reading, self.fingerprint)

    def pieces(
        self, text: str | Path | IO[str], progress: bool = False, name: str = ""
    ) -> Iterator[Tensor]:
        """The tokens of a text, no more than a segment at a time.  name: what it is called"""
        if not (isinstance(text, (str, Path)) or callable(getattr(text, "read", None))):
            raise TypeError(
                f"a text is a string, a pathlib.Path or an open file, got {_kind(text)}"
            )
        size, parts = self.parts(text)
        total = unknown = 0
        with tqdm(total=size, unit="B", unit_scale=True, disable=not progress, leave=False) as bar:
            for part, bytes_read in parts:
                tokens, before = self.tokens_of(part), bar.n
                for piece in tokens.split(self.length) if len(tokens) else ():
                    yield piece
                    bar.update(int(bytes_read * len(piece) / len(tokens)))
                bar.update(before + bytes_read - bar.n)
                total, unknown = total + len(tokens), unknown + self.unknown(tokens)
        name = name or ("the text" if isinstance(text, str) else _name(text))
        self.check(total, unknown, name)

    def read_tokens(self, tokens: Tensor, memory: Memory | None = None) -> Memory:
        """The same for a text's tokens: n.  -> Memory"""
        return Memory(self._read(self.reading_of(memory), tokens), self.fingerprint)

    def read_document(self, document: str | Path, progress: bool = False) -> Memory:
        """The same behind the words with which this model is given a text to talk about."""
        tokens = self.tokens_of_document(document)
        memory = Memory(self._new_reading(), self.fingerprint)
        bar = tqdm(
            total=len(tokens), desc="reading", unit=" tokens", disable=not progress, leave=False
        )
        with bar:
            for piece in tokens.split(self.length):
                memory = self.read_tokens(piece, memory)
                bar.update(len(piece))
        return memory

    def tokens_of_document(self, document: str | Path) -> Tensor:
        """What `read_document` reads."""
        text = read_text(document) if isinstance(document, Path) else _string(document)
        name = str(document) if isinstance(document, Path) else "the text"
        if not text.strip():
            raise ValueError(f"{name} is empty: there must be something to talk about")
        tokens = self.tokens_of_pieces(*self.turns.opening, text.strip())
        self.check(len(tokens), self.unknown(tokens), name)
        return tokens

    def chat(self, memory: Memory) -> Talk:
        """A talk about what was read.  `for part in hub.chat(memory).ask("Who is she?")` gives an
        answer as it comes; memory: of `read_document`, or any other"""
        return Talk(self, memory)

    @functools.cached_property
    def turns(self) -> Turns:
        """How a talk with this model is written."""
        return load_turns(self.task.cfg.data, self.encoding, self.dictionary)

    def load_memory(self, path: str | Path) -> Memory:
        """-> Memory, from a file that `save` wrote with this very model"""
        state = load_state(str(path), self._new_reading(), self.fingerprint)
        words = torch.cat([state.tokens[0], *state.memory.last])
        if state.num_rows != 1 or int(words.max()) >= len(self.dictionary):
            raise ValueError(
                f"memory file {path} cannot be a memory: it must be of one text, and of words in "
                "the dictionary"
            )
        return Memory(state.to(self.device), self.fingerprint)

    def score(self, text: str, memory: Memory | None = None) -> dict[str, Tensor]:
        """-> {"tokens", "positional_scores": natural logarithm of each one's probability after
        the memory and those before it, "score": their mean}"""
        tokens = self.tokens_of(_string(text))
        self.check(len(tokens), self.unknown(tokens), "the text")
        _, scores = self._read(self.reading_of(memory), tokens, score=True)
        check_numbers(scores)
        return {"tokens": tokens, "positional_scores": scores[0], "score": scores[0].mean()}

    def generate(
        self,
        prompt: str | Sequence[str],
        memory: Memory | None = None,
        max_tokens: int = 100,
        beam: int = 1,
        **settings: Any,
    ) -> str | list[str]:
        """The model's continuation of a prompt (or of each of a list), after the memory.  The
        prompt may be empty if there is a memory.

        settings: those of fairseq's generator, as sampling=True, sampling_topp=0.9,
        temperature=0.8, min_len=10, lenpen=1.0.
        """
        if not isinstance(prompt, (str, list, tuple)):
            raise TypeError(f"a prompt is a string or a list of them, got {_kind(prompt)}")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise ValueError("the list of prompts is empty")
        texts = [self.tokens_of(_string(p)) for p in prompts]
        for number, text in enumerate(texts):
            if len(text) or memory is None:
                self.check(len(text), self.unknown(text), f"prompt {number}")
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        tokens = torch.full((len(texts), int(lengths.max())), self.dictionary.pad())
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        net_input = {"src_tokens": tokens.to(self.device), "src_lengths": lengths}
        if memory is not None:
            net_input["memory"] = self.reading_of(memory)
        out = [self.text_of(x) for x in self._continue(net_input, max_tokens, beam, settings)]
        return out[0] if isinstance(prompt, str) else out

    def go_on(
        self,
        start: Reading | Opened,
        max_tokens: int = 100,
        beam: int = 1,
        without: Sequence[str] = (),
        **settings: Any,
    ) -> list[Tensor]:
        """The same for readings, B of them; an opened one is used up.  without: words that are not
        to come.  -> the tokens of each continuation"""
        none = torch.zeros(start.num_rows, 0, dtype=torch.long, device=self.device)
        lengths = torch.zeros(start.num_rows, dtype=torch.long, device=self.device)
        net_input = {"src_tokens": none, "src_lengths": lengths, "memory": start}
        return self._continue(net_input, max_tokens, beam, settings, without)

    def _continue(
        self,
        net_input: dict[str, Any],
        max_tokens: int,
        beam: int,
        settings: dict[str, Any],
        without: Sequence[str] = (),
    ) -> list[Tensor]:
        args = copy.deepcopy(self.cfg.generation)
        with open_dict(args):
            args.beam, args.max_len_b = beam, max_tokens
            for name, value in settings.items():
                if name not in args:
                    raise ValueError(f"{name} is not a setting of fairseq's generator")
                setattr(args, name, value)
        generator = self.task.build_generator(
            [self.model], args, extra_gen_cls_kwargs={"tokens_to_suppress": tuple(without)}
        )
        hypotheses = self.task.inference_step(generator, [self.model], {"net_input": net_input})
        return [best["tokens"] for best, *_ in hypotheses]

    def tokens_of(self, text: str) -> Tensor:
        """The numbers of a text's tokens, encoded as the data was.  A line break is part of the
        encoding if the data came from whole documents, and eos otherwise."""
        if self.encoding is not None:
            words = [word for part in self.encoding.encode(text) for word in part]
            tokens = torch.tensor([self.dictionary.index(word) for word in words], dtype=torch.long)
            return without_pad(tokens, self.dictionary)
        lines = text.split("\n")
        encoded = [
            self.dictionary.encode_line(
                self._split(line), add_if_not_exist=False, append_eos=i + 1 < len(lines)
            ).long()
            for i, line in enumerate(lines)
        ]
        return without_pad(torch.cat(encoded), self.dictionary)

    def tokens_of_pieces(self, *pieces: Piece) -> Tensor:
        """Of texts, none of which is a special token, and of the numbers of tokens between them."""
        found: list[Tensor] = []
        special = torch.tensor(sorted(self.turns.special))
        for is_text, run in itertools.groupby(pieces, lambda piece: isinstance(piece, str)):
            if is_text:
                tokens = self.tokens_of("".join(map(str, run)))
                found.append(tokens.masked_fill(torch.isin(tokens, special), self.dictionary.unk()))
            else:
                found.append(torch.tensor(list(run)))
        return torch.cat(found).long()

    def _split(self, line: str) -> str:
        for step in (self.tokenizer, self.bpe):
            line = line if step is None else step.encode(line)
        return line

    def text_of(self, tokens: Tensor) -> str:
        if self.encoding is not None:
            special = {self.dictionary.eos(), self.dictionary.pad(), self.dictionary.bos()}
            words = [self.dictionary[i] for i in tokens.tolist() if i not in special]
            return self.encoding.decode(words)
        line = self.dictionary.string(tokens)
        for step in (self.bpe, self.tokenizer):
            line = line if step is None else step.decode(line)
        return line

    def parts(self, text: str | Path | IO[str]) -> tuple[int | None, Iterator[tuple[str, int]]]:
        """-> size in bytes or None, and an iterator of (part of the text, its bytes)"""
        if isinstance(text, str):
            if "\n" not in text and os.path.isfile(text):
                logger.warning(
                    f"the text {text!r} is the name of a file, and is read as it stands: "
                    "read(pathlib.Path(…)) reads the file"
                )
            size = len(text.encode())
            return size, iter([(text, size)])
        if not isinstance(text, Path):
            return None, self._file_parts(text, _name(text))
        if not text.is_file():
            raise FileNotFoundError(f"{text} does not exist or is not a file")
        return text.stat().st_size, self._path_parts(text)

    def _path_parts(self, path: Path) -> Iterator[tuple[str, int]]:
        with open_text(path) as file:
            yield from self._file_parts(file, _name(path))

    def _file_parts(self, file: IO[str], name: str) -> Iterator[tuple[str, int]]:
        rest: list[str] = []  # what has been read since the last border
        try:
            while chunk := file.read(CHUNK):
                if not isinstance(chunk, str):
                    raise TypeError(f"{name} is open for bytes: open it as text")
                # the last character of what came before, since a border may stand behind it
                before = rest[-1][-1:] if rest else ""
                text = before + chunk
                if self.encoding is None:
                    at = text.rfind("\n", len(before))
                else:
                    at = self.encoding.border(text, len(before))
                if at > 0:
                    part = "".join(rest) + text[len(before) : at]
                    yield part, len(part.encode())
                    chunk = text[at:]
                    rest = []
                rest.append(chunk)
        except UnicodeDecodeError:
            raise ValueError(f"{name} is not UTF-8: convert it") from None
        part = "".join(rest)
        if part:
            yield part, len(part.encode())

    def unknown(self, tokens: Tensor) -> int:
        return int((tokens == self.dictionary.unk()).sum())

    def check(self, total: int, unknown: int, name: str) -> None:
        check_words(total, unknown, name, "use the data that the model was trained on")

    def _new_reading(self) -> Any:
        return new_reading(self.model.decoder, 1, self.length)

    def reading_of(self, memory: Memory | None) -> Any:
        if memory is None:
            return self._new_reading()
        if type(memory) is not Memory:
            raise TypeError(f"memory must come from read or load_memory, got {memory!r}")
        if memory.fingerprint != self.fingerprint:
            raise ValueError("this memory is another model's: read the text with this one")
        return memory.reading

    def _read(self, reading: Any, tokens: Tensor, **kwargs: Any) -> Any:
        tokens = tokens.to(self.device)[None]
        lengths = torch.tensor([tokens.size(1)], device=self.device)
        return read(self.model.decoder, reading, tokens, lengths, **kwargs)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.40}"


def _string(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a text is a string here, got {_kind(text)}")
    return text


def _name(file: Path | IO[str]) -> str:
    return str(file) if isinstance(file, Path) else getattr(file, "name", "the file")


def known_settings(state: dict[str, Any], settings: dict[str, Any]) -> set[str]:
    """The names in a checkpoint's configuration, and of the encoding that is asked for."""
    names = {"bpe", "tokenizer"}

    def collect(section: dict[str, Any]) -> None:
        for name, value in section.items():
            names.add(name)
            if isinstance(value, dict):
                collect(value)

    collect(state.get("cfg") or {})
    for group in ("bpe", "tokenizer"):
        kind = REGISTRIES[group]["dataclass_registry"].get(settings.get(group))
        names.update(kind.__dataclass_fields__ if kind else ())
    return names


def from_pretrained(
    folder: str, checkpoint: str, data: str, weights: str | None = None, **settings: Any
) -> MemoryHub:
    """folder: with the checkpoint in it.  data: the data-bin, for its dictionary and encoding, in
    that folder or anywhere else.  weights: of a pretrained host, float32 (as they are), bf16, int8
    or int4."""
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is not a folder")
    inside = os.path.join(folder, data)
    if not os.path.isdir(inside) and not os.path.isdir(data):
        raise FileNotFoundError(f"data directory {data} does not exist")
    data = os.path.abspath(inside if os.path.isdir(inside) else data)
    path = os.path.join(folder, checkpoint)
    check_names(settings, known_settings(open_checkpoint(path), settings))
    folder, checkpoint = os.path.split(os.path.abspath(path))
    found = hub_utils.from_pretrained(folder, checkpoint, data, path=path, **settings)
    (model,) = found["models"]
    if not hasattr(model, "fingerprint"):
        raise ValueError(f"checkpoint {path} is a {type(model).__name__}, which has no memory")
    model.prepare_for_inference_(found["args"])
    if weights is not None:
        model.pack(weights)
    return MemoryHub(found["args"], found["task"], model)


def find_checkpoint(path: Path) -> Path:
    """path: of a checkpoint, or of a folder with one"""
    if not path.is_dir():
        return path
    for name in CHECKPOINTS:
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(f"{path} has no checkpoint: none of {', '.join(CHECKPOINTS)}")


def open_hub(path: str, data: str | None = None, cpu: bool = False, **settings: Any) -> MemoryHub:
    """The same by the path of a checkpoint, or of a folder with one, on a GPU if there is one.
    data: the folder of the checkpoint, if it is not given.  cpu: not on a GPU"""
    folder, name = os.path.split(os.path.abspath(find_checkpoint(Path(path))))
    if data is None and not os.path.isfile(os.path.join(folder, "dict.txt")):
        raise FileNotFoundError(f"{folder} has no dict.txt: name the data-bin by --data")
    hub = from_pretrained(folder, name, data or ".", **settings)
    return hub.cuda() if torch.cuda.is_available() and not cpu else hub
