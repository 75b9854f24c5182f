"""Which facts of a document a model still knows once the document is in its memory."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_inf.data.dialogue import END, SPEAKERS
from fairseq_inf.hub import MemoryHub
from fairseq_inf.models.generation import new_reading, read

from .answers import pad

AMONG = 10  # documents, the own one and others
# what is looked for in a document, and a conversation that ends where it would be said
QUESTIONS = {
    "film": (r"Film: (.+)", "what is the movie called?", "it is called"),
    "cast": (r"Cast: (.+?) as ", "who is in it?", "it stars"),
    "director": (r"Director: (.+)", "who directed it?", "it was directed by"),
}


@torch.no_grad()
def known_facts(
    hub: MemoryHub, documents: Sequence[Tensor], among: int = AMONG, rows: int = 16
) -> dict[str, tuple[float, float]]:
    """Each fact is asked for after its own document and after the next ones, `among` in all.  It is
    known where it is likeliest after its own; how likely a name is by itself, or how long, does not
    matter.  A fact that another document holds, too, is left out.
    -> of each question that `among` documents or more can answer, the share that is known, and what
    the own document adds to the log-probability, over the mean of the others, in nats"""
    decoder = hub.model.decoder
    texts, lengths = pad(documents, decoder.dictionary.pad())
    reading = new_reading(decoder, len(texts), hub.length)
    reading = read(decoder, reading, texts.to(hub.device), lengths.to(hub.device))
    first, end, second = (
        torch.tensor([decoder.dictionary.index(x)]) for x in (SPEAKERS[0], END, SPEAKERS[1])
    )
    spelled = [hub.text_of(document) for document in documents]
    found = {}
    for name, (pattern, question, answer) in QUESTIONS.items():
        facts = {
            i: m.group(1).strip() for i, x in enumerate(spelled) if (m := re.search(pattern, x))
        }
        owner = [i for i, fact in facts.items() if sum(fact in x for x in spelled) == 1]
        if len(owner) < among:
            continue
        before = torch.cat(
            [first, hub.tokens_of(f" {question}"), end, second, hub.tokens_of(f" {answer}")]
        )
        lines = [torch.cat([before, hub.tokens_of(f" {facts[i]}")]) for i in owner]
        asked, counts = pad(lines, decoder.dictionary.pad())
        # fact x document, the own one first
        fact = torch.arange(len(owner))[:, None]
        document = torch.tensor(owner)[(fact + torch.arange(among)) % len(owner)].flatten()
        fact = fact.expand(-1, among).flatten()
        logs = torch.cat([
            read(
                decoder,
                reading.rows(document[some].to(hub.device)),
                asked[fact[some]].to(hub.device),
                counts[fact[some]].to(hub.device),
                score=True,
            )[1][:, len(before) :].sum(1).cpu()
            for some in torch.arange(len(fact)).split(rows)
        ]).double().view(-1, among)  # fmt: skip
        own, others = logs[:, 0], logs[:, 1:]
        known = (own > others.amax(1)).double()
        gain = own - others.mean(1)
        found[name] = (float(known.mean()), float(gain.mean()))
    return found
