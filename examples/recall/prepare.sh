#!/usr/bin/env bash
# The data of the recall task; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash examples/recall/prepare.sh DATA_BIN [generator options]

Makes DATA_BIN with dict.txt, train, valid and test.  A folder that is there already stays as it is.

TEXT
    fairseq-inf-recall make --help | sed "1,/^$/d"
}

[[ $# == 0 || $1 == -h || $1 == --help ]] && help && exit
if [[ -e $1 ]]; then
    echo "$1 is there already"
else
    fairseq-inf-recall make "$@"
fi
