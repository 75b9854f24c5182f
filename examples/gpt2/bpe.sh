#!/usr/bin/env bash
# Prints the folder of GPT-2's byte pair encoding: GPT2_BPE, or data/gpt2_bpe, to which encoder.json
# and vocab.bpe are downloaded if they are not there (from GPT2_BPE_URL).
set -euo pipefail

bpe=${GPT2_BPE:-data/gpt2_bpe}
if [[ ! ${GPT2_BPE:-} ]]; then
    url=${GPT2_BPE_URL:-https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe}
    for file in encoder.json vocab.bpe; do
        [[ -e $bpe/$file ]] && continue
        part=$(mktemp)
        curl -fsL --connect-timeout 20 -o "$part" "$url/$file" || {
            rm "$part"
            echo "$url/$file cannot be downloaded (no network?): give a folder with it as GPT2_BPE." >&2
            exit 1
        }
        mkdir -p "$bpe"
        chmod 644 "$part"
        mv "$part" "$bpe/$file"
    done
fi
echo "$bpe"
