"""fairseq-inf-needles: what a model still knows at the end of a long text that told it once.

    fairseq-inf-needles imported/smollm2 --path imported/smollm2/checkpoint.pt --output needles
    fairseq-inf-needles data-bin/smollm2 --path imported/smollm2/checkpoint.pt --split valid \\
        --memory "{}" --memory "{'ltm_policy': 'random'}" --seeds 3 --output needles

Facts are told in a text, one in each --every tokens, and asked for at its end: the first name of a
person, a number, a word behind one of many keys that look alike.  A fact is recalled if its answer
is likelier than those of all other --candidates, most of which are answers of other facts where
there are enough; it is said if greedy generation begins with it or comes to it.  The text is

    --split     the first --tokens of each document of that split of DATA, or
    --text      those of a file, which may be repeated, or
    (neither)   dull sentences of this package's own, others for each seed

A row is a --path with the settings of a --memory; each has the same texts, facts and questions.
Beside them stand, without a long-term memory,

    everything  all of the text in sight
    window      as many keys in sight as short-term memory and slots of a memory hold
    nothing     no text at all

which are measured once, and kept in a file (--cache, or beside the checkpoint).  Bits are those of
a token of the text, without the facts and with them, from token --context on (in texts.csv by
place, too, 1,024 tokens each); bytes what a stream keeps between two segments; times CPU seconds of
such a token with its prediction.

OUTPUT gets table.md, needles.png (facts recalled by distance), needles.csv (a line for each
question) and texts.csv (one for each text), written anew after each row.
"""

import argparse
import hashlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_inf.analysis.report import pyplot, save, table, write_csv
from fairseq_inf.commands import check_least
from fairseq_inf.errors import Failure, plain_errors
from fairseq_inf.files import check_writable
from fairseq_inf.hub import MemoryHub
from fairseq_inf.models.generation import (
    Continuation,
    Opened,
    OpenSegment,
    Reading,
    new_reading,
    read,
)

from .haystack import FORMS, Needle, haystack, plant
from .measuring import (
    add_memories,
    digest_of,
    documents,
    load,
    memories,
    new_parser,
    once,
    parse,
)
from .recall.data import bin_edges
from .recall.figure import bin_names
from .runs import spread

ROOM = 2**30  # bytes of the states of questions that are asked side by side, at most
SAID = 8  # tokens of a generated answer
BEHIND = 256  # tokens of a question and an answer, at most
LONGER = 4  # times as long segments are sooner read, and the same where nothing leaves the window
PLACES = 1024  # tokens of which a mean is kept

# B questions, V words


@dataclass
class Answer:
    recalled: bool  # likelier than all other candidates
    nats: float  # logarithm of its probability
    said: str  # what is generated instead of it


@dataclass
class Text:
    seed: int
    document: int
    tokens: Tensor
    needles: list[Needle]


@dataclass
class Found:
    """What a row gives on a text."""

    answers: list[Answer]
    bits: float = math.nan  # of the text's own tokens
    with_facts: float = math.nan  # of all
    by_place: list[float] = field(default_factory=list)  # of its own, in each PLACES from `context`
    seconds: float = math.nan  # of a token
    window: int = 0  # bytes
    memory: int = 0


@dataclass
class Row:
    name: str
    path: Path
    settings: dict[str, Any]
    of_text: bool = True
    longer: int = 1  # segments are so many times as long as the model's
    key: str = ""  # in the file of what is measured once
    found: list[Found] = field(default_factory=list)  # of each text


def log_probs(decoder: Any, output: Tensor) -> Tensor:
    """B x 1 x V -> B x V"""
    return decoder.get_normalized_probs((output, {}), log_probs=True)[:, -1].float()


def score(
    decoder: Any, opened: Opened, candidates: Sequence[Tensor], least: Tensor | None = None
) -> Tensor:
    """The logarithm of the probability of a candidate in each row.  opened: is used up.  least: B,
    what is below it in every row is not read to its end.  -> B"""
    words = pad_sequence(list(candidates), batch_first=True, padding_value=decoder.dictionary.pad())
    words = words.to(opened.output.device)
    going = Continuation(decoder, opened)
    total = torch.zeros(len(words), device=words.device)
    for place, word in enumerate(words.unbind(dim=1)):
        if place:
            going.feed(words[:, place - 1])
        own = log_probs(decoder, going.output).gather(1, word[:, None]).squeeze(1)
        total += own.masked_fill(word == decoder.dictionary.pad(), 0)
        if least is not None and bool((total < least).all()):
            break
    return total


