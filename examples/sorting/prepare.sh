#!/usr/bin/env bash
# The data of the sorting task, a folder for each length; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash examples/sorting/prepare.sh [LENGTH ...]

Makes data-bin/sorting-LENGTH for each LENGTH, tokens of a sequence (4000 8000 16000, the paper's).
A folder that is there already stays as it is.

environment variables:
  DATA        where to make them (data-bin)
  VOCABULARY  different tokens (20)
  SIZES       sequences to train on, to validate and to test with ("8000 800 800")
  SEED        another seed gives other sequences (1)
TEXT
}

[[ ${1:-} == -h || ${1:-} == --help ]] && help && exit
(($#)) || set -- 4000 8000 16000
read -ra sizes <<<"${SIZES:-8000 800 800}"
for length in "$@"; do
    folder=${DATA:-data-bin}/sorting-$length
    if [[ -e $folder ]]; then
        echo "$folder is there already"
        continue
    fi
    fairseq-inf-sorting make "$folder" --length "$length" --sizes "${sizes[@]}" \
        --vocabulary "${VOCABULARY:-20}" --seed "${SEED:-1}"
done
