"""fairseq-generate and fairseq-interactive: prompts are read into the memory, and gone on from."""

import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from fairseq import search, utils
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_inf.data import (
    LineEncoding,
    PromptDataset,
    check_words,
    load_encoding,
    without_end,
    without_pad,
)
from fairseq_inf.models.prompt_model import Nucleus, PromptModel

logger = logging.getLogger(__name__)

LONGEST = 1_000_000  # tokens of a generated text; fairseq's generator makes room for all at once


class PromptTask(FairseqTask):
    dictionary: Dictionary
    _prompts_seen = 0

    def build_bpe(self, args: Any) -> Any:
        """The encoding that the data-bin came with; another one that is asked for is told."""
        asked = super().build_bpe(args)
        encoding = load_encoding(utils.split_paths(self.cfg.data)[0])
        if encoding is None:
            return asked
        by_lines, first = LineEncoding(encoding), self.dictionary.nspecial
        if asked is None or by_lines.agrees(asked, self.dictionary.symbols[first : first + 2000]):
            return by_lines
        logger.warning(
            f"--bpe {args._name} does not encode as {self.cfg.data} does, which is of "
            f"{type(encoding).__name__}: leave it out to have that one"
        )
        return asked

    def get_interactive_tokens_and_lengths(self, lines: Sequence[str], encode_fn: Any) -> Any:
        kept = [line if _is_text(line) else "" for line in lines]
        for number, (line, text) in enumerate(zip(lines, kept, strict=True), self._prompts_seen):
            if line != text:
                logger.warning(f"prompt {number} is not UTF-8: convert it")
        return super().get_interactive_tokens_and_lengths(kept, encode_fn)

    def build_dataset_for_inference(
        self, src_tokens: Sequence[Tensor], src_lengths: Any, **kwargs: Any
    ) -> PromptDataset:
        """A prompt that cannot be read is told, and left out: the others have their answers."""
        eos, prompts = self.dictionary.eos(), {}
        for number, text in enumerate(src_tokens):
            text = without_pad(without_end(text, {eos}), self.dictionary)
            try:
                self.check_prompt(text, f"prompt {self._prompts_seen + number}")
                prompts[number] = text
            except ValueError as error:
                logger.warning(error)
        self._prompts_seen += len(src_tokens)
        return PromptDataset([*prompts.values()], self.dictionary.pad(), [*prompts])

    def check_prompt(self, text: Tensor, name: str) -> None:
        count = int((text == self.dictionary.unk()).sum())
        check_words(len(text), count, name, "is --bpe that of the data?")

    def build_generator(self, models: Sequence[Any], args: Any, *other: Any, **kwargs: Any) -> Any:
        """fairseq's own generator; a prompt is read as it reads a source sentence."""
        for name, instead in {
            "score_reference": "use fairseq-eval-lm",
            "prefix_size": "write the words at the end of the prompt",
            "max_len_a": "a continuation has up to --max-len-b tokens, whatever its prompt",
            "match_source_len": "a continuation has up to --max-len-b tokens",
            "constraints": "they are for translations",
            "print_alignment": "it is for translations",
        }.items():
            if getattr(args, name, None):
                raise ValueError(f"--{name.replace('_', '-')} is not for prompts: {instead}")
        if args.beam < 1:
            raise ValueError(f"--beam must be at least 1, got {args.beam}")
        if not max(args.min_len, 1) <= args.max_len_b <= LONGEST:
            raise ValueError(
                f"--max-len-b, the tokens to generate, must be from {max(args.min_len, 1)} "
                f"(--min-len) to {LONGEST:,}, got {args.max_len_b}"
            )
        _check_sampling(args)
        length = self.cfg.tokens_per_sample
        models = [PromptModel(model, length) for model in models]
        generator = super().build_generator(models, args, *other, **kwargs)
        drawn = generator.search
        if type(drawn) is search.Sampling and drawn.sampling_topp > 0:
            generator.search = Nucleus(
                self.target_dictionary, drawn.sampling_topk, drawn.sampling_topp
            )
        return generator


def _check_sampling(args: Any) -> None:
    """What fairseq's generator would do something else with.  -1 is its word for not given."""
    topp, topk, heat = args.sampling_topp, args.sampling_topk, args.temperature
    if topp != -1 and not 0 < topp <= 1:
        raise ValueError(f"--sampling-topp must be above 0 and at most 1, got {topp}")
    if topk != -1 and topk < 1:
        raise ValueError(f"--sampling-topk must be at least 1, got {topk}")
    if not 0 < heat < math.inf:
        raise ValueError(f"--temperature must be a positive number, got {heat}")
    if (topp > 0 or topk > 0) and not args.sampling:
        raise ValueError("--sampling-topp and --sampling-topk are of --sampling: give that, too")


def check_input(path: str) -> None:
    """Of fairseq-interactive, which would end where a line is not UTF-8."""
    if path == "-" and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if not os.path.isfile(path):  # what can be read but once
        return
    try:
        with open(path, encoding="utf-8") as file:
            for _ in file:
                pass
    except UnicodeDecodeError:
        raise ValueError(f"--input {path} is not UTF-8: convert it") from None


def _is_text(line: str) -> bool:
    """Bytes that are not UTF-8 come from the standard input as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in line)
