#!/usr/bin/env bash
# bash examples/dialogue/prepare.sh CMU_DOG_DIR DATA_BIN [options]: CMU-DoG to a data-bin of conversations.
# Where no option names an encoding it is GPT-2's, from the folder GPT2_BPE (with encoder.json,
# vocab.bpe and, to be kept, dict.txt), or downloaded to data/gpt2_bpe.
set -euo pipefail
[[ $# == 0 ]] && set -- --help
encoding=()
case " $* " in
*" -h "* | *" --help "* | *" --encoding"* | *" --bpe"* | *" --spm-model"* | *" --vocab-size"*) ;;
*)
    if [[ $# -gt 1 && $2 != -* ]]; then # otherwise the command says what is missing
        bpe=$(bash "$(dirname "$0")/../gpt2/bpe.sh")
        encoding=(--bpe gpt2 --gpt2-bpe "$bpe")
    fi
    ;;
esac
exec fairseq-inf-prepare-dialogue "$@" "${encoding[@]}"
