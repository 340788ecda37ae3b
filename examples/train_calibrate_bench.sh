#!/usr/bin/env bash
# Heads for a model, the tree that pays on this machine, and what they gain: from prompts to a table.
#
#     examples/train_calibrate_bench.sh MODEL prompts.jsonl HEADS
#
# HEADS is the folder the heads go to; the table goes to HEADS.bench. Stopped, the same call goes on where
# it was. TRAIN, CALIBRATE and BENCH add options to the three commands, for example:
#
#     TRAIN="--tokens 200000 --epochs 2" BENCH="--temperatures 0 0.7" \
#         examples/train_calibrate_bench.sh MODEL prompts.jsonl HEADS
set -euo pipefail

if [ $# -ne 3 ]; then
    sed -n 's/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
model=$1 data=$2 heads=${3%/}

read -r -a train <<<"${TRAIN:-}"
read -r -a calibrate <<<"${CALIBRATE:-}"
read -r -a bench <<<"${BENCH:-}"

vllm-medusa train "$model" --data "$data" --output "$heads" "${train[@]}"
vllm-medusa calibrate "$model" "$heads" "${calibrate[@]}"
vllm-medusa bench "$model" "$heads" --output "$heads.bench" "${bench[@]}"
