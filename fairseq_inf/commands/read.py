"""fairseq-inf-read: read a text of any size and keep the memory of it in a file."""

import time

from fairseq_inf.commands import add_model, command_line, counted, open_model, text_named
from fairseq_inf.errors import plain_errors
from fairseq_inf.files import check_writable


def main() -> None:
    parser = command_line("fairseq-inf-read", __doc__)
    parser.add_argument("text", help="file in UTF-8, or - for standard input")
    add_model(parser)
    parser.add_argument("--output", required=True, help="memory file to write (.safetensors)")
    parser.add_argument("--memory", help="go on from this memory file")
    args = parser.parse_args()
    text = text_named(args.text, parser)
    try:
        check_writable(args.output)
    except OSError as error:
        parser.error(f"--output: {error}")

    with plain_errors(parser.prog):
        hub = open_model(args)
        begin = time.time()
        memory = hub.load_memory(args.memory) if args.memory else None
        memory = hub.read(text, memory, progress=True)
        memory.save(args.output)
    seconds = time.time() - begin
    print(f"{counted(memory.tokens, 'token')} in {args.output} after {seconds:.0f} seconds")


if __name__ == "__main__":
    main()
