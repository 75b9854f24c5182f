#!/usr/bin/env bash
# PG-19 (or any folder in its layout) to a fairseq data-bin; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash examples/pg19/prepare.sh [PG19_DIR] [DATA_BIN]

PG19_DIR  folder with train/, validation/ and test/, each with <id>.txt files. Without it,
          or with "", the whole of PG-19 (11 GB, 28,752 books) is downloaded to data/pg19; a
          download that was broken off goes on where it stopped.
DATA_BIN  data-bin to write (data-bin/pg19)

environment variables:
  VOCAB_SIZE  size of the SentencePiece vocabulary (8000)
  BPE         sentencepiece or gpt2 (sentencepiece)
  GPT2_BPE    for BPE=gpt2: folder with encoder.json, vocab.bpe and dict.txt, all three from
              https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/
  BOOKS       take the first BOOKS books of the training set, in the order of their names (all)
  WORKERS     processes (all cores)
  PG19_URL    where to download from (https://storage.googleapis.com/deepmind-gutenberg)
TEXT
}

fail() {
    echo "$1" >&2
    exit 1
}

fetch() { # NAME: download one file, unless it is there already
    [[ -e $folder/$1 ]] && return
    curl -fs --retry 5 --connect-timeout 20 -o "$folder/$1.part" "$url/$1" &&
        mv "$folder/$1.part" "$folder/$1"
}

list() { # SPLIT: the names of the split's files; the bucket lists 1000 at a time
    local marker='' names
    while true; do
        names=$(curl -fs --retry 5 --get "$url" --data-urlencode "prefix=$1/" \
            --data-urlencode "marker=$marker" | { grep -o '<Key>[^<]*\.txt' || true; }) || return
        [[ $names ]] || return 0
        echo "${names//<Key>/}"
        marker=${names##*<Key>}
    done
}

download() {
    local split names again="run this again, or give a folder with PG-19: prepare.sh PG19_DIR."
    curl -fs --connect-timeout 20 --head "$url/metadata.csv" >/dev/null ||
        fail "PG-19 cannot be downloaded from $url (no network?): $again"
    mkdir -p "$folder"
    fetch metadata.csv || fail "$url/metadata.csv could not be downloaded: $again"
    for split in train validation test; do
        names=$(list "$split") || fail "$url does not list its $split files: $again"
        [[ $names ]] || fail "$url holds no $split files: $again"
        [[ $split != train || ! ${BOOKS:-} ]] || names=$(head -n "$BOOKS" <<<"$names")
        echo "downloading $(wc -l <<<"$names") files to $folder/$split ..."
        mkdir -p "$folder/$split"
        xargs -P 16 -I NAME bash -c 'fetch NAME' <<<"$names" ||
            fail "Some of the $split files could not be downloaded: $again"
    done
}

[[ ${1:-} == -h || ${1:-} == --help ]] && help && exit
(($# <= 2)) || fail "At most two arguments are taken, PG19_DIR and DATA_BIN: see --help."

[[ ${BOOKS:-1} =~ ^[1-9][0-9]*$ ]] || fail "BOOKS must be a positive number, got $BOOKS."
options=(${WORKERS:+--workers "$WORKERS"} ${BOOKS:+--train-documents "$BOOKS"})
if [[ ${BPE:-sentencepiece} == gpt2 ]]; then
    [[ ${GPT2_BPE:-} ]] || fail "BPE=gpt2 needs GPT2_BPE, a folder with encoder.json and vocab.bpe."
    options+=(--bpe gpt2 --gpt2-bpe "$GPT2_BPE")
else
    options+=(--bpe "${BPE:-sentencepiece}" --vocab-size "${VOCAB_SIZE:-8000}")
fi

url=${PG19_URL:-https://storage.googleapis.com/deepmind-gutenberg}
folder=${1:-data/pg19}
if [[ ! ${1:-} ]]; then
    export url folder
    export -f fetch
    download
fi

exec fairseq-inf-prepare "$folder" "${2:-data-bin/pg19}" "${options[@]}"
