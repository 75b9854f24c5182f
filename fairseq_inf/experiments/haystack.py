"""Facts told once in a long text, at known places, and what is asked of them at its end."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product

import torch
from torch import Tensor

from fairseq_inf.errors import Failure
from fairseq_inf.hub import MemoryHub

# a text of no data: who did what, where and when
WHO = "farmer teacher widow clerk child stranger nurse soldier gardener sailor cousin neighbour"
DID = (
    "carried {a} basket of {thing} to the {place}",
    "waited for the others at the {place}",
    "looked for the {thing}, and found nothing in the {place}",
    "talked of {thing} until it was dark",
    "walked from the {place} to the {place} without a word",
    "bought {thing}, and some {thing} for the way",
    "slept badly, and dreamed of {thing} in a {place}",
    "closed the door of the {place} and went home",
    "counted the {thing} again, and wrote it down",
    "asked the {who} about the {thing}",
)
THINGS = "apples candles letters ropes stones bread honey coal wool coins seeds lamps paper fish"
PLACES = "market bridge garden harbour kitchen field church station river forest cellar yard"
WHEN = (
    "In the morning,After the rain,Before noon,On that day,A week later,Then,"
    "Towards evening,As always,When the bell rang,In the cold,Soon,At last"
)

FIRST_NAMES = (
    "Abigail Adrian Agnes Albert Alfred Amanda Andrea Angela Anthony Arnold Barbara Bernard "
    "Beth Brian Bruce Carlos Caroline Cecil Clara Claude Colin Craig Dana Daniel "
    "Deborah Dennis Diana Donald Douglas Edith Edgar Edward Eric Ernest "
    "Esther Eugene Felix Florence Francis Gerald Gilbert Gordon Grace Gregory Hannah "
    "Harold Harriet Heather Howard Hugo Isaac Ivan Jerome Joan Joel "
    "Josephine Judith Keith Kenneth Laura Leon Linda Lloyd Lucas Marcus Marion"
)
PEOPLE = (
    "baker blacksmith barber butcher carpenter coachman cook ferryman fisherman glazier hunter "
    "innkeeper judge lawyer librarian mason miller painter plumber potter saddler shepherd tailor "
    "watchmaker weaver"
)
HOUSES = (
    "bank bakery brewery castle chapel college court dairy factory gallery hospital hotel library "
    "mill museum pharmacy post-office prison school stable theatre tower town-hall warehouse"
)
KINDS = "old young tall new quiet famous rich poor red green northern southern"
WORDS = (
    "anchor arrow barrel bell bottle brush bucket button camel carpet castle cherry copper cotton "
    "crystal diamond dragon drum eagle falcon feather finger flag flute ginger glass guitar hammer "
    "helmet iron island ivory jacket kettle ladder lemon leopard lion marble mirror needle olive "
    "orange oven pepper pillow pocket ribbon rocket saddle salmon scissors shadow silver "
    "spider sugar summer tiger tobacco tunnel turtle velvet violin wagon walnut window winter zebra"
)
NEAR = 32  # tokens that a fact may be moved by, to the end of a sentence
END = re.compile(r"(\n\n|[.!?][\"'”’)]*\n?)$")


def pairs(kinds: str, things: str) -> list[str]:
    return [f"{kind} {thing}" for kind, thing in product(kinds.split(), things.split())]


NUMBERS = [str(number) for number in range(1000, 10_000)]


@dataclass(frozen=True)
class Form:
    """What is told, and what is asked: of a key, for its answer."""

    fact: str
    question: str  # which ends where the answer begins
    keys: Sequence[str]
    answers: Sequence[str]

    def tell(self, key: str, answer: str) -> str:
        return self.fact.format(key=key, answer=answer)

    def ask(self, key: str) -> str:
        return self.question.format(key=key)


FORMS = {
    "name": Form(
        "The first name of the {key} is {answer}.",
        "\n\nWhat is the first name of the {key}? The first name of the {key} is",
        pairs(KINDS, PEOPLE),
        FIRST_NAMES.split(),
    ),
    "number": Form(
        "The telephone number of the {key} is {answer}.",
        "\n\nWhat is the telephone number of the {key}? The telephone number of the {key} is",
        pairs(KINDS, HOUSES),
        NUMBERS,
    ),
    # all alike but for the number, as RULER's many keys (Hsieh et al., 2024)
    "key": Form(
        "The secret word of box {key} is {answer}.",
        "\n\nWhat is the secret word of box {key}? The secret word of box {key} is",
        NUMBERS,
        WORDS.split(),
    ),
}


@dataclass
class Needle:
    form: str
    key: str
    candidates: list[str]  # the answer, then others
    place: int = 0  # tokens of the text before it
    length: int = 0  # tokens of the fact

    @property
    def answer(self) -> str:
        return self.candidates[0]


def sentences(seed: str) -> Iterator[str]:
    """A text without end, in which nothing of weight is said."""
    rng = random.Random(seed)
    words = {"who": WHO, "thing": THINGS, "place": PLACES, "a": "a another"}
    while True:
        what = re.sub(
            r"{(\w+)}", lambda match: rng.choice(words[match[1]].split()), rng.choice(DID)
        )
        yield f"{rng.choice(WHEN.split(','))} the {rng.choice(WHO.split())} {what}."


def haystack(hub: MemoryHub, tokens: int, seed: str) -> Tensor:
    """That many tokens of it, in paragraphs of five sentences."""
    source, parts, count = sentences(seed), [], 0
    while count < tokens:
        parts.append(hub.tokens_of(" ".join(islice(source, 5)) + "\n\n"))
        count += len(parts[-1])
    return torch.cat(parts)[:tokens]


def draw(
    forms: Sequence[str], count: int, candidates: int, text: str, rng: random.Random
) -> list[Needle]:
    """Facts in the order in which they are told, their forms by turns.  An answer of one is a
    candidate for others; names that the text has itself are not drawn if there are others."""
    order = list(islice(cycle(rng.sample(forms, len(forms))), count))
    said, needles = set(re.findall(r"\w+", text)), {}
    for name in forms:
        form, own = FORMS[name], order.count(name)
        if own > len(form.keys):
            raise Failure(
                f"there are {len(form.keys)} facts of a {name}, {own} are asked for: "
                "a larger --every takes fewer"
            )
        free = [answer for answer in form.answers if answer not in said]
        answers = free if len(free) >= candidates else list(form.answers)
        keys = [key for key in form.keys if key not in said or name != "key"]
        keys = rng.sample(keys if len(keys) >= own else list(form.keys), own)
        told = list(islice(cycle(rng.sample(answers, len(answers))), own))
        needles[name] = iter(
            [
                Needle(name, key, [answer, *others(answer, told, answers, candidates - 1, rng)])
                for key, answer in zip(keys, told, strict=True)
            ]
        )
    return [next(needles[name]) for name in order]


def others(
    answer: str, told: Sequence[str], answers: Sequence[str], count: int, rng: random.Random
) -> list[str]:
    """First those that are answers of other facts."""
    near = [x for x in dict.fromkeys(told) if x != answer]
    far = [x for x in rng.sample(answers, min(len(answers), count + len(told) + 1)) if x != answer]
    rest = [x for x in far if x not in near]
    return (rng.sample(near, len(near)) + rest)[:count]


def plant(
    hub: MemoryHub,
    hay: Tensor,
    forms: Sequence[str],
    every: int,
    candidates: int,
    seed: str,
) -> tuple[Tensor, list[Needle]]:
    """A fact in each `every` tokens of a text, at the end of a sentence if one is near.
    -> as many tokens as the text has, and the facts"""
    rng = random.Random(seed)
    needles = draw(forms, len(hay) // every, candidates, hub.text_of(hay), rng)
    parts: list[Tensor] = []
    at = used = 0  # tokens so far, and of the text
    for number, needle in enumerate(needles):
        target = number * every + rng.randint(every // 4, every // 2)
        place = border(hub, hay, used + target - at, min(NEAR, every // 8))
        before = hub.text_of(hay[max(place - 3, 0) : place])
        fact = FORMS[needle.form].tell(needle.key, needle.answer)
        ending = re.search(r"\n*$", before)
        line = f"{fact}{ending[0]}" if ending and ending[0] else f" {fact}"
        told = hub.tokens_of(line)
        if len(told) > every // 4:
            raise Failure(f"--every {every} leaves no room for a fact of {len(told)} tokens")
        needle.place, needle.length = at + place - used, len(told)
        parts += [hay[used:place], told]
        at, used = needle.place + len(told), place
    return torch.cat([*parts, hay[used:]])[: len(hay)], needles


def border(hub: MemoryHub, hay: Tensor, place: int, near: int) -> int:
    """The nearest place behind a sentence; `place` itself if there is none."""
    for off in sorted(range(-near, near + 1), key=abs):
        at = place + off
        if 0 < at <= len(hay) and END.search(hub.text_of(hay[max(at - 3, 0) : at])):
            return at
    return place


def told(words: int, every: int, candidates: int, seed: int) -> tuple[str, list[Needle]]:
    """The same for any model, and with no data: dull sentences with a fact in each `every` words.
    -> the text, and its facts with their places in words"""
    rng, said, parts, at = random.Random(seed), sentences(f"{seed}"), [], 0
    needles = draw(list(FORMS), words // every, candidates, "", rng)
    for number, needle in enumerate(needles):
        needle.place = number * every + rng.randint(every // 4, every // 2)
    left = list(needles)
    while at < words:
        if left and at >= left[0].place:
            needle = left.pop(0)
            parts.append(FORMS[needle.form].tell(needle.key, needle.answer))
            needle.place, needle.length = at, len(parts[-1].split())
        else:
            parts.append(next(said))
        at += len(parts[-1].split())
    return " ".join(parts), needles
