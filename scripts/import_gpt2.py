"""Turn a pretrained GPT-2 into a fairseq checkpoint, and a checkpoint's host back into a GPT-2.

    python scripts/import_gpt2.py gpt2 imported/gpt2          # from Hugging Face's hub
    python scripts/import_gpt2.py FOLDER imported/mine --arch infinite_former_lm_gpt2
    python scripts/import_gpt2.py --back checkpoints/mine/checkpoint_best.pt FOLDER --dict dict.txt

OUTPUT gets checkpoint.pt and dict.txt, and GPT-2's byte pair encoding (encoder.json, vocab.bpe) if
the model has it, so that it serves as GPT2_BPE of the data preparation.  A checkpoint of gpt2_lm,
the default, can be fine-tuned with any memory of any size by --finetune-from-model; one of another
--arch (with its flags, as --ltm-basis 256) can be evaluated at once, too.  Either way what the
memory adds is zero at first: the model starts as GPT-2.
"""

import argparse
import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf, open_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import fairseq_inf.models
import fairseq_inf.tasks.long_sequence_lm
from fairseq_inf.data.encoding import Failure

PLUGIN = Path(fairseq_inf.models.__file__).parent.parent
# Hugging Face's name, ours, and whether a matrix is transposed (they multiply from the right)
LAYER = (
    ("ln_1.weight", "attention_norm.weight", False),
    ("ln_1.bias", "attention_norm.bias", False),
    ("attn.c_proj.weight", "attention.output.weight", True),
    ("attn.c_proj.bias", "attention.output.bias", False),
    ("ln_2.weight", "ffn_norm.weight", False),
    ("ln_2.bias", "ffn_norm.bias", False),
    ("mlp.c_fc.weight", "inner.weight", True),
    ("mlp.c_fc.bias", "inner.bias", False),
    ("mlp.c_proj.weight", "outer.weight", True),
    ("mlp.c_proj.bias", "outer.bias", False),
)
WHOLE = (
    ("wpe.weight", "embed_positions.weight", False),
    ("ln_f.weight", "norm.weight", False),
    ("ln_f.bias", "norm.bias", False),
)
FIXED = {  # of config.json: what another value would change in the model
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
DEFAULTS = {  # what older files leave out; None: must be there
    **dict.fromkeys(("n_layer", "n_embd", "n_head", "vocab_size", "n_inner")),
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "eos_token_id": 50256,
}
ENCODING = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}  # the same files, renamed
GPT2_WORDS = 50257


def names(layers):
    """Triples as in LAYER for the whole model."""
    yield from WHOLE
    for i in range(layers):
        for theirs, ours, transposed in LAYER:
            yield f"h.{i}.{theirs}", f"layers.{i}.{ours}", transposed


def find_folder(model):
    """A folder with the model: itself, or what is downloaded from the hub."""
    if os.path.isdir(model):
        return Path(model)
    if os.path.exists(model) or str(model).startswith((".", "/", "~")):
        raise Failure(f"{model} is not a folder with config.json and model.safetensors")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise Failure(
            f"{model} is not a folder; to download it from the hub, pip install transformers"
        ) from None
    wanted = ["config.json", "*.safetensors", *ENCODING]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except Exception as error:  # a dozen kinds, of three libraries
        reason = str(error).strip().splitlines()[0]
        raise Failure(f"{model} is neither a folder nor can it be downloaded: {reason}") from None


def read_config(folder):
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise Failure(f"{path} does not exist: is it a model of Hugging Face?") from None
    except ValueError:
        config = None
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise Failure(f"{path} is damaged: fetch it again")
    if config.get("model_type") != "gpt2":
        raise Failure(f"{path} is of a {config.get('model_type')!r}: only 'gpt2' can be imported")
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise Failure(f"{path}: {name} is {config[name]!r}, only {value!r} can be imported")
    config = {**DEFAULTS, **config}
    if config["n_inner"] is None and isinstance(config["n_embd"], int):
        config["n_inner"] = 4 * config["n_embd"]
    for name in ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions", "n_inner"):
        if not isinstance(config[name], int) or config[name] < 1:
            raise Failure(f"{path}: {name} must be a positive number, got {config[name]!r}")
    for name in ("resid_pdrop", "attn_pdrop"):
        if not isinstance(config[name], (int, float)) or not 0 <= config[name] < 1:
            raise Failure(f"{path}: {name} must be at least 0 and below 1, got {config[name]!r}")
    eos_id = config["eos_token_id"]
    if not isinstance(eos_id, int) or not 0 <= eos_id < config["vocab_size"]:
        raise Failure(
            f"{path}: eos_token_id {eos_id} is not one of the {config['vocab_size']} tokens"
        )
    return config


