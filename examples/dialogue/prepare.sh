#!/usr/bin/env bash
# CMU-DoG to a data-bin of conversations, each with its document; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash examples/dialogue/prepare.sh CMU_DOG_DIR DATA_BIN [options]

CMU_DOG_DIR  the data set as it is published, with Conversations/ and WikiData/
DATA_BIN     folder to make

A conversation becomes one stream: <doc> and all four sections of its document, then its turns, each
of them <speaker1> or <speaker2>, its words and </s>.  Conversations that stand in train are taken
out of valid and test; the counts are printed, and have to be those of the whole data set.

Without an option that names an encoding it is GPT-2's, from the folder GPT2_BPE (with encoder.json,
vocab.bpe and, to be kept, dict.txt), or downloaded to data/gpt2_bpe.

TEXT
    fairseq-inf-prepare-dialogue --help | sed -n '/^options/,$p'
}

[[ $# == 0 || $1 == -h || $1 == --help ]] && help && exit
[[ $# -gt 1 && $2 != -* ]] || { echo "prepare.sh: name DATA_BIN, the folder to make, after CMU_DOG_DIR" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
encoding=()
if [[ " $* " != *" --encoding"* && " $* " != *" --bpe"* && " $* " != *" --spm-model"* &&
    " $* " != *" --vocab-size"* ]]; then
    bpe=$(bash "$here/../gpt2/bpe.sh")
    encoding=(--bpe gpt2 --gpt2-bpe "$bpe")
fi
fairseq-inf-prepare-dialogue "$@" "${encoding[@]}"
