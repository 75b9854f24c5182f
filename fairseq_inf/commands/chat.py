"""fairseq-inf-chat: read a document into the memory, and talk about it in the terminal."""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_inf.commands import check_draws
from fairseq_inf.errors import Failure, plain_errors

if TYPE_CHECKING:
    from fairseq_inf.hub import MemoryHub

DOCUMENT, YOU, ME = MARKERS = ("<doc>", "<speaker1>", "<speaker2>")
HELP = "/why shows what the last answer looked at in the document, /bye or Ctrl-D ends the talk"


class Chat:
    """You are <speaker1>, the model is <speaker2>."""

    def __init__(self, hub: "MemoryHub", document: Path, settings: dict[str, Any]) -> None:
        import torch

        self.hub, self.settings, self.torch = hub, settings, torch
        words = hub.dictionary
        for word in MARKERS:
            if word not in words:
                raise Failure(f"the model does not know {word}: name one of --task dialogue.")
        self.marker = {word: torch.tensor([words.index(word)]) for word in MARKERS}
        self.end = torch.tensor([words.eos()])
        text = self._text(document)
        self.memory = hub.read_tokens(self.marker[DOCUMENT])
        self.memory = hub.read(text, self.memory, progress=True)
        # all that was read
        self.stream = torch.cat([self.marker[DOCUMENT], hub.tokens_of(text)])
        self.document, self.answer_at = len(self.stream), 0

    @staticmethod
    def _text(document: Path) -> str:
        try:
            text = document.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Failure(f"--document {document} is not UTF-8: convert it.") from None
        if not text.strip():
            raise Failure(f"--document {document} is empty: there must be something to talk about.")
        return text

    def _read(self, *parts: Any) -> None:
        tokens = self.torch.cat(parts)
        self.memory = self.hub.read_tokens(tokens, self.memory)
        self.stream = self.torch.cat([self.stream, tokens])

    def say(self, text: str) -> str:
        """-> the answer"""
        said = self.hub.tokens_of(f" {text}")
        self._read(self.marker[YOU], said, self.end, self.marker[ME])
        [answer] = self.hub.go_on(self.memory.reading, without=MARKERS, **self.settings)
        self.answer_at = len(self.stream)
        self._read(answer.cpu())  # with its end
        return self.hub.text_of(answer).strip()

    def why(self) -> str:
        from fairseq_inf.analysis.why import attended, excerpts

        if not self.answer_at:
            return "there is no answer yet: say something"
        try:
            weights = attended(self.hub, self.stream, self.answer_at)[: self.document]
        except Failure as failure:  # which ends no talk
            return str(failure)
        found = excerpts(self.hub, self.stream[: self.document], weights)
        lines = [f"  {100 * weight:4.1f} %  {text}" for text, weight in found if weight > 0]
        share = f"{100 * float(weights.sum()):.0f} % of its looks at words in the long-term memory"
        if not lines:
            return "nothing of the document is in the long-term memory yet"
        return "\n".join([f"{share} went to the document, most to", *lines])


def talk(chat: Chat) -> None:
    while True:
        try:
            typed = input("you: ").encode("utf-8", "replace").decode()
            text = " ".join(typed.split())
        except EOFError:
            print()
            return
        if text in ("/bye", "/quit", "/exit"):
            return
        if text == "/why":
            print(chat.why())
        elif text.startswith("/"):
            print(HELP)
        elif text:
            print(f"it:  {chat.say(text)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="fairseq-inf-chat", description=__doc__.split(": ")[1])
    parser.add_argument("--path", required=True, help="checkpoint of a model of --task dialogue")
    parser.add_argument("--data", required=True, help="data-bin that it was trained on")
    parser.add_argument("--document", required=True, type=Path, help="text to talk about, in UTF-8")
    parser.add_argument("--topp", type=float, default=0.9, help="nucleus that is drawn from (0.9)")
    parser.add_argument("--max-tokens", type=int, default=50, help="of an answer (50)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    if not args.document.is_file():
        parser.error(f"--document {args.document} does not exist or is not a file")
    check_draws(parser, args)
    try:
        import torch

        from fairseq_inf.hub import open_hub

        logging.disable(logging.INFO)
        with plain_errors("fairseq-inf-chat"):
            hub = open_hub(args.path, args.data, args.cpu)
            torch.manual_seed(args.seed)
            settings = {"sampling": True, "sampling_topp": args.topp, "max_tokens": args.max_tokens}
            chat = Chat(hub, args.document, settings)
            print(f"{chat.document - 1:,} tokens of {args.document} are in the memory.  {HELP}.")
            talk(chat)
    except KeyboardInterrupt:
        print()
        sys.exit(130)


if __name__ == "__main__":
    main()