def read_weights(folder):
    """-> tensors by Hugging Face's names, without their first word"""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.is_file():
            tensors = load_file(safe)
        elif pickled.is_file():
            tensors = torch.load(pickled, map_location="cpu", weights_only=True)
        else:
            raise Failure(f"{folder} has neither model.safetensors nor pytorch_model.bin")
    except pickle.UnpicklingError:
        if not pickled.read_bytes().startswith((b"PK", b"\x80")):
            raise Failure(f"{pickled} is damaged: fetch it again") from None
        raise Failure(
            f"{pickled} holds more than tensors, which might run code, and is not loaded: "
            "convert it to model.safetensors where you trust it"
        ) from None
    except (SafetensorError, RuntimeError, OSError, EOFError):
        name = safe if safe.is_file() else pickled
        raise Failure(f"{name} is damaged or cannot be read: fetch it again") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(x, torch.Tensor) for x in tensors.values()
    ):
        raise Failure(f"{pickled} is not a dictionary of tensors")
    return {name.removeprefix("transformer."): x for name, x in tensors.items()}


def is_token(word):
    """Whether a word of a dictionary is the number of a token."""
    return word.isascii() and word.isdecimal() and str(int(word)) == word


def token_ids(dictionary, eos_id):
    """The GPT-2 token of each word of a dictionary, -1 for words that GPT-2 does not have.
    </s> is its <|endoftext|>, which may be in the dictionary once more and is not used there."""
    ids = torch.full((len(dictionary),), -1)
    for index, word in enumerate(dictionary.symbols):
        if is_token(word) and int(word) != eos_id:
            ids[index] = int(word)
    ids[dictionary.eos()] = eos_id
    return ids


def write_dictionary(path, words, eos_id):
    path.write_text("".join(f"{i} 1\n" for i in range(words) if i != eos_id))


def load_dictionary(path):
    if not path.is_file():
        raise Failure(f"--dict {path} does not exist: name the dict.txt of the data")
    try:
        return Dictionary.load(str(path))
    except Exception:  # fairseq raises that very class
        raise Failure(f"--dict {path} is not a dictionary of fairseq's") from None


def host_state(tensors, config, ids, path):
    """The parameters of the host by our names, from tensors by theirs."""
    width, found = config["n_embd"], {}

    def take(name, *shape):
        if name not in tensors:
            raise Failure(f"the model has no tensor {name}: it is not whole, or not a GPT-2")
        x = tensors[name].float()
        if x.shape != shape:
            raise Failure(f"{name} is {tuple(x.shape)}, by config.json it must be {shape}")
        return x

    words = take("wte.weight", config["vocab_size"], width)
    if "lm_head.weight" in tensors and not torch.equal(tensors["lm_head.weight"].float(), words):
        raise Failure("lm_head.weight is not wte.weight: only tied embeddings can be imported")
    missing = set(range(len(words))) - set(ids.tolist())
    if missing or int(ids.max()) >= len(words):
        example = min(missing) if missing else int(ids.max())
        raise Failure(
            f"{path} is of another vocabulary than the model's {len(words)} tokens: token "
            f"{example} is not in both; leave --dict out, and binarize the data with the "
            "dict.txt that is written"
        )
    real = ids >= 0
    embedding = torch.zeros(len(ids), width)
    embedding[real] = words[ids[real]]
    found["embed_tokens.weight"] = found["output_projection.weight"] = embedding
    found["absent"] = torch.zeros(len(ids)).masked_fill(~real, -torch.inf)
    if any(name.startswith(f"h.{config['n_layer']}.") for name in tensors):
        raise Failure(f"the model has more layers than the {config['n_layer']} of config.json")
    inner = config["n_inner"]
    shapes = {
        "wpe.weight": (config["n_positions"], width),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "mlp.c_fc.weight": (width, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, width),
    }

    def take_named(name):
        return take(name, *shapes.get(re.sub(r"^h\.\d+\.", "", name), (width,)))

    for theirs, ours, transposed in names(config["n_layer"]):
        x = take_named(theirs)
        found[ours] = x.T.contiguous() if transposed else x
    for i in range(config["n_layer"]):
        for part in ("weight", "bias"):
            x = take_named(f"h.{i}.attn.c_attn.{part}")
            x = x.T if part == "weight" else x
            name = f"layers.{i}.attention"
            found[f"{name}.query.{part}"] = x[:width].contiguous()
            found[f"{name}.key_value.{part}"] = x[width:].contiguous()
    return {f"decoder.{name}": x for name, x in found.items()}


