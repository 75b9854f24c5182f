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
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fairseq.data import Dictionary
from safetensors import SafetensorError
from safetensors.torch import save_file

from fairseq_inf.data.encoding import Failure
from fairseq_inf.pretrained import LAYOUTS
from fairseq_inf.pretrained.checkpoint import build, save_checkpoint
from fairseq_inf.pretrained.source import read_source
from fairseq_inf.pretrained.words import (
    NEW,
    load_dictionary,
    token_ids,
    token_rows,
    write_dictionary,
)
from fairseq_inf.tasks.long_sequence_lm import dictionary_state


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
    ids = token_ids(Dictionary.load(str(path)), words, end, args.dict or path)
    state = layout.to_ours(source.tensors, config, ids)
    arch = args.arch or f"{layout.name}_lm"
    cfg, task, model = build(layout, arch, config, flags, folder)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError:
        raise Failure(
            f"{source.path} does not fit the flags that were given: the model's own sizes come "
            "from its config.json, leave them out"
        ) from None
    if source.encoding:
        for name, content in source.encoding.items():
            (folder / name).write_bytes(content)
        (folder / "documents.json").write_text(json.dumps({"encoding": layout.encoding[0]}))
    save_checkpoint(folder / "checkpoint.pt", cfg, task, model, args.output)
    count = sum(x.numel() for x in model.parameters())
    new = [task.source_dictionary[i] for i in (ids == NEW).nonzero().flatten()]
    told = f"\nIt has to learn {', '.join(new)}, which are in {args.dict} only." if new else ""
    sizes = " ".join(layout.flags(config))
    return (
        f"wrote {arch} with {count:,} parameters to {args.output}/checkpoint.pt and "
        f"{args.output}/dict.txt\nIts sizes, for fairseq-train: {sizes}{told}"
    )


def convert_back(args: argparse.Namespace, folder: Path) -> str:
    """The same for a checkpoint's host, in Hugging Face's layout."""
    path = Path(args.source)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        cfg, model, task = state["cfg"]["model"], state["model"], state.get("task_state", {})
    except FileNotFoundError:
        raise Failure(f"{path} does not exist") from None
    except (pickle.UnpicklingError, RuntimeError, OSError, KeyError, TypeError, EOFError):
        raise Failure(f"{path} is not a whole checkpoint of fairseq's") from None
    layout = LAYOUTS.get(str(cfg.get("decoder_host")))
    if layout is None:
        known = " or ".join(layout.title for layout in LAYOUTS.values())
        raise Failure(f"{path} is not a {known} with or without a memory")
    for name, value in layout.settings.items():
        if cfg[name] != value:
            raise Failure(f"{path} has another {name} than {layout.title}: {cfg[name]}")
    named = args.dict or path.parent / "dict.txt"
    dictionary = load_dictionary(named)
    own = dictionary_state(dictionary)["dictionary"]
    if task.get("dictionary", own) != own:
        raise Failure(f"--dict {named} is of another vocabulary than {path}: name its own")
    absent = model.get("decoder.absent", torch.zeros(len(dictionary)))
    rows, end = token_rows(dictionary, absent, layout.end, named)
    config = layout.config(cfg, len(rows), end)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = layout.to_theirs(model, config, rows)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files = layout.encoding[1]
    if all((named.parent / ours).is_file() for ours in files.values()):
        for theirs, ours in files.items():
            shutil.copyfile(named.parent / ours, folder / theirs)
    return f"wrote the {layout.title} of {path} to {args.output}"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes `path` if all goes well, and leaves nothing if not."""
    if path.exists():
        raise Failure(f"{path} exists already: remove it, or name another output")
    above = path.absolute().parent
    above.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=above))
    try:
        yield scratch
        scratch.chmod(0o755)
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    head = __doc__.splitlines()[0].split(": ")
    parser = argparse.ArgumentParser(prog=head[0], description=head[1])
    parser.add_argument(
        "source", metavar="SOURCE", help="folder, hub name or .gguf file; with --back, a checkpoint"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to make")
    parser.add_argument("--arch", help="architecture of the checkpoint (that of the host alone)")
    parser.add_argument("--dict", type=Path, help="dictionary of data that is binarized already")
    parser.add_argument("--back", action="store_true", help="from a checkpoint to Hugging Face's")
    args, flags = parser.parse_known_args()
    if args.back and (flags or args.arch):
        parser.error(f"{flags[0] if flags else '--arch'} is not for --back")
    logging.disable(logging.WARNING)
    try:
        with new_folder(args.output) as folder:
            said = convert_back(args, folder) if args.back else convert(args, flags, folder)
    except (Failure, ValueError) as failure:
        sys.exit(str(failure))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        sys.exit(f"{args.output} cannot be written: {reason}")
    finally:
        logging.disable(logging.NOTSET)
    print(said)


if __name__ == "__main__":
    main()
