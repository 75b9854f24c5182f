"""The data of needles.yaml, made here."""

from random import Random

from datasets import Dataset

from fairseq_inf.experiments.haystack import FORMS, told


def questions(words, every, candidates, texts, **other):
    docs, draw = [], Random(0)
    for seed in range(1, texts + 1):
        text, needles = told(words, every, candidates, seed)
        for needle in needles:
            choices = draw.sample(needle.candidates, candidates)
            docs.append(
                {
                    "text": text,
                    "question": FORMS[needle.form].ask(needle.key),
                    "choices": choices,
                    "label": choices.index(needle.answer),
                    "distance": words - needle.place,
                }
            )
    return {"test": Dataset.from_list(docs)}


def said(doc, results):
    return {"acc": float(doc["choices"][doc["label"]].lower() in results[0].lower())}