def model_flags(config):
    return {
        "--decoder-layers": config["n_layer"],
        "--decoder-embed-dim": config["n_embd"],
        "--decoder-attention-heads": config["n_head"],
        "--decoder-ffn-embed-dim": config["n_inner"],
        "--decoder-positions": config["n_positions"],
        "--dropout": config["resid_pdrop"],
        "--attention-dropout": config["attn_pdrop"],
    }


def build(arch, flags, data):
    """-> configuration, task and model, as fairseq-train would build them"""
    settings = argparse.Namespace()
    if arch in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[arch](settings)
    if getattr(settings, "decoder_host", None) != "gpt2":
        raise Failure(f"--arch {arch} is not a GPT-2: gpt2_lm, infinite_former_lm_gpt2, …")
    words = [data, "--user-dir", str(PLUGIN), "--task", "long_sequence_lm", "--arch", arch]
    words += ["--stream-layout", "documents", "--criterion", "cross_entropy_with_kl"]
    words += ["--optimizer", "adam", *flags]
    with warnings.catch_warnings(), tempfile.TemporaryFile("w+") as said:
        warnings.simplefilter("ignore")  # of fairseq's use of hydra
        try:
            with contextlib.redirect_stderr(said):  # its whole usage, and then what is wrong
                args = options.parse_args_and_arch(options.get_training_parser(), input_args=words)
        except SystemExit:
            said.seek(0)
            raise Failure(said.read().splitlines()[-1].split("error: ")[-1]) from None
        cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    return cfg, task, task.build_model(cfg.model)


def save_checkpoint(path, cfg, task, model, data):
    with open_dict(cfg):
        cfg.task.data, cfg.common.user_dir = data, None
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [
            {
                "criterion_name": "CrossEntropyWithKL",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {},
                "num_updates": 0,
            }
        ],
        "task_state": task.state_dict(),
        "extra_state": {},
    }
    with open(path, "wb") as file:
        torch.save(state, file)


def convert(args, flags, scratch):
    """Write what OUTPUT is to hold into the folder `scratch`.  -> what to say"""
    folder = find_folder(args.model)
    config, tensors = read_config(folder), read_weights(folder)
    eos_id = config["eos_token_id"]
    path = scratch / "dict.txt"
    if args.dict:
        load_dictionary(args.dict)
        shutil.copyfile(args.dict, path)
    else:
        write_dictionary(path, config["vocab_size"], eos_id)
    ids = token_ids(Dictionary.load(str(path)), eos_id)
    state = host_state(tensors, config, ids, args.dict or path)
    sizes = [str(word) for pair in model_flags(config).items() for word in pair]
    length = ["--tokens-per-sample", str(min(512, config["n_positions"]))]
    cfg, task, model = build(args.arch, sizes + length + flags, str(scratch))
    if cfg.model.activation_fn != "gelu_accurate":
        raise Failure(f"--activation-fn {cfg.model.activation_fn} is not GPT-2's: leave it out")
    own = model.memory_state_dict()
    try:
        model.load_state_dict({**state, **own}, strict=True)
    except RuntimeError:
        raise Failure(
            f"{folder} does not fit the flags that were given: those of GPT-2's own sizes come "
            "from its config.json, leave them out"
        ) from None
    if all((folder / name).is_file() for name in ENCODING):
        for theirs, ours in ENCODING.items():
            shutil.copyfile(folder / theirs, scratch / ours)
        (scratch / "documents.json").write_text(json.dumps({"encoding": "gpt2"}))
    save_checkpoint(scratch / "checkpoint.pt", cfg, task, model, str(args.output))
    count = sum(x.numel() for x in model.parameters())
    return (
        f"wrote {args.arch} with {count:,} parameters to {args.output}/checkpoint.pt and "
        f"{args.output}/dict.txt\nIts sizes, for fairseq-train: {' '.join(sizes)}"
    )


