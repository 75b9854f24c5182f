"""asking: ten questions about each document of a folder, answered from a memory of it or not.

    python -m fairseq_inf.experiments.asking examples/ask --path imported/smollm2 --output ask.json

A document is NAME.txt; NAME.questions has a line for each question, "kind | question | answer",
and above them one for each kind, "kind: ten answers of that kind, with commas between them".

An answer is right if it contains the words of the answer, whatever their case: greedy, at most
--max-tokens.  It is likeliest if, of ten of its kind, it has the highest mean log-probability of a
token right behind the question.  The conditions:

    sight     everything in sight: a short-term memory as long as the document, where the model has
              positions for it
    memory    the model as it is
    window    no long-term memory, but a short-term one that is longer by as many keys
    nothing   no document: the question alone

What has been asked is kept in --output, from which a run that was stopped goes on.
"""

import argparse
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_inf.analysis.report import table
from fairseq_inf.errors import Failure, plain_errors
from fairseq_inf.files import read_text, whole_file
from fairseq_inf.hub import Memory, MemoryHub, open_hub
from fairseq_inf.models.generation import Continuation, OpenSegment

SIDE_BY_SIDE = 2  # answers
CONDITIONS = ("sight", "memory", "window", "nothing")


@dataclass
class Question:
    text: str
    answer: str
    others: list[str]  # of its kind, the answer among them


def read_questions(path: Path) -> list[Question]:
    kinds: dict[str, list[str]] = {}
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if "|" in line:
            kind, text, answer = (part.strip() for part in line.split("|"))
            if answer not in kinds.get(kind, []):
                raise Failure(f"{path}, line {number}: {answer} is not among those of {kind}")
            found.append(Question(text, answer, kinds[kind]))
        elif line.strip():
            kind, _, words = line.partition(":")
            kinds[kind.strip()] = [word.strip() for word in words.split(",")]
    return found


def settings_of(hub: MemoryHub, condition: str, tokens: int) -> dict[str, Any] | None:
    """Of the model in a condition; None where it has no positions for it.  tokens: of a document"""
    cfg = hub.cfg.model
    if condition == "memory":
        return {}
    keys = cfg.stm_length + hub.model.decoder.mean_slots()
    wanted = tokens + 512 if condition == "sight" else keys
    if wanted + hub.length > cfg.decoder_positions:
        return None
    return {"ltm_enabled": False, "stm_length": wanted}


def likeliest(hub: MemoryHub, memory: Memory, asked: Tensor, others: list[str]) -> int:
    """Which of these answers the model finds likeliest behind a question."""
    opened = OpenSegment(hub.model.decoder, hub.read_tokens(asked, memory).reading)
    means: list[float] = []
    for part in torch.arange(len(others)).split(SIDE_BY_SIDE):
        answers = [hub.tokens_of(others[number]) for number in part.tolist()]
        counts = opened.cache.reading.count.repeat(len(answers))
        branch = opened.branch(torch.zeros(len(answers), dtype=torch.long), counts)
        running = Continuation(hub.model.decoder, branch)
        padded = pad_sequence(answers, batch_first=True, padding_value=hub.dictionary.eos())
        logs = torch.zeros(padded.shape)
        for at in range(padded.size(1)):
            scores = running.output[:, -1].float().log_softmax(dim=-1)
            logs[:, at] = scores.gather(1, padded[:, at, None]).squeeze(1)
            if at + 1 < padded.size(1):
                running.feed(padded[:, at])
        rows = zip(logs, answers, strict=True)
        means += [float(row[: len(answer)].mean()) for row, answer in rows]
    return max(range(len(means)), key=means.__getitem__)


def ask(
    hub: MemoryHub, document: Path | None, questions: list[Question], max_tokens: int
) -> list[dict[str, Any]]:
    begin = time.time()
    if document is None:
        memory = hub.read_tokens(torch.zeros(0, dtype=torch.long))
    else:
        memory = hub.read_document(document)
    read = time.time() - begin
    turns, found = hub.turns, []
    opening = turns.opening if document is None else ()
    for question in questions:
        talk = hub.chat(memory)
        talk.before = (*opening, *talk.before)
        asked = hub.tokens_of_pieces(*talk.before, question.text, *turns.answer)
        said = "".join(talk.ask(question.text, max_tokens=max_tokens))
        best = likeliest(hub, memory, asked, question.others)
        found.append(
            {
                "question": question.text,
                "answer": question.answer,
                "said": said,
                "right": question.answer.casefold() in said.casefold(),
                "likeliest": question.others[best] == question.answer,
                "seconds_to_read": read,
            }
        )
    return found


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = json.loads(args.output.read_text("utf-8")) if args.output.is_file() else {}
    paths = sorted(args.folder.glob("*.questions"))
    if not paths:
        raise Failure(f"{args.folder} has no NAME.questions beside NAME.txt")
    own = open_hub(str(args.path), cpu=args.cpu)
    sizes = {path.stem: len(own.tokens_of_document(path.with_suffix(".txt"))) for path in paths}
    for condition in args.conditions:
        for path in sorted(paths, key=lambda path: sizes[path.stem]):
            questions = read_questions(path)
            key = f"{path.stem} {condition}"
            settings = settings_of(own, condition, sizes[path.stem])
            if key in found or settings is None:
                continue
            hub = open_hub(str(args.path), cpu=args.cpu, **settings) if settings else own
            document = None if condition == "nothing" else path.with_suffix(".txt")
            answers = ask(hub, document, questions, args.max_tokens)
            found[key] = {"tokens": sizes[path.stem], "answers": answers}
            with whole_file(args.output) as file:
                file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
            right, best = (sum(x[what] for x in answers) for what in ("right", "likeliest"))
            print(f"{key}: {right} right, {best} likeliest of {len(answers)}", flush=True)
    return found


def report(found: dict[str, Any]) -> str:
    """A row a size and condition, of the documents that have all of them."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for key, one in found.items():
        size = round(one["tokens"], -3)
        groups.setdefault((size, key.split()[1]), []).extend(one["answers"])
    rows = []
    for (size, condition), answers in sorted(
        groups.items(), key=lambda x: (x[0][0], CONDITIONS.index(x[0][1]))
    ):
        cells = [f"{sum(x[what] for x in answers)} of {len(answers)}" for what in
                 ("right", "likeliest")]  # fmt: skip
        rows.append([f"{size:,}", condition, *cells])
    return table(["tokens", "answered from", "right", "likeliest of ten"], rows)


def main() -> None:
    title, _, text = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=f"{title.split(': ')[1]}\n\n{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="with documents and questions")
    parser.add_argument("--path", type=Path, required=True, help="folder of an import")
    parser.add_argument("--output", type=Path, required=True, help="answers, JSON")
    parser.add_argument("--max-tokens", type=int, default=24, help="of an answer (24)")
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS, help="(all)"
    )
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    with plain_errors("asking"):
        logging.disable(logging.WARNING)
        print(report(measure(args)))


if __name__ == "__main__":
    main()