def likeliest(
    decoder: Any, opened: Opened, candidates: Sequence[Sequence[Tensor]]
) -> tuple[list[bool], Tensor]:
    """candidates: of each row.  No candidate is likelier than its first token is: one that cannot
    be likelier than the answer is not read.
    -> whether the first of each row is likelier than all others, and its score"""
    first = log_probs(decoder, opened.output)
    answer = score(decoder, opened.map(torch.clone), [own[0] for own in candidates])
    beaten = [False] * len(candidates)
    rivals = []  # of each row, the most promising last
    for own, logs, least in zip(candidates, first, answer, strict=True):
        bounds = logs[torch.tensor([int(x[0]) for x in own], device=logs.device)]
        order = [i for i in bounds.argsort().tolist() if i and bounds[i] >= least]
        rivals.append([own[i] for i in order])
    while live := [row for row, left in enumerate(rivals) if left and not beaten[row]]:
        index = torch.tensor(live, device=answer.device)
        least = answer[index]
        scores = score(decoder, opened.rows(index), [rivals[row].pop() for row in live], least)
        for row, lost in zip(live, (scores >= least).tolist(), strict=True):
            beaten[row] = lost
    return [not lost for lost in beaten], answer


@torch.no_grad()
def ask(hub: MemoryHub, reading: Reading, needles: Sequence[Needle]) -> list[Answer]:
    """All questions of one reading, which remains as it was."""
    decoder = hub.model.decoder
    kept = sum(x[0].nbytes for x in reading.tensors().values())
    at_once = max(1, min(16, ROOM // kept))
    answers: list[Answer] = []
    for begin in range(0, len(needles), at_once):
        some = needles[begin : begin + at_once]
        asked = [hub.tokens_of(FORMS[x.form].ask(x.key)) for x in some]
        candidates = [[hub.tokens_of(f" {word}") for word in x.candidates] for x in some]
        check_words(hub, some, candidates)
        lengths = torch.tensor([len(x) for x in asked], device=hub.device)
        texts = pad_sequence(asked, batch_first=True, padding_value=hub.dictionary.pad())
        rows = reading.rows(torch.zeros_like(lengths))
        opened = OpenSegment(decoder, read(decoder, rows, texts.to(hub.device), lengths)).end()
        recalled, nats = likeliest(decoder, opened, candidates)
        said = [hub.text_of(x) for x in hub.go_on(opened, SAID)]
        answers += map(Answer, recalled, nats.tolist(), said)
    return answers


def check_words(
    hub: MemoryHub, needles: Sequence[Needle], candidates: Sequence[Sequence[Tensor]]
) -> None:
    for needle, own in zip(needles, candidates, strict=True):
        if len({tuple(x.tolist()) for x in own}) < len(own):
            raise Failure(
                f"the dictionary does not tell {', '.join(needle.candidates[:3])}, … apart: "
                f"leave --form {needle.form} out, or name a model that can encode any text"
            )


def right(answer: Answer, needle: Needle) -> bool:
    return needle.answer.lower() in answer.said.lower()


def state_bytes(decoder: Any, reading: Reading) -> tuple[int, int]:
    """What a stream keeps between two segments, but for its long-term memory, and in that."""

    def size(state: Any) -> int:
        return sum(x[0].nbytes for x in state.tensors().values())

    stored = sum(size(x) for x in decoder.memory_states(reading.memory) if x is not None)
    return size(reading.memory) - stored, stored if decoder.ltm_enabled else 0


def measure(hub: MemoryHub, text: Text, context: int, of_text: bool = True) -> Found:
    """Read a text, and ask.  of_text: or only ask"""
    decoder = hub.model.decoder
    reading = new_reading(decoder, 1, hub.length)
    if not of_text:
        return Found(ask(hub, reading, text.needles))
    tokens = text.tokens[None].to(hub.device)
    first, rest = tokens[:, :context], tokens[:, context:]
    lengths = [torch.tensor([part.size(1)], device=hub.device) for part in (first, rest)]
    reading = read(decoder, reading, first, lengths[0])
    since = time.process_time()
    reading, logs = read(decoder, reading, rest, lengths[1], score=True)
    seconds = (time.process_time() - since) / rest.size(1)
    bits, hay = -logs[0].double().cpu() / math.log(2), counted(text)[context:]
    parts = zip(bits.split(PLACES), hay.split(PLACES), strict=True)
    return Found(
        ask(hub, reading, text.needles),
        bits[hay].mean().item(),
        bits.mean().item(),
        [part[own].mean().item() for part, own in parts if own.any()],
        seconds,
        *state_bytes(decoder, reading),
    )


def counted(text: Text) -> Tensor:
    """Which tokens are the text's own, and not of a fact."""
    hay = torch.ones(len(text.tokens), dtype=torch.bool)
    for needle in text.needles:
        hay[needle.place : needle.place + needle.length] = False
    return hay


# texts and rows


def own_tokens(args: argparse.Namespace, hub: MemoryHub) -> Iterator[Tensor]:
    """The texts of the user's, without facts."""
    if args.split:
        for document in documents(args.data, args.split, args.tokens):
            yield document[1:]
    for path in args.text or ():
        tokens = torch.cat(list(hub.pieces(path)))[: args.tokens]
        if len(tokens) < args.tokens:
            raise Failure(f"--text {path} has fewer than --tokens {args.tokens}")
        yield tokens


def texts_of(args: argparse.Namespace, hub: MemoryHub) -> list[Text]:
    """The same for all rows: facts and their places are drawn by the seed and the text's number."""
    own = list(own_tokens(args, hub))
    texts = []
    for seed in range(1, args.seeds + 1):
        for number, hay in enumerate(own or [haystack(hub, args.tokens, f"{seed}")]):
            drawn = plant(hub, hay, args.form, args.every, args.candidates, f"{seed} {number}")
            texts.append(Text(seed, number, *drawn))
    return texts


def rows_of(
    args: argparse.Namespace, dtype: torch.dtype, asked: Sequence[tuple[str, dict[str, Any]]]
) -> Iterator[Row]:
    """What each --path is with each --memory; before the first that is like it, what is measured
    once.  Every model is loaded here, so that what cannot be is refused at once."""
    seen = set()
    for path in args.path:
        title = f"{path.parent.name} " if len(args.path) > 1 else ""
        for text, settings in asked:
            hub = load(path, args.data, dtype, **settings)
            decoder, model = hub.model.decoder, hub.cfg.model
            off = {name: settings[name] for name in settings if name == "weights"}
            off |= {"ltm_enabled": False} if hub.model.has_memory else {}
            keys = decoder.stm_length + decoder.mean_slots()
            alone = [Row(f"{title}nothing", path, off, of_text=False)]
            if "stm_length" in model:
                alone.append(Row(f"{title}window of {keys:,}", path, off | {"stm_length": keys}))
                if args.tokens <= model.get("decoder_positions", args.tokens):
                    whole = off | everything(model, args.tokens, hub.length)
                    alone.append(Row(f"{title}everything", path, whole, longer=LONGER))
            for row in [] if args.rows_only else alone:
                row.key = (
                    f"{digest_of(decoder)} {hub.length} {dtype} {sorted(row.settings.items())}"
                )
                if row.key not in seen:
                    seen.add(row.key)
                    yield row
            plain = "memory" if hub.model.has_memory else "as it is"
            yield Row(f"{title}{text if settings else plain}", path, settings)


def everything(model: Any, tokens: int, length: int) -> dict[str, Any]:
    """Settings with which a text and a question behind it are in sight.  A window that is larger
    than what is in it needs no more positions."""
    room = tokens + BEHIND
    whole = {"stm_length": room, "sink_tokens": 0}
    if "decoder_positions" in model:
        whole["decoder_positions"] = room + LONGER * length
    return whole


def load_row(row: Row, data: Path, dtype: torch.dtype) -> MemoryHub:
    hub = load(row.path, data, dtype, **row.settings)
    hub.length *= row.longer
    return hub


def key_of(row: Row, text: Text, context: int) -> str:
    questions = [FORMS[needle.form] for needle in text.needles]
    digest = hashlib.blake2b(
        repr((context, text.needles, [x.question for x in questions])).encode()
    )
    digest.update(text.tokens.numpy().tobytes())
    return f"{row.key} {digest.hexdigest()[:16]}"


# results


def by_distance(texts: Sequence[Text], row: Row, edges: Sequence[int]) -> dict[int, list[bool]]:
    """-> what was recalled in each bin, by its upper end"""
    found: dict[int, list[bool]] = {edge: [] for edge in edges}
    for text, own in zip(texts, row.found, strict=True):
        for needle, answer in zip(text.needles, own.answers, strict=True):
            distance = len(text.tokens) - needle.place
            found[next(edge for edge in edges if distance < edge)].append(answer.recalled)
    return found


def shares(
    texts: Sequence[Text], row: Row, said: bool = False, form: str | None = None
) -> list[float]:
    """-> of each seed the facts that are recalled, in %"""
    found: dict[int, list[bool]] = {}
    for text, own in zip(texts, row.found, strict=True):
        for needle, answer in zip(text.needles, own.answers, strict=True):
            if form in (None, needle.form):
                good = right(answer, needle) if said else answer.recalled
                found.setdefault(text.seed, []).append(good)
    return [100 * statistics.mean(each) for each in found.values()]


def lines_of(texts: Sequence[Text], rows: Sequence[Row], forms: Sequence[str], every: int) -> str:
    """-> the table"""
    edges = bin_edges(every, len(texts[0].tokens) + 1)
    names = bin_names({*edges}, every)
    lines = []
    for row in rows:
        binned = by_distance(texts, row, edges).values()
        by_form = [shares(texts, row, form=form) for form in forms]
        mean = {
            name: statistics.mean(getattr(own, name) for own in row.found)
            for name in ("bits", "with_facts", "seconds", "window", "memory")
        }
        cost = [""] * 5
        if row.of_text:
            sizes = [f"{mean[name] / 1e6:.1f}" for name in ("window", "memory")]
            bits = [f"{mean[name]:.4f}" for name in ("bits", "with_facts")]
            cost = [*bits, *sizes, f"{1000 * mean['seconds']:.1f}"]
        lines.append(
            [
                row.name,
                *cost[:2],
                spread(shares(texts, row)),
                *(f"{sum(each)}/{len(each)}" for each in binned),
                *(spread(own) if own else "" for own in by_form),
                spread(shares(texts, row, said=True)),
                *cost[2:],
            ]
        )
    head = ["", "bits", "with facts", "recalled, %", *names.values()]
    head += [*(f"{form}, %" for form in forms), "said, %", "window, MB", "memory, MB", "ms a token"]
    return table(head, lines)


def draw(path: Path, texts: Sequence[Text], rows: Sequence[Row], every: int, chance: float) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9.5, 4.4))
    edges = bin_edges(every, len(texts[0].tokens) + 1)
    for row in rows:
        binned = by_distance(texts, row, edges).values()
        share = [100 * statistics.mean(each) if each else math.nan for each in binned]
        size = (row.found[0].window + row.found[0].memory) / 1e6
        label = f"{row.name}, {size:.1f} MB" if row.of_text else row.name
        how = {"ls": "--", "lw": 1} if row.key else {"marker": "o", "ms": 4}
        axes.plot(share, label=label, **how)
    axes.axhline(100 * chance, color="0.5", lw=1, ls=":", label="chance")
    axes.set_xticks(range(len(edges)), bin_names({*edges}, every).values())
    axes.set_xlabel("tokens since the fact was told")
    axes.set_ylabel("facts recalled, %")
    axes.set_ylim(0, 102)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    save(plt, figure, path)


