#!/bin/sh
# GPU: tests and measures genserve on this machine's GPU, with one command:
#
#     sh benchmarks/gpu.sh                        tiny models and the default model, about ten minutes
#     MODEL=ORG/NAME sh benchmarks/gpu.sh         measures another model of the Hugging Face hub
#     GPU=1 RESULTS=folder sh benchmarks/gpu.sh   uses the second GPU, and writes results to another folder
#
# It needs an NVIDIA driver and pip's index; RUNTIME=gpu of the Makefile installs the rest into .venv. It ends with
# a summary. Exit status: 0 all steps passed, 1 a step failed, 2 there is no GPU or no installation.
set -u
cd "$(dirname "$0")/.." || exit 2
MODEL=${MODEL:-smollm2}
RESULTS=${RESULTS:-gpu-results}
PYTHON=.venv/bin/python
summary=
failed=0

# Usage: step WORDS LOG COMMAND...; reports whether the command succeeded, and records it for the summary.
step() {
    words=$1 log=$RESULTS/$2
    shift 2
    echo "== $words"
    "$@" >"$log" 2>&1
    status=$?
    tail -n 40 "$log"
    if [ $status -eq 0 ]; then
        summary="$summary
  ok      $words"
    else
        summary="$summary
  FAILED  $words (status $status, see $log)"
        failed=1
    fi
    return $status
}

finish() {
    echo
    echo "Summary, on: $DEVICE$summary"
    exit "$1"
}

mkdir -p "$RESULTS" || exit 2
nvidia-smi >"$RESULTS/nvidia-smi.txt" 2>&1 || { echo "there is no NVIDIA driver: nvidia-smi failed"; exit 2; }
export CUDA_VISIBLE_DEVICES="${GPU:-0}"
DEVICE=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader -i "${GPU:-0}")
echo "$DEVICE"

step "the packages are installed" setup.log make setup RUNTIME=gpu || finish 2
step "torch and ONNX Runtime both find CUDA" cuda.log "$PYTHON" - <<'EOF' || finish 2
import onnxruntime
import torch

print("torch", torch.__version__, "with CUDA", torch.version.cuda)
print("ONNX Runtime", onnxruntime.__version__, "with", onnxruntime.get_available_providers())
assert torch.cuda.is_available(), "torch finds no GPU"
assert "CUDAExecutionProvider" in onnxruntime.get_available_providers(), "this is the package for CPUs"
EOF

# Forwards of every family, prefix reuse, the sampler and greedy text, against transformers on the same GPU.
step "all checks pass" checks.log "$PYTHON" -m pytest -m gpu tests/gpu -q --no-header

MODELS=$RESULTS/models
rm -rf "$MODELS"
step "$MODEL is exported in fp16" export.log \
    "$PYTHON" -m genserve pull "$MODEL" --precision fp16 --model-repository "$MODELS" || finish 1
NAME=$(basename "$MODELS"/*_logits _logits)
# The group requests the GPU, and strict placement prevents a silent fallback to the CPU.
echo 'instance_group [ { kind: KIND_GPU gpus: [ 0 ] } ]' >>"$MODELS/${NAME}_logits/config.pbtxt"
export GENSERVE_STRICT_PLACEMENT=1

step "it serves at 1, 8 and 32 streams, compared with its bare forward" serving.log "$PYTHON" benchmarks/serving.py \
    --model-repository "$MODELS" --model "$NAME" --concurrency 1 8 32 --prompt-words 40 600 \
    --prefix-words 600 --rounds 3 --json "$RESULTS/serving.json"

finish $failed
