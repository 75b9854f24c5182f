"""Which facts of a document a model still knows once the document is in its memory."""

import re

import torch

from fairseq_inf.models.generation import read

from .answers import Answers, pad
from .turns import END, SPEAKERS

AMONG = 10  # documents: the one that has the fact, and others
# what is looked for in a document, and a conversation that ends where it would be said
QUESTIONS = {
    "film": (r"Film: (.+)", "what is the movie called?", "it is called"),
    "cast": (r"Cast: (.+?) as ", "who is in it?", "it stars"),
    "director": (r"Director: (.+)", "who directed it?", "it was directed by"),
}


@torch.no_grad()
def known_facts(
    answers: Answers, among: int = AMONG, rows: int = 16
) -> dict[str, tuple[float, float]]:
    """Each fact of the documents of conversations is asked for after its own document and after the
    next ones, `among` in all.  It is known where it is likeliest after its own; how likely a
    name is by itself, or how long, does not matter.  A fact that another document holds, too, is
    left out.
    -> of each question that `among` documents or more can answer, the share that is known, and what
    the own document adds to the log-probability, over the mean of the others, in nats"""
    hub, reading = answers.hub, answers.after_documents
    decoder = hub.model.decoder
    first, end, second = (
        torch.tensor([decoder.dictionary.index(x)]) for x in (SPEAKERS[0], END, SPEAKERS[1])
    )
    texts = [hub.text_of(document) for document in answers.documents]
    known = {}
    for name, (pattern, question, answer) in QUESTIONS.items():
        matches = [re.search(pattern, text) for text in texts]
        names = [match.group(1).strip() if match else "" for match in matches]
        owner = [i for i, x in enumerate(names) if x and sum(x in text for text in texts) == 1]
        if len(owner) < among:
            continue
        before = torch.cat(
            [first, hub.tokens_of(f" {question}"), end, second, hub.tokens_of(f" {answer}")]
        )
        lines = [torch.cat([before, hub.tokens_of(f" {names[i]}")]) for i in owner]
        asked, counts = pad(lines, decoder.dictionary.pad())
        # fact x document, the own one first
        fact = torch.arange(len(owner))[:, None]
        document = torch.tensor(owner)[(fact + torch.arange(among)) % len(owner)].flatten()
        fact = fact.expand(-1, among).flatten()
        # the open segments of a batch are read again: those of about the same length together
        order = reading.count.cpu()[document].argsort(stable=True)
        logs = torch.zeros(len(fact), dtype=torch.double)
        for some in order.split(rows):
            _, scores = read(
                decoder,
                reading.rows(document[some].to(hub.device)),
                asked[fact[some]].to(hub.device),
                counts[fact[some]].to(hub.device),
                score=True,
            )
            logs[some] = scores[:, len(before) :].sum(1).double().cpu()
        after_own, after_others = logs.view(-1, among).split([1, among - 1], dim=1)
        likeliest = (after_own > after_others).all(1).double()
        gain = after_own.mean() - after_others.mean()
        known[name] = (float(likeliest.mean()), float(gain))
    return known
