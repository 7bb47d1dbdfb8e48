#!/usr/bin/env bash
# Train the same 200 steps five times: CPU f32, GPU f32, GPU bf16, PyTorch f32 and bf16. Write raw losses to FOLDER.
#   run.sh LOCKSTEP FOLDER [PYTHON]
set -euo pipefail
cd "$(dirname "$0")"
lockstep=$1 folder=$2 python=${3:-python3}
"$python" make.py "$folder"
ours() {
    "$lockstep" train lockstep.yaml model_name_or_path="$folder/model" train_file="$folder/rows.jsonl" \
        output_dir="$folder/$1" data_cache_dir="$folder/cache" "${@:2}" > "$folder/$1.txt"
    cp "$folder/$1/metrics.jsonl" "$folder/$1.jsonl"
}
ours gpu-f32 device=cuda mixed_precision=fp32
ours gpu-bf16 device=cuda mixed_precision=bf16
"$python" peer.py "$folder" --dtype fp32 > "$folder/torch-f32.jsonl"
"$python" peer.py "$folder" --dtype bf16 > "$folder/torch-bf16.jsonl"
[ -n "${SKIP_CPU:-}" ] || ours cpu-f32 device=cpu mixed_precision=fp32