FILES = ("table.md", "needles.png", "needles.csv", "texts.csv")


def report(args: argparse.Namespace, texts: Sequence[Text], rows: Sequence[Row]) -> str:
    """Write what is found so far.  -> the table"""
    made, drawn, by_needle, by_text = (args.output / name for name in FILES)
    each = [
        (row, text, found) for row in rows for text, found in zip(texts, row.found, strict=True)
    ]
    lines = [
        {
            "row": row.name, "path": row.path, "seed": text.seed, "document": text.document,
            "distance": len(text.tokens) - needle.place, **asdict(needle), **asdict(answer),
            "answer": needle.answer, "right": int(right(answer, needle)),
            "recalled": int(answer.recalled),
        }
        for row, text, found in each
        for needle, answer in zip(text.needles, found.answers, strict=True)
    ]  # fmt: skip
    columns = "row path seed document form key answer place distance recalled nats right said"
    write_csv(by_needle, columns.split(), lines)
    sums = [
        {"row": row.name, "path": row.path, **vars(text), **vars(found)}
        for row, text, found in each
        if row.of_text
    ]
    for line in sums:
        line["by_place"] = " ".join(f"{x:.4f}" for x in line["by_place"])
    columns = "row path seed document bits with_facts by_place seconds window memory"
    write_csv(by_text, columns.split(), sums)
    text = lines_of(texts, rows, args.form, args.every)
    made.write_text(text + "\n")
    draw(drawn, texts, rows, args.every, 1 / args.candidates)
    return text


