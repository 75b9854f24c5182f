"""Trainings of hydra configs side by side, each once: what is finished is not run again."""

import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

import fairseq_inf.models
from fairseq_inf.errors import Failure, plain_errors
from fairseq_inf.files import write_text

PACKAGE = Path(fairseq_inf.__file__).parent
# the models of the paper in the order of its tables: the names of their configs
MODELS = (
    "transformer_xl",
    "compressive_transformer",
    "infinite_former",
    "infinite_former_sticky",
)
ROWS = ("gpt2", "host_without_document", "host", *MODELS)
Result = dict[str, Any]


def compose(config: Path) -> Any:
    """The settings of a config with those of its bases, as fairseq-hydra-train reads them."""
    last = OmegaConf.load(config)
    parts = last.pop("defaults", ["_self_"])
    return OmegaConf.merge(
        *(last if x == "_self_" else OmegaConf.load(config.with_name(f"{x}.yaml")) for x in parts)
    )


@dataclass
class Row:
    """What is trained: a config with its overrides, by its name in table and figure."""

    config: Path
    overrides: list[str]
    changes: list[str] = field(default_factory=list)  # overrides that no other row has
    data: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        words = (word.split(".")[-1] for word in self.changes)
        self.name = self.name or ", ".join([self.config.stem, *words])

    def folder(self, out: str | Path, seed: int) -> Path:
        return Path(out).resolve() / self.name.replace(", ", "-") / f"seed{seed}"

    def settings(self) -> Any:
        """The config as it is trained."""
        changes = OmegaConf.from_dotlist([word.lstrip("+") for word in self.overrides])
        return OmegaConf.merge(compose(self.config), changes)

    def asked(self) -> dict[str, Any]:
        """What its results depend on."""
        config = OmegaConf.to_container(compose(self.config))
        return {"--data": self.data, "overrides": self.overrides, "config": config}


def shown(name: str) -> str:
    """A row's name as people read it: only its settings keep their underscores."""
    stem, comma, changes = name.partition(",")
    return stem.replace("_", " ") + comma + changes


