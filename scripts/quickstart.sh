#!/usr/bin/env bash
# Train a small ∞-former on the source of Python's own standard library, and a smaller one to recall
# pairs, and see what their memory is worth.  Everything goes to ./quickstart (or the folder named); run
# it again to go on where it stopped.
#   bash scripts/quickstart.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
out=${1:-quickstart}
mkdir -p "$out"
begin=$SECONDS
say() { printf '\n[%d:%02d] %s\n' $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)) "$1"; }
quietly() { # LOG COMMAND: show what a command printed only if it fails
    local log=$1
    shift
    "$@" >"$log" 2>&1 || { tail -n 20 "$log" >&2; echo "quickstart: stopped, see $log" >&2; exit 1; }
}

say "1/5 Collect the standard library: one document a module, split by a hash of its name"
[ -d "$out/text" ] || python scripts/stdlib_corpus.py "$out/text"

say "2/5 Learn a vocabulary of 4,000 pieces and binarize"
[ -d "$out/bin" ] || quietly "$out/prepare.log" \
    fairseq-inf-prepare "$out/text" "$out/bin" --vocab-size 4000 --workers 2

say "3/5 Train: segments of 128 tokens, a short-term memory of 128, a long-term memory of 128 functions"
train() {
    python -W ignore "$(command -v fairseq-train)" "$out/bin" --user-dir fairseq_inf \
        --task long_sequence_lm --stream-layout documents --tokens-per-sample 128 --batch-size 16 \
        --arch infinite_former_lm --decoder-layers 2 --decoder-embed-dim 128 \
        --decoder-ffn-embed-dim 512 --stm-length 128 --ltm-basis 128 --dropout 0 \
        --criterion cross_entropy_with_kl \
        --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr 0.003 \
        --lr-scheduler cosine --warmup-updates 50 --max-update "${UPDATES:-400}" \
        --log-interval 50 --max-valid-steps 40 --no-epoch-checkpoints \
        --save-interval-updates 200 --keep-interval-updates 1 --save-dir "$out/checkpoints" --seed 1 --cpu
}
failed() { tail -n 20 "$out/train.log" >&2; echo "quickstart: the training stopped" >&2; exit 1; }
if [ -t 2 ]; then # fairseq's progress bar
    train >"$out/train.log" || failed
else
    set +e
    train 2>&1 | tee "$out/train.log" | grep --line-buffered -oE 'epoch [0-9]+: .*|valid on.*'
    status=${PIPESTATUS[0]}
    set -e
    [ "$status" -eq 0 ] || failed
fi

say "4/5 Evaluate on modules that it has never seen, with its long-term memory and without"
evaluate() { # LOG OVERRIDES
    quietly "$1" fairseq-eval-lm "$out/bin" --user-dir fairseq_inf \
        --task long_sequence_lm --batch-size 4 \
        --path "$out/checkpoints/checkpoint_last.pt" --model-overrides "$2" --cpu --no-progress-bar
}
evaluate "$out/with.log" "{}"
evaluate "$out/without.log" "{'ltm_enabled': False}"

say "5/5 What is remembered, and how far back: train a smaller model to tell the value of a key that returns"
[ -d "$out/pairs" ] || quietly "$out/pairs.log" fairseq-inf-recall make "$out/pairs" --sizes 4000 40 100
quietly "$out/recall.log" fairseq-inf-recall run examples/recall/config/small/infinite_former_gibbs.yaml \
    --data "$out/pairs" --out "$out/recall" --seeds 1 --cpu model.ltm_basis=256 \
    "optimization.max_update=${RECALL_UPDATES:-500}"
field() { grep -oE "$2[0-9.,]+" "$1" | tail -n 1 | grep -oE '[0-9][0-9.,]*'; }

say "Done"
echo
echo "  test modules, $(field "$out/with.log" 'Evaluated ') tokens   perplexity"
printf '  %-32s %10s\n' "with its long-term memory" "$(field "$out/with.log" 'Perplexity: ')"
printf '  %-32s %10s\n' "the same model, memory off" "$(field "$out/without.log" 'Perplexity: ')"
cat <<TEXT

  Recall of a pair, by the tokens since it last stood, %:

$(sed -e 's/^/  /' -e '/---/d' -e 's/ | [0-9,.]* | [0-9.]* |$/ |/' -e 's/ | floats | minutes |$/ |/' -e 's/ |  |  |$/ |/' "$out/recall/table.md")

  The same as a picture: $out/recall/recall.png

What to try next:
  see each word's probability     fairseq-eval-lm $out/bin ... --output-word-probs
  train longer                    UPDATES=3000 bash scripts/quickstart.sh $out-long
  let it write                    fairseq-interactive: see docs/generation.md
  models with other memories      --arch transformer_xl_lm, --arch compressive_transformer_lm
  real books                      examples/pg19/README.md
TEXT