def run(
    args: argparse.Namespace, dtype: torch.dtype, asked: Sequence[tuple[str, dict[str, Any]]]
) -> str:
    check_least(args, every=32, candidates=2, seeds=1)
    if args.split and args.text:
        raise Failure("--split and --text exclude each other: give one")
    args.output.mkdir(exist_ok=True)
    for name in FILES:
        check_writable(args.output / name)
    pyplot()  # to learn before texts are read whether it is there
    args.form = list(dict.fromkeys(args.form or FORMS))
    rows, done = list(rows_of(args, dtype, asked)), []
    texts = texts_of(args, load(args.path[0], args.data, dtype))
    facts = sum(len(text.needles) for text in texts)
    print(
        f"{len(texts)} texts of {args.tokens:,} tokens, {facts} facts, the likeliest of "
        f"{args.candidates} (chance {100 / args.candidates:.1f} %)", flush=True,
    )  # fmt: skip
    for row in rows:
        file = args.cache or row.path.with_suffix(".needles.jsonl")
        hub = cache(partial(load_row, row, args.data, dtype))
        for text in texts:

            def found(hub: Any = hub, text: Text = text, row: Row = row) -> dict[str, Any]:
                return asdict(measure(hub(), text, args.context, row.of_text))

            kept = once(file, key_of(row, text, args.context), found) if row.key else found()
            answers = [Answer(**x) for x in kept.pop("answers")]
            row.found.append(Found(answers, **kept))
        done.append(row)
        shown = report(args, texts, done)
        print(f"{row.name}: {spread(shares(texts, row))} % recalled", flush=True)
    return shown


def main() -> None:
    parser = new_parser("fairseq-inf-needles", __doc__ or "", several=True)
    add_memories(parser)
    add = parser.add_argument
    add("--text", type=Path, action="append", help="file in UTF-8")
    add("--every", type=int, default=512, help="tokens from a fact to the next (512)")
    add("--form", action="append", choices=FORMS, help="of the facts (all)")
    add("--candidates", type=int, default=20, help="of which one is the answer (20)")
    add("--seeds", type=int, default=3, help="of facts and places, from 1 on (3)")
    add("--rows-only", action="store_true", help="without everything, window and nothing")
    add("--cache", type=Path, help="file of what is measured once")
    add("--output", type=Path, required=True, help="folder to write")
    args, dtype = parse(parser)
    asked = memories(parser, args)
    for path in args.text or ():
        if not path.is_file():
            parser.error(f"--text {path} does not exist or is not a file")
    with plain_errors(parser.prog):
        shown = run(args, dtype, asked)
    print(f"\n{shown}\n\nfigure: {args.output / FILES[1]}")


if __name__ == "__main__":
    main()
