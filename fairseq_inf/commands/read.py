"""fairseq-inf-read: read a text of any size and keep the memory of it in a file."""

import argparse
import time

from fairseq_inf.commands import text_named
from fairseq_inf.errors import plain_errors


def main() -> None:
    parser = argparse.ArgumentParser(prog="fairseq-inf-read", description=__doc__.split(": ")[1])
    parser.add_argument("text", help="file in UTF-8, or - for standard input")
    parser.add_argument("--path", required=True, help="checkpoint of the model")
    parser.add_argument("--data", required=True, help="data-bin that it was trained on")
    parser.add_argument("--output", required=True, help="memory file to write (.safetensors)")
    parser.add_argument("--memory", help="go on from this memory file")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    text = text_named(args.text, parser)

    from fairseq_inf.files import check_writable
    from fairseq_inf.hub import open_hub

    try:
        check_writable(args.output)
    except OSError as error:
        parser.error(f"--output: {error}")
    with plain_errors("fairseq-inf-read"):
        hub = open_hub(args.path, args.data, args.cpu)
        begin = time.time()
        memory = hub.load_memory(args.memory) if args.memory else None
        memory = hub.read(text, memory, progress=True)
        memory.save(args.output)
    seconds = time.time() - begin
    print(f"{memory.tokens:,} tokens are in {args.output} after {seconds:.0f} seconds")


if __name__ == "__main__":
    main()
