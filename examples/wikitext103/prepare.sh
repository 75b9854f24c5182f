#!/usr/bin/env bash
# WikiText-103 to a fairseq data-bin; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash examples/wikitext103/prepare.sh [WIKITEXT_DIR] [DATA_BIN]

WIKITEXT_DIR  folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens. Without it,
              or with "", WikiText-103 (181 MB) is downloaded to data/wikitext-103.
DATA_BIN      data-bin to write (data-bin/wikitext-103)

environment variables:
  WORDS         keep that many of the most frequent words, the others become <unk> (all 267,744):
                a small vocabulary for the small configs; its perplexities compare only with
                each other
  WORKERS       processes (all cores)
  WIKITEXT_URL  where to download from (https://wikitext.smerity.com/wikitext-103-v1.zip)
TEXT
}

fail() {
    echo "$1" >&2
    exit 1
}

[[ ${1:-} == -h || ${1:-} == --help ]] && help && exit
(($# <= 2)) || fail "At most two arguments are taken, WIKITEXT_DIR and DATA_BIN: see --help."
[[ ${WORDS:-1} =~ ^[1-9][0-9]*$ ]] || fail "WORDS must be a positive number, got $WORDS."

folder=${1:-data/wikitext-103}
output=${2:-data-bin/wikitext-103}
output=${output%/}
[[ -e $output ]] && fail "$output exists already: remove it or choose another DATA_BIN."
if [[ ! ${1:-} && ! -e $folder/wiki.train.tokens ]]; then
    bash "$(dirname "$0")/download.sh" \
        "${WIKITEXT_URL:-https://wikitext.smerity.com/wikitext-103-v1.zip}" "$folder"
fi
for split in train valid test; do
    [[ -s $folder/wiki.$split.tokens ]] ||
        fail "$folder/wiki.$split.tokens does not exist: WIKITEXT_DIR must hold the three splits."
done

partial=$output.partial
rm -rf "$partial"
trap 'rm -rf "$partial"' EXIT
fairseq-preprocess --only-source --trainpref "$folder/wiki.train.tokens" \
    --validpref "$folder/wiki.valid.tokens" --testpref "$folder/wiki.test.tokens" \
    --destdir "$partial" --workers "${WORKERS:-$(nproc)}" ${WORDS:+--nwordssrc "$WORDS"}
mv "$partial" "$output"
echo "$output is ready: $(wc -l <"$output/dict.txt") words"