def convert_back(args, scratch):
    """The same for a checkpoint's host, in Hugging Face's layout."""
    path = Path(args.model)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        cfg, model, task = state["cfg"]["model"], state["model"], state.get("task_state", {})
    except FileNotFoundError:
        raise Failure(f"{path} does not exist") from None
    except (pickle.UnpicklingError, RuntimeError, OSError, KeyError, TypeError, EOFError):
        raise Failure(f"{path} is not a whole checkpoint of fairseq's") from None
    if not {"decoder.embed_positions.weight", "decoder.absent"} <= model.keys():
        raise Failure(f"{path} is not a GPT-2 with or without a memory")
    if cfg["activation_fn"] != "gelu_accurate":
        raise Failure(f"{path} has another activation than GPT-2: {cfg['activation_fn']}")
    model = {name.removeprefix("decoder."): x.float() for name, x in model.items()}
    named = args.dict or path.parent / "dict.txt"
    dictionary = load_dictionary(named)
    own = fairseq_inf.tasks.long_sequence_lm.dictionary_state(dictionary)
    if task.get("dictionary", own["dictionary"]) != own["dictionary"]:
        raise Failure(f"--dict {named} is of another vocabulary than {path}: name its own")

    listed = {int(w): i for i, w in enumerate(dictionary.symbols) if is_token(w)}
    # <|endoftext|>: listed, but not used; or not listed; or listed in vain by a model that was
    # trained from scratch
    unused = [token for token, i in listed.items() if model["absent"][i] != 0]
    gaps = (token for token in range(len(listed)) if token not in listed)
    last = GPT2_WORDS - 1 if len(listed) == GPT2_WORDS else len(listed)
    eos_id = unused[0] if unused else next(gaps, last)
    listed[eos_id] = dictionary.eos()
    if sorted(listed) != list(range(len(listed))):
        raise Failure(f"--dict {named} is not of a GPT-2's tokens: its words must be 0, 1, 2, …")
    rows = torch.tensor([listed[token] for token in range(len(listed))])

    tensors = {"wte.weight": model["embed_tokens.weight"][rows]}
    layers = 1 + max(int(name.split(".")[1]) for name in model if name.startswith("layers."))
    for theirs, ours, transposed in names(layers):
        tensors[theirs] = model[ours].T if transposed else model[ours]
    for i in range(layers):
        for part in ("weight", "bias"):
            both = [f"layers.{i}.attention.{name}.{part}" for name in ("query", "key_value")]
            x = torch.cat([model[name] for name in both])
            tensors[f"h.{i}.attn.c_attn.{part}"] = x.T if part == "weight" else x
    tensors = {f"transformer.{name}": x.contiguous() for name, x in tensors.items()}
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": len(rows),
        "n_positions": len(model["embed_positions.weight"]),
        "n_embd": model["norm.weight"].numel(),
        "n_layer": layers,
        "n_head": cfg["decoder_attention_heads"],
        "n_inner": model["layers.0.inner.bias"].numel(),
        "resid_pdrop": cfg["dropout"],
        "embd_pdrop": cfg["dropout"],
        "attn_pdrop": cfg["attention_dropout"],
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        **FIXED,
    }
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    if all((named.parent / name).is_file() for name in ENCODING.values()):
        for theirs, ours in ENCODING.items():
            shutil.copyfile(named.parent / ours, scratch / theirs)
    return f"wrote the GPT-2 of {path} to {args.output}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or hub name of a GPT-2; with --back, a checkpoint")
    parser.add_argument("output", type=Path, help="folder to make")
    parser.add_argument("--arch", help="architecture of the checkpoint (gpt2_lm)")
    parser.add_argument("--dict", type=Path, help="dictionary of data that is binarized already")
    parser.add_argument("--back", action="store_true", help="from a checkpoint to a GPT-2")
    args, flags = parser.parse_known_args()
    if args.back and (flags or args.arch):
        parser.error(f"{flags[0] if flags else '--arch'} is not for --back")
    args.arch = args.arch or "gpt2_lm"
    scratch = None
    try:
        if args.output.exists():
            raise Failure(f"{args.output} exists already: remove it, or name another output")
        args.output.absolute().parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(
            tempfile.mkdtemp(prefix=f".{args.output.name}.", dir=args.output.absolute().parent)
        )
        said = convert_back(args, scratch) if args.back else convert(args, flags, scratch)
        scratch.chmod(0o755)
        scratch.rename(args.output)
    except (Failure, ValueError) as failure:
        sys.exit(str(failure))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        sys.exit(f"{args.output} cannot be written: {reason}")
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    print(said)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
