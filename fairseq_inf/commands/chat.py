"""fairseq-inf-chat: read a document into the memory, and talk about it in the terminal.

    fairseq-inf-chat --path imported/smollm2 --document notes.txt
    fairseq-inf-chat --path imported/smollm2 --document notes.txt --ask "Where is the ferry?"

with an instruction-tuned model that fairseq-inf-import has left, or one of --task dialogue.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_inf.commands import add_model, check_draws, command_line, open_model
from fairseq_inf.errors import plain_errors
from fairseq_inf.files import read_text

if TYPE_CHECKING:
    from fairseq_inf.hub import MemoryHub

COMMAND = "fairseq-inf-chat"
HELP = (
    "/why shows what the last answer looked at in the document, Ctrl-C stops an answer, /bye or "
    "Ctrl-D ends the talk"
)


class Chat:
    """A talk in the terminal."""

    def __init__(self, hub: "MemoryHub", document: Path, settings: dict[str, Any]) -> None:
        self.hub, self.settings = hub, settings
        tokens = hub.tokens_of_document(document)
        self.size = len(tokens)
        # what stands before it, of which the last token may be one with its first
        self.first = self.size - len(hub.tokens_of(read_text(document).strip()))
        self.document = tokens[self.first :]
        self.after = hub.read_document(document, progress=True)
        self.talk = hub.chat(self.after)
        self.usual: Any = None  # what answers look at that say nothing of it

    def say(self, text: str) -> None:
        """Print the answer as it comes.  Ctrl-C stops it."""
        answer = self.talk.ask(text, **self.settings)
        try:
            for part in answer:
                print(part, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" …")
            answer.close()

    def why(self) -> str:
        from fairseq_inf.analysis.why import explained, looks, usual

        if not len(self.talk.answered):
            return "there is no answer yet: say something"
        if self.usual is None:
            self.usual = usual(self.hub, self.after)
        own = looks(self.hub, self.talk.past, self.talk.answered)
        return explained(self.hub, own, self.usual, self.first, self.document)


def talk(chat: Chat) -> None:
    while True:
        print("you: ", end="", flush=True)
        chat.talk.get_ready()  # while the question is typed
        try:
            typed = input().encode("utf-8", "replace").decode()
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
            print("it:  ", end="", flush=True)
            chat.say(text)


def main() -> None:
    epilog = __doc__.partition("\n")[2]
    layout = argparse.RawDescriptionHelpFormatter
    parser = command_line(COMMAND, __doc__, epilog=epilog, formatter_class=layout)
    add_model(parser)
    parser.add_argument("--document", required=True, type=Path, help="text to talk about, in UTF-8")
    parser.add_argument("--ask", metavar="QUESTION", help="answer this and end")
    parser.add_argument("--topp", type=float, help="draw from so large a nucleus (the likeliest)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (256)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    args = parser.parse_args()
    if not args.document.is_file():
        parser.error(f"--document {args.document} does not exist or is not a file")
    if args.ask is not None and not args.ask.strip():
        parser.error("--ask is empty: it must be a question")
    check_draws(parser, args)
    try:
        import torch

        logging.disable(logging.INFO)
        with plain_errors(COMMAND):
            hub = open_model(args)
            torch.manual_seed(args.seed)
            settings = {"topp": args.topp, "max_tokens": args.max_tokens}
            chat = Chat(hub, args.document, settings)
            if args.ask is not None:
                for part in chat.talk.ask(" ".join(args.ask.split()), **settings):
                    print(part, end="", flush=True)
                print()
                return
            print(f"{chat.size:,} tokens of {args.document} have been read.  {HELP}.")
            talk(chat)
    except KeyboardInterrupt:
        print()
        sys.exit(130)


if __name__ == "__main__":
    main()
