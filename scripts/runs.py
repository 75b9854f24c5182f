"""Trainings of hydra configs side by side, each once: what is finished is not run again."""

import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

import fairseq_inf.models  # noqa: F401  (registers them)

ROOT = Path(__file__).resolve().parent.parent
# the models of the paper in the order of its tables: the names of their configs
MODELS = (
    "transformer_xl",
    "compressive_transformer",
    "infinite_former",
    "infinite_former_sticky",
)
ROWS = ("gpt2", *MODELS)


@dataclass
class Row:
    """A config with its overrides, by the name that it has in table and figure."""

    config: Path
    overrides: list[str]
    own: list[str] = field(default_factory=list)  # those of them that no other row has

    @property
    def name(self):
        return ", ".join([self.config.stem, *(word.split(".")[-1] for word in self.own)])

    def folder(self, out, seed):
        return Path(out).resolve() / self.name.replace(", ", "-") / f"seed{seed}"

    def settings(self):
        """The config as it is trained."""
        changes = OmegaConf.from_dotlist([word.lstrip("+") for word in self.overrides])
        return OmegaConf.merge(OmegaConf.load(self.config), changes)


def shown(name):
    """A row's name as people read it: only its settings keep their underscores."""
    stem, comma, own = name.partition(",")
    return stem.replace("_", " ") + comma + own


def add_rows(parser):
    """The arguments that say what is trained: `find_rows` reads them."""
    parser.add_argument(
        "configs",
        nargs="+",
        help="folders of hydra configs or single .yaml files, and hydra overrides, a=b, for all",
    )
    parser.add_argument(
        "--also",
        nargs="+",
        action="append",
        default=[],
        metavar=("CONFIG", "a=b"),
        help="one more row: the name of one of the configs, and overrides for it alone",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def find_rows(parser, args):
    """Take args.configs and args.also apart, and see that data and runs fit.
    -> rows, in the order of the tables"""
    overrides = [word for word in args.configs if "=" in word]
    args.data = str(Path(args.data).resolve())
    paths = [Path(word).resolve() for word in args.configs if "=" not in word]
    configs = [c for p in paths for c in (sorted(p.glob("*.yaml")) if p.is_dir() else [p])]
    configs.sort(key=lambda c: ROWS.index(c.stem) if c.stem in ROWS else len(ROWS))
    if not configs or not all(config.is_file() for config in configs):
        parser.error(f"no hydra configs (*.yaml) in {', '.join(map(str, paths)) or 'nothing'}")
    if not (Path(args.data) / "dict.txt").is_file():
        parser.error(
            f"--data {args.data} has no dict.txt: name a folder that fairseq-preprocess wrote"
        )
    rows, named = [Row(config, overrides) for config in configs], {c.stem: c for c in configs}
    for name, *own in args.also:
        if name not in named or not own or not all("=" in word for word in own):
            parser.error(
                f"--also {name} {' '.join(own)} must be one of {', '.join(named)} and what is "
                "changed, a=b"
            )
        rows.append(Row(named[name], overrides + own, own))
    rows.sort(key=lambda row: configs.index(row.config))
    if len({row.name for row in rows}) < len(rows) or len(set(args.seeds)) < len(args.seeds):
        parser.error("rows of the same name, or a seed twice, would share a folder")
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    return rows


def tool(name):
    return os.path.join(os.path.dirname(sys.executable), name)


def run(command, log, threads):
    """Run a command into a log file; a failure names the log.  -> seconds, what it printed"""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    begin = time.time()
    with open(log, "a+") as file:
        start = file.seek(0, os.SEEK_END)
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
        file.seek(start)
        printed = file.read()
    if done.returncode:
        said = [line for line in printed.splitlines() if line and "HYDRA_FULL_ERROR" not in line]
        reasons = [line for line in said if re.match(r"\w*Error: ", line)] or said
        raise SystemExit(f"{command[0]} failed, see {log}: {' '.join(reasons[-1:])}")
    return time.time() - begin, printed


def train(config, data, seed, folder, overrides, threads, cpu):
    """Train a hydra config, or go on with it, in a folder.  -> seconds"""
    done = folder / "trained.json"  # fairseq would add a step to a training that is finished
    if done.is_file():
        return json.loads(done.read_text())["seconds"]
    command = [
        tool("fairseq-hydra-train"),
        "--config-dir", str(config.parent), "--config-name", config.stem,
        f"task.data='{data}'", f"common.seed={seed}", f"checkpoint.save_dir='{folder}'",
        f"common.user_dir='{ROOT / 'fairseq_inf'}'", f"hydra.run.dir='{folder}'", *overrides,
    ]  # fmt: skip
    command += ["common.cpu=true"] * cpu
    seconds, _ = run(command, folder / "train.log", threads)
    write_json(done, {"seconds": seconds})
    return seconds


def evaluate(data, checkpoint, split, rows, log, threads, cpu, off=False, context=0):
    """fairseq-eval-lm of a checkpoint, read as it was trained, and what it says by token and by
    word.  off: without the long-term memory.  context: fairseq's --context-window."""
    command = [
        tool("fairseq-eval-lm"), str(data), "--user-dir", str(ROOT / "fairseq_inf"),
        "--task", "long_sequence_lm", "--path", str(checkpoint), "--gen-subset", split,
        "--batch-size", str(rows),
        "--model-overrides", repr({"ltm_enabled": False} if off else {}),
        "--context-window", str(context),
    ]  # fmt: skip
    _, printed = run(command + ["--cpu"] * cpu, log, threads)
    tokens = int(re.findall(r"Evaluated ([\d,]+) tokens", printed)[-1].replace(",", ""))
    bits, ppl = re.findall(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", printed)[-1]
    result = {"tokens": tokens, "bits": float(bits), "ppl": float(ppl)}
    summary = Path(data) / "documents.json"
    counted = json.loads(summary.read_text()).get(split) if summary.is_file() else None
    if counted and counted["tokens"] == tokens:
        result["words"] = counted["words"]
        result["word_ppl"] = 2 ** (float(bits) * tokens / counted["words"])
    return result


def checkpoint_settings(checkpoint):
    """What the evaluation must know of the model."""
    import torch

    state = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    has_memory = ARCH_MODEL_REGISTRY[state["cfg"]["model"]["_name"]].has_memory
    has_past = has_memory or state["cfg"]["model"]["stm_length"] > 0
    return {"has_memory": has_memory, "has_past": has_past}


def once(folder, asked, work):
    """The result of `work()`, or the one that an earlier call has left in the folder.

    asked: what the result depends on, by name; a folder that was begun otherwise is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out: cannot make {folder}: {error.strerror}") from None
    begun, done = folder / "asked.json", folder / "result.json"
    if begun.is_file():
        before = json.loads(begun.read_text())
        for name, value in asked.items():
            if before.get(name) != value:
                raise SystemExit(f"{folder} has another {name}: choose another --out, or remove it")
    else:
        write_json(begun, asked)
    if not done.is_file():
        write_json(done, work())
    return json.loads(done.read_text())


def write_json(path, value):
    """Never leaves half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1))
    partial.replace(path)


def side_by_side(jobs, calls, report):
    """Make the calls, `jobs` at a time; the first failure ends it.  -> their results"""
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in concurrent.futures.as_completed(futures):
                results.append(future.result())
                print(report(results[-1]), flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def threads_each(jobs):
    return max(1, (os.cpu_count() or 1) // jobs)


def spread(values, sign=""):
    """Mean and, of several, standard deviation."""
    mean = f"{statistics.mean(values):{sign}.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"
