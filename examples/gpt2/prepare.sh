#!/usr/bin/env bash
# WikiText-103, PG-19 or texts of one's own to a data-bin of GPT-2's tokens; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash examples/gpt2/prepare.sh wikitext-103 [WIKITEXT_DIR]
       bash examples/gpt2/prepare.sh pg19 [PG19_DIR]
       bash examples/gpt2/prepare.sh FOLDER

WIKITEXT_DIR  folder with wiki.{train,valid,test}.raw (or .tokens). Without it WikiText-103's raw
              version (192 MB) is downloaded to data/wikitext-103-raw.
PG19_DIR      folder with train/, validation/ and test/, each with <id>.txt files. Without it the
              first 2,000 books of PG-19's training set, its validation and its test set are
              downloaded to data/pg19.
FOLDER        any folder with train/, validation/ and test/, a .txt file for each document

Writes data-bin/gpt2-wikitext-103, data-bin/gpt2-pg19 or data-bin/gpt2-FOLDER.

environment variables:
  GPT2_BPE      folder with encoder.json and vocab.bpe, and dict.txt if it is to be kept. Without
                it they are downloaded to data/gpt2_bpe.
  DATA_BIN      data-bin to write, instead
  BOOKS         books of PG-19's training set (2000)
  WORKERS       processes (all cores)
  GPT2_BPE_URL, WIKITEXT_URL, PG19_URL   where to download from
TEXT
}

fail() {
    echo "$1" >&2
    exit 1
}

[[ ${1:-} == -h || ${1:-} == --help ]] && help && exit
(($# == 1 || $# == 2)) || fail "Name what to prepare, wikitext-103, pg19 or a folder: see --help."
here=$(cd "$(dirname "$0")" && pwd)
name=$1 folder=${2:-}
output=${DATA_BIN:-data-bin/gpt2-$(basename "$name")}
[[ -e $output ]] && fail "$output exists already: remove it or choose another DATA_BIN."

bpe=$(bash "$here/bpe.sh")

if [[ $name == pg19 ]]; then
    BPE=gpt2 GPT2_BPE=$bpe BOOKS=${BOOKS:-2000} exec bash "$here/../pg19/prepare.sh" "$folder" "$output"
fi
if [[ $name == wikitext-103 ]]; then
    if [[ ! $folder ]]; then
        folder=data/wikitext-103-raw
        [[ -e $folder/wiki.train.raw ]] || bash "$here/../wikitext103/download.sh" \
            "${WIKITEXT_URL:-https://wikitext.smerity.com/wikitext-103-raw-v1.zip}" "$folder"
    fi
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python "$here/split_wikitext.py" "$folder" "$scratch/articles"
    name=$scratch/articles
elif [[ $folder ]]; then
    fail "A folder of one's own is the only argument: see --help."
fi
fairseq-inf-prepare "$name" "$output" \
    --bpe gpt2 --gpt2-bpe "$bpe" ${WORKERS:+--workers "$WORKERS"}
