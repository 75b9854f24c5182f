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
from fairseq_inf.errors import Failure, plain_errors

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
        self.stream = hub.tokens_of_document(document)  # all that was read
        self.document, self.answer_at = len(self.stream), 0
        self.talk = hub.chat(hub.read_document(document, progress=True))

    def say(self, text: str) -> None:
        """Print the answer as it comes.  Ctrl-C stops it."""
        import torch

        answer = self.talk.ask(text, **self.settings)
        try:
            for part in answer:
                print(part, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" …")
            answer.close()
        self.answer_at = len(self.stream) + len(self.talk.asked)
        self.stream = torch.cat([self.stream, self.talk.asked, self.talk.answered])

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
            print(f"{chat.document:,} tokens of {args.document} have been read.  {HELP}.")
            talk(chat)
    except KeyboardInterrupt:
        print()
        sys.exit(130)


if __name__ == "__main__":
    main()
