"""fairseq-inf-import: turn a pretrained model into a fairseq checkpoint, or with --back, back.

    fairseq-inf-import gpt2 imported/gpt2          # from Hugging Face's hub
    fairseq-inf-import FOLDER imported/mine --arch infinite_former_lm_gpt2
    fairseq-inf-import FILE.gguf imported/llama
    fairseq-inf-import --back checkpoints/mine/checkpoint_best.pt FOLDER --dict dict.txt

OUTPUT gets checkpoint.pt, dict.txt and the encoding, if the model has it, so that
fairseq-inf-prepare --encoding OUTPUT prepares data for it.  A checkpoint of the host alone, the
default, can be fine-tuned with any memory of any size by --finetune-from-model; one of another
--arch (with its flags, as --ltm-basis 256) can be evaluated at once, too.  Either way what the
memory adds is zero at first: the model starts as it was.
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import save_file

from fairseq_inf.commands import command_line
from fairseq_inf.data import dictionary_state
from fairseq_inf.data.turns import CHAT
from fairseq_inf.errors import Failure, plain_errors
from fairseq_inf.files import whole_file, whole_folder
from fairseq_inf.memory import not_finite
from fairseq_inf.models.memory_lm import host_of
from fairseq_inf.models.settings import flag
from fairseq_inf.models.upgrade import upgrade
from fairseq_inf.pretrained import LAYOUTS
from fairseq_inf.pretrained.checkpoint import architecture, build, lengths, save_checkpoint
from fairseq_inf.pretrained.source import read_source
from fairseq_inf.pretrained.words import (
    NEW,
    load_dictionary,
    token_ids,
    token_rows,
    write_dictionary,
)
from fairseq_inf.tasks.checkpoints import open_checkpoint
from fairseq_inf.tasks.long_sequence_lm import LongSequenceLMConfig

COMMAND = "fairseq-inf-import"


def convert(args: argparse.Namespace, flags: list[str], folder: Path) -> str:
    """Write what OUTPUT is to hold into a folder.  -> what to say"""
    source = read_source(args.source)
    layout, config = source.layout, source.config
    words, end = config["vocab_size"], config["eos_token_id"]
    path = folder / "dict.txt"
    if args.dict:
        load_dictionary(args.dict)
        shutil.copyfile(args.dict, path)
    else:
        write_dictionary(path, words, end)
    dictionary = Dictionary.load(str(path))
    ids = token_ids(dictionary, words, end, args.dict or path)
    spoilt = not_finite(source.tensors)
    if spoilt:
        raise Failure(f"{source.path} has NaN or infinity in {spoilt}: fetch it again")
    weights = layout.to_ours(source.tensors, config, ids)
    arch = args.arch or f"{layout.name}_lm"
    kind = architecture(layout, arch)
    sizes = layout.settings(config)
    settings = {**sizes, **lengths(kind, layout, config), **given(kind, flags)}
    length = settings.pop("tokens_per_sample")
    model = build(kind, settings, dictionary)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError:
        raise Failure(
            f"{source.path} does not fit the flags that were given: the model's own sizes come "
            "from its config.json, leave them out"
        ) from None
    task = LongSequenceLMConfig(
        _name="long_sequence_lm", data=str(args.output), tokens_per_sample=length,
        stream_layout="documents",
    )  # fmt: skip
    with writing(args.output):
        if source.encoding:
            for name, content in source.encoding.items():
                (folder / name).write_bytes(content)
            if source.chat:
                chat = json.dumps({**source.chat, "end": end}, indent=1)
                (folder / CHAT).write_text(chat + "\n", "utf-8")
            (folder / "documents.json").write_text(json.dumps({"encoding": layout.encoding[0]}))
        save_checkpoint(folder / "checkpoint.pt", model, settings, task, dictionary)
    count = sum(x.numel() for x in model.parameters())
    new = [dictionary[i] for i in (ids == NEW).nonzero().flatten()]
    told = f"\nIt has to learn {', '.join(new)}, which are in {args.dict} only." if new else ""
    shown = " ".join(flag(x) if y is True else f"{flag(x)} {y}" for x, y in sizes.items())
    if source.chat and kind.has_memory:
        told += f"\nNext: fairseq-inf-chat --path {args.output} --document FILE"
    return (
        f"wrote {arch} with {count:,} parameters to {args.output}/checkpoint.pt and "
        f"{args.output}/dict.txt\nIts sizes, for fairseq-train: {shown}{told}"
    )


def show_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of --arch to the help."""
    asked = argparse.ArgumentParser(add_help=False)
    asked.add_argument("--arch")
    arch = asked.parse_known_args([x for x in sys.argv[1:] if x not in ("-h", "--help")])[0].arch
    model = ARCH_MODEL_REGISTRY.get(arch)
    if arch and host_of(arch):
        group = parser.add_argument_group(f"flags of {arch}")
        group.add_argument("--tokens-per-sample", type=int, help="tokens of a segment, L (512)")
        gen_parser_from_dataclass(group, model.config())


class Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(message)


def given(model: Any, flags: list[str]) -> dict[str, Any]:
    """The settings of the model, and --tokens-per-sample, that flags name."""
    parser = Flags(argument_default=argparse.SUPPRESS, add_help=False)
    parser.add_argument("--tokens-per-sample", type=int)
    gen_parser_from_dataclass(parser, model.config(), delete_default=True)
    found = vars(parser.parse_args(flags))
    if found.get("tokens_per_sample", 1) < 1:
        raise Failure(f"--tokens-per-sample must be at least 1, got {found['tokens_per_sample']}")
    return found


def convert_back(args: argparse.Namespace, folder: Path) -> str:
    """The same for a checkpoint's host, in Hugging Face's layout."""
    path = Path(args.source)
    state = open_checkpoint(args.source)
    cfg = OmegaConf.create((state.get("cfg") or {}).get("model") or {})
    upgrade(cfg)
    layout = LAYOUTS.get(str(host_of(str(cfg.get("_name")))))
    if layout is None:
        known = " or ".join(layout.title for layout in LAYOUTS.values())
        raise Failure(f"{path} is not a {known} with or without a memory")
    named = args.dict or path.parent / "dict.txt"
    dictionary = load_dictionary(named)
    own = dictionary_state(dictionary)["dictionary"]
    if state.get("task_state", {}).get("dictionary", own) != own:
        raise Failure(f"--dict {named} is of another vocabulary than {path}: name its own")
    model = state["model"]
    absent = model.get("decoder.absent", torch.zeros(len(dictionary)))
    rows, end = token_rows(dictionary, absent, layout.end, named)
    config = layout.config(cfg, len(rows), end)
    tensors = layout.to_theirs(model, config, rows)
    with writing(args.output):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        with whole_file(folder / "model.safetensors") as file:
            save_file(tensors, file, metadata={"format": "pt"})
        files = layout.encoding[1]
        if all((named.parent / ours).is_file() for ours in files.values()):
            for theirs, ours in files.items():
                shutil.copyfile(named.parent / ours, folder / theirs)
    return f"wrote the {layout.title} of {path} to {args.output}"


@contextmanager
def writing(output: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise Failure(f"{output} cannot be written: {reason}") from None


def main() -> None:
    parser = command_line(
        COMMAND, __doc__, epilog=f"With --arch its flags can be given, too: {COMMAND} --arch "
        "selective_memory_lm_llama --help shows them; the sizes of the host are the model's own.",
    )  # fmt: skip
    parser.add_argument(
        "source", metavar="SOURCE", help="folder, hub name or .gguf file; with --back, a checkpoint"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to make")
    parser.add_argument("--arch", help="architecture of the checkpoint (that of the host alone)")
    parser.add_argument("--dict", type=Path, help="dictionary of data that is binarized already")
    parser.add_argument("--back", action="store_true", help="from a checkpoint to Hugging Face's")
    if {"-h", "--help"} & {*sys.argv}:
        show_flags(parser)
    args, flags = parser.parse_known_args()
    if args.back and (flags or args.arch):
        parser.error(f"{flags[0] if flags else '--arch'} is not for --back")
    logging.disable(logging.WARNING)
    try:
        with plain_errors(COMMAND), whole_folder(args.output) as folder:
            said = convert_back(args, folder) if args.back else convert(args, flags, folder)
    finally:
        logging.disable(logging.NOTSET)
    print(said)


if __name__ == "__main__":
    main()