def add_runs(parser: ArgumentParser) -> None:
    """How trainings are run: `check_runs` reads it."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def check_runs(parser: ArgumentParser, args: Namespace) -> None:
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if len(set(args.seeds)) < len(args.seeds):
        parser.error("--seeds: a seed twice would share a folder")
    args.threads = threads_each(args.jobs)


def threads_each(jobs: int) -> int:
    return max(1, (os.cpu_count() or 1) // jobs)


def add_rows(parser: ArgumentParser) -> None:
    """What is trained, and how: `find_rows` reads it."""
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
    add_runs(parser)


def find_rows(parser: ArgumentParser, args: Namespace) -> list[Row]:
    """Take args.configs and args.also apart, and see that data and runs fit.
    -> rows, in the order of the tables"""
    check_runs(parser, args)
    overrides = [word for word in args.configs if "=" in word]
    args.data = str(Path(args.data).resolve())
    paths = [Path(word).resolve() for word in args.configs if "=" not in word]
    # those that begin with _ are the bases of others
    configs = [c for p in paths for c in (sorted(p.glob("[!_]*.yaml")) if p.is_dir() else [p])]
    configs.sort(key=lambda c: ROWS.index(c.stem) if c.stem in ROWS else len(ROWS))
    if not configs or not all(config.is_file() for config in configs):
        parser.error(f"no hydra configs (*.yaml) in {', '.join(map(str, paths)) or 'nothing'}")
    if not (Path(args.data) / "dict.txt").is_file():
        parser.error(
            f"--data {args.data} has no dict.txt: name a folder that fairseq-preprocess wrote"
        )
    rows, named = [Row(c, overrides, [], args.data) for c in configs], {c.stem: c for c in configs}
    for name, *changes in args.also:
        if name not in named or not changes or not all("=" in word for word in changes):
            parser.error(
                f"--also {name} {' '.join(changes)} must be one of {', '.join(named)} and what is "
                "changed, a=b"
            )
        rows.append(Row(named[name], overrides + changes, changes, args.data))
    rows.sort(key=lambda row: configs.index(row.config))
    if len({row.name for row in rows}) < len(rows):
        parser.error("rows of the same name would share a folder")
    return rows


def tool(name: str) -> str:
    return os.path.join(os.path.dirname(sys.executable), name)


def run(command: Sequence[str], log: Path, threads: int) -> tuple[float, str]:
    """Run a command into a log file; a failure names the log.  -> seconds, what it printed"""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    begin = time.time()
    with open(log, "a+") as file:
        start = file.seek(0, os.SEEK_END)
        done = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        file.seek(start)
        printed = file.read()
    if done.returncode:
        said = [line for line in printed.splitlines() if line and "HYDRA_FULL_ERROR" not in line]
        reasons = [line for line in said if re.match(r"\w*Error: ", line)] or said
        raise Failure(f"{command[0]} failed, see {log}: {' '.join(reasons[-1:])}")
    return time.time() - begin, printed


def train(
    config: Path, data: str, seed: int, folder: Path, overrides: Sequence[str], threads: int,
    cpu: bool,
) -> float:  # fmt: skip
    """Train a hydra config, or go on with it, in a folder.  -> seconds"""
    done = folder / "trained.json"  # fairseq would add a step to a training that is finished
    if done.is_file():
        return json.loads(done.read_text())["seconds"]
    command = [
        tool("fairseq-hydra-train"),
        "--config-dir", str(config.parent), "--config-name", config.stem,
        f"task.data='{data}'", f"common.seed={seed}", f"checkpoint.save_dir='{folder}'",
        f"common.user_dir='{PACKAGE}'", f"hydra.run.dir='{folder}'", *overrides,
    ]  # fmt: skip
    seconds, _ = run(command + ["common.cpu=true"] * cpu, folder / "train.log", threads)
    write_json(done, {"seconds": seconds})
    return seconds


def _measure(
    command: str, task: str, data: str | Path, checkpoint: Path, log: Path, threads: int, cpu: bool,
    off: bool, *more: Any,
) -> str:  # fmt: skip
    words = [
        tool(command), str(data), "--user-dir", str(PACKAGE), "--task", task,
        "--path", str(checkpoint), *map(str, more),
        "--model-overrides", repr({"ltm_enabled": False} if off else {}),
    ]  # fmt: skip
    return run(words + ["--cpu"] * cpu, log, threads)[1]


def evaluate(
    data: str | Path, checkpoint: Path, split: str, rows: int, log: Path, threads: int, cpu: bool,
    off: bool = False, context: int = 0,
) -> Result:  # fmt: skip
    """fairseq-eval-lm of a checkpoint, read as it was trained, and what it says by token and by
    word.  off: without the long-term memory.  context: fairseq's --context-window."""
    more = ("--gen-subset", split, "--batch-size", rows, "--context-window", context)
    printed = _measure(
        "fairseq-eval-lm", "long_sequence_lm", data, checkpoint, log, threads, cpu, off, *more
    )
    tokens = int(re.findall(r"Evaluated ([\d,]+) tokens", printed)[-1].replace(",", ""))
    bits, ppl = re.findall(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", printed)[-1]
    result = {"tokens": tokens, "bits": float(bits), "ppl": float(ppl)}
    summary = Path(data) / "documents.json"
    counted = json.loads(summary.read_text()).get(split) if summary.is_file() else None
    if counted and counted["tokens"] == tokens:
        result["words"] = counted["words"]
        result["word_ppl"] = 2 ** (float(bits) * tokens / counted["words"])
    return result


def validate(
    task: str, data: str, checkpoint: Path, log: Path, args: Namespace, *more: str,
    off: bool = False,
) -> dict[str, float]:  # fmt: skip
    """fairseq-validate on the test split.  -> what it logs, by name"""
    more = (
        *("--valid-subset", "test", "--batch-size", "40", "--log-format", "json"),
        *("--num-workers", "0", *more),
    )
    printed = _measure(
        "fairseq-validate", task, data, checkpoint, log, args.threads, args.cpu, off, *more
    )
    logged = json.loads(re.findall(r"\| test \| ({.*})", printed)[-1])
    measured = ((name.removeprefix("test_"), value) for name, value in logged.items())
    return {name: float(value) for name, value in measured if name not in ("epoch", "test")}


def remembers(checkpoint: Path) -> tuple[bool, bool]:
    """-> whether a model has a long-term memory, and whether it sees any earlier segment"""
    state = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    model = state["cfg"]["model"]
    has_memory = ARCH_MODEL_REGISTRY[model["_name"]].has_memory
    return has_memory, has_memory or model.get("stm_length", 0) > 0


def once(folder: Path, asked: dict[str, Any], work: Callable[[], Result]) -> Result:
    """The result of `work()`, or the one that an earlier call has left in the folder.

    asked: what the result depends on, by name; a folder that was begun otherwise is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--out: cannot make {folder}: {error.strerror}") from None
    begun, done = folder / "asked.json", folder / "result.json"
    if begun.is_file():
        before = json.loads(begun.read_text())
        for name, value in asked.items():
            if before.get(name) != value:
                raise Failure(f"{folder} has another {name}: choose another --out, or remove it")
    else:
        write_json(begun, asked)
    if not done.is_file():
        write_json(done, work())
    return json.loads(done.read_text())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1))


def side_by_side(
    jobs: int, calls: Iterable[Callable[[], Result]], report: Callable[[Result], str]
) -> list[Result]:
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


def work(
    args: Namespace, out: Path, row: Row, seed: int, measure: Callable[[Row, Path], Result],
    asked: dict[str, Any],
) -> Result:  # fmt: skip
    """Train and measure a row, or what an earlier call has left."""
    folder = row.folder(out, seed)

    def measured() -> Result:
        seconds = train(row.config, row.data, seed, folder, row.overrides, args.threads, args.cpu)
        return {"config": row.name, "seed": seed, "seconds": seconds, **measure(row, folder)}

    return once(folder, {**row.asked(), **asked}, measured)


def run_rows(
    args: Namespace,
    rows: Sequence[Row],
    measure: Callable[[Row, Path], Result],
    score: Callable[[Result], str],
    asked: dict[str, Any] | None = None,
    out: Path | None = None,
) -> list[Result]:
    """Train each row with each seed and measure it.

    measure: (row, folder of the training) -> results.  score: what of them is told at once.
    asked: what they depend on beside row and seed.  out: a folder within --out."""
    out = out or Path(args.out)
    calls = [
        partial(work, args, out, row, seed, measure, asked or {})
        for seed in args.seeds
        for row in rows
    ]
    return side_by_side(
        args.jobs,
        calls,
        lambda result: f"{result['config']} seed {result['seed']}: {score(result)}",
    )


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and, of several, standard deviation."""
    mean = f"{statistics.mean(values):{sign}.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def sub_commands(prog: str, commands: dict[str, tuple[str, Callable[[], None]]]) -> None:
    """The command line "prog command ...".  commands: what each does in a line, and its main."""
    lines = "\n".join(f"  {name:<8} {line}" for name, (line, _) in commands.items())
    usage = f"{prog} {{{','.join(commands)}}} ...\n\n{lines}"
    parser = ArgumentParser(prog=prog, usage=usage)
    parser.add_argument("command", choices=commands, help="each has a --help of its own")
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"{prog} {name}", *sys.argv[2:]]
    with plain_errors(sys.argv[0]):
        commands[name][1]()
