"""A tokenizer.json of the lists that a .gguf file has: tokens, their types, merges or scores."""

import json
from typing import Any

from fairseq_inf.errors import Failure

# what a text is cut into before pairs are merged, by tokenizer.ggml.pre
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
PRE = {
    "gpt-2": [WORDS],
    "smollm": [DIGITS, WORDS],
    "llama-bpe": [SPLIT, {**WORDS, "use_regex": False}],
}
CONTROL, USER_DEFINED, BYTE = 3, 4, 6


def byte_level(lists: dict[str, Any]) -> str:
    """GPT-2's kind of encoding, as of SmolLM2 and Llama 3."""
    kind = lists.get("pre", "gpt-2")
    if kind not in PRE:
        known = ", ".join(PRE)
        raise Failure(
            f"tokenizer.ggml.pre is {kind!r}, only {known} can be imported: import the model from "
            "its folder of Hugging Face's"
        )
    model = _bpe(lists["tokens"], [pair.split(" ") for pair in lists["merges"]])
    model["ignore_merges"] = kind == "llama-bpe"
    steps = {"type": "Sequence", "pretokenizers": PRE[kind]}
    return _text(lists, model, pre_tokenizer=steps, decoder=WORDS)


def pieces(lists: dict[str, Any]) -> str:
    """SentencePiece's kind, as of Llama 2: pairs are merged by the score of what they give."""
    tokens = lists["tokens"]
    scores = dict(zip(tokens, lists["scores"], strict=True))
    types = lists.get("token_type", [1] * len(tokens))
    plain = {x for x, kind in zip(tokens, types, strict=True) if kind not in (CONTROL, BYTE)}
    merges = [
        (-scores[token], token[:at], token[at:])
        for token in plain
        for at in range(1, len(token))
        if token[:at] in plain and token[at:] in plain
    ]
    model = _bpe(tokens, [list(pair) for _, *pair in sorted(merges)])
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": tokens[0]}
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoder = {"type": "Sequence", "decoders": steps}
    return _text(lists, model, normalizer=blank, decoder=decoder)


def _bpe(tokens: list[str], merges: list[list[str]]) -> dict[str, Any]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges}


def _text(lists: dict[str, Any], model: dict[str, Any], **steps: Any) -> str:
    tokens, types = lists["tokens"], lists.get("token_type", [])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": tokens[i], "special": kind == CONTROL, **plain}
        for i, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    return json.dumps({"version": "1.0", "added_tokens": added, **steps, "model": model})
