"""What answers have looked at in their documents, for people to read."""

import torch

from fairseq_inf.analysis.why import attended, excerpts
from fairseq_inf.errors import Failure

from .answers import Answers, Said


def explain(answers: Answers, answered: int, count: int = 3, each: int = 3) -> str:
    """The first responses, `each`, of conversations that are evenly spaced over the first ones,
    `answered`, with what the model said and looked at.  -> Markdown"""
    lines = []
    for number in range(0, answered, -(-answered // count)):
        base = int(answers.streams[number].turn[0])
        first, *responses = answers.turns[base : base + each + 1]
        lines += [f"Conversation {number + 1}", "", f"- {first.text}"]
        for said in responses:
            answer = " ".join(said.answer.split())
            lines += [f"- {said.text}", f"  - model: {answer or '(nothing)'}"]
            looks = _looks(answers, said)
            lines += [f"  - looked at {looks}"] if looks else []
        lines.append("")
    return "\n".join(lines)


def _looks(answers: Answers, said: Said) -> str:
    """What an answer looked at in the document, nothing where words have no place."""
    hub, stream = answers.hub, answers.streams[said.conversation]
    document = answers.documents[stream.document]
    before = stream.tokens[stream.turn < int(stream.turn[0]) + said.turn]
    marker = stream.tokens[len(before)][None]
    answer = hub.tokens_of(f" {said.answer}")
    tokens = torch.cat([document, before, marker, answer])
    try:
        weights = attended(hub, tokens, len(tokens) - len(answer))[: len(document)]
    except Failure:
        return ""
    found = [(text, weight) for text, weight in excerpts(hub, document, weights) if weight > 0]
    return ", ".join(f"“{text}” {100 * weight:.1f} %" for text, weight in found)
