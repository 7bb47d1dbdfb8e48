#!/usr/bin/env bash
# Train the same 1000 steps in every format of masters, gradients and optimizer states, bf16. Write raw losses to FOLDER.
#   formats.sh LOCKSTEP FOLDER [PYTHON] [DEVICE]
set -euo pipefail
cd "$(dirname "$0")"
lockstep=$1 folder=$2 python=${3:-python3} device=${4:-cuda}
"$python" make.py "$folder" 2000
ours() {
    "$lockstep" train lockstep.yaml model_name_or_path="$folder/model" train_file="$folder/rows.jsonl" max_steps=1000 \
        output_dir="$folder/$1" data_cache_dir="$folder/cache" device="$device" mixed_precision=bf16 "${@:2}" \
        > "$folder/$1.txt"
    cp "$folder/$1/metrics.jsonl" "$folder/$1.jsonl"
}
ours fp32-states
ours bf16-gradients gradient_dtype=bf16
ours bf16-states optimizer_state_dtype=bf16
ours int8-states optimizer_state_dtype=int8
ours no-masters master_weights=none
ours lean master_weights=none gradient_dtype=bf16 optimizer_state_dtype=bf16
