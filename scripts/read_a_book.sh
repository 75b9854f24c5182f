#!/usr/bin/env bash
# SmolLM2 reads a book into an unbounded memory, as it is, without training; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash scripts/read_a_book.sh [BOOK.txt] [PROMPT]

Sets up, fetches SmolLM2-135M, reads the book into a memory, keeps it in a file, prints the perplexity of
the same text by segments alone, with a window and with a long-term memory, goes on from PROMPT, and asks
for a fact that the script has told on the first page.

  BOOK    a text in UTF-8 (default: a novel of FAIRSEQ_INF_DATA, a folder with pg19/test/)
  PROMPT  what to go on from after the book (default: its own last words)

  OUT=read_a_book  folder for everything; run it again to go on where it stopped
  CHARACTERS=30000 how much of the book is read, about 4 to a token; 0 for all of it
TEXT
}

[[ ${1:-} == -h || ${1:-} == --help ]] && help && exit
out=${OUT:-read_a_book} characters=${CHARACTERS:-30000}
book=${1:-${FAIRSEQ_INF_DATA:+$(find "$FAIRSEQ_INF_DATA/pg19/test" -name '*.txt' 2>/dev/null | sort | head -n 1)}}
[[ -n $book ]] || { echo "read_a_book: name a text file (or set FAIRSEQ_INF_DATA)" >&2; exit 1; }
[[ -f $book ]] || { echo "read_a_book: $book does not exist or is not a file" >&2; exit 1; }
[[ $characters =~ ^[0-9]+$ ]] || { echo "read_a_book: CHARACTERS must be a number" >&2; exit 1; }
book=$(cd "$(dirname "$book")" && pwd)/$(basename "$book")
prompt=${2:-}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
source scripts/setup.sh
begin=$SECONDS
say() { printf '\n[%d:%02d] %s\n' $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)) "$1"; }
quietly() { # LOG COMMAND: show what a command printed only if it fails
    local log=$1
    shift
    "$@" >"$log" 2>&1 || { tail -n 20 "$log" >&2; echo "read_a_book: stopped, see $log" >&2; exit 1; }
}

say "1/5 Fetch SmolLM2, and give it a memory: 1,024 keys and values of each layer, which its window has lost"
(cd "$out" && bash "$OLDPWD/examples/pretrained/fetch.sh" smollm2)
[ -d "$out/model" ] || quietly "$out/import.log" python -m fairseq_inf.commands.import_model \
    "$out/models/smollm2.gguf" "$out/model" --arch selective_memory_lm_llama --tokens-per-sample 256

say "2/5 Read $book"
dogs="Barnaby Rufus Oscar Duke Bella Jasper Molly Hector Daisy Bruno"
python - "$book" "$out/text" "$characters" "$dogs" <<'PY'
import pathlib, sys
book, folder, most = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
try:
    text = book.read_text(encoding="utf-8")
except UnicodeDecodeError:
    sys.exit(f"read_a_book: {book} is not UTF-8: convert it")
if most and len(text) > most:
    print(f"the first {most:,} of its {len(text):,} characters (CHARACTERS=0 for all)")
    text = text[:most]
dog = next(name for name in sys.argv[4].split() if name not in text)
at = max(text.find("\n\n", 1000), 0)
text = f"{text[:at]}\n\nThe ferryman's dog was called {dog}.{text[at:]}"
print(f"told on its first page: The ferryman's dog was called {dog}.")
(folder / "test").mkdir(parents=True, exist_ok=True)
(folder / "test" / "book.txt").write_text(text, encoding="utf-8")
PY
python -m fairseq_inf.commands.read "$out/text/test/book.txt" --path "$out/model/checkpoint.pt" \
    --data "$out/model" --output "$out/memory.safetensors" --cpu

say "3/5 What the memories are worth: the perplexity of the same text"
rm -rf "$out/bin"
quietly "$out/prepare.log" python -m fairseq_inf.commands.prepare "$out/text" "$out/bin" --encoding "$out/model"
field() { grep -oE "$2[0-9.,]+" "$1" | tail -n 1 | grep -oE '[0-9][0-9.,]*'; }
evaluate() { # TITLE OVERRIDES NAME
    quietly "$out/$3.log" fairseq-eval-lm "$out/bin" --user-dir fairseq_inf --task long_sequence_lm \
        --path "$out/model/checkpoint.pt" --model-overrides "$2" --cpu --no-progress-bar
    printf '  %-52s %8s\n' "$1" "$(field "$out/$3.log" 'Perplexity: ')"
}
evaluate "segments of 256 tokens, each for itself" "{'stm_length': 0, 'sink_tokens': 0, 'ltm_enabled': False}" alone
evaluate "with a window of 256 before the segment, 4 sinks" "{'ltm_enabled': False}" short
evaluate "with a long-term memory of 1,024 as well" "{}" long

say "4/5 What comes next?"
python -W ignore - "$out" "$prompt" <<'PY'
import logging, pathlib, sys
logging.disable(logging.WARNING)
from fairseq_inf.models import SelectiveMemoryLM
out, prompt = pathlib.Path(sys.argv[1]), sys.argv[2]
hub = SelectiveMemoryLM.from_pretrained(str(out / "model"), "checkpoint.pt", ".")
memory = hub.load_memory(out / "memory.safetensors")
if not prompt:
    print("…" + (out / "text" / "test" / "book.txt").read_text(encoding="utf-8")[-200:], end="")
print(prompt + "[" + hub.generate(prompt, memory, max_tokens=60, sampling=True, sampling_topp=0.8) + "]")
PY

say "5/5 What does it know of the first page?  The ferryman's dog was called …"
python -W ignore - "$out" "$dogs" <<'PY'
import logging, pathlib, sys
import torch
logging.disable(logging.WARNING)
from fairseq_inf.models import SelectiveMemoryLM
out, dogs = pathlib.Path(sys.argv[1]), sys.argv[2].split()
def ask(title, memory, **settings):
    hub = SelectiveMemoryLM.from_pretrained(str(out / "model"), "checkpoint.pt", ".", **settings)
    known = memory(hub)
    asked = [f"\n\nThe ferryman's dog was called {dog}" for dog in dogs]
    logs = [hub.score(text, known)["positional_scores"].sum() for text in asked]
    shares = torch.stack(logs).softmax(dim=0)
    best = ", ".join(f"{dogs[i]} {100 * shares[i]:.0f} %" for i in shares.argsort(descending=True)[:3])
    print(f"  {title:<22} {best}, …  (of {len(dogs)} names)")
text = (out / "text" / "test" / "book.txt").read_text(encoding="utf-8")
ask("with its memory", lambda hub: hub.load_memory(out / "memory.safetensors"))
ask("with its window alone", lambda hub: hub.read(text), ltm_enabled=False)
PY

say "Done: the memory of the book is in $out/memory.safetensors"
