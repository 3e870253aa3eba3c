#!/usr/bin/env bash
# Launch a run of one of the three configurations with the reference hyperparameters.
#
#   ./launch.sh homogeneous_b200 | mixed_fleet | mixed_fleet_top_p
#   ./launch.sh --print mixed_fleet        # the arguments only, for offpolicy-corr miles check
#
# These cluster runs were not made by the authors of this library: only the checks and the loss were executed.
# Set MILES, MODEL and PROMPTS to your own; model and parallelism arguments come from Miles' model scripts.
# GENERATE names a generate function of this folder or of yours; empty: Miles' own.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

print=false
if [[ "${1:-}" == "--print" ]]; then
  print=true
  shift
fi
config=${1:?usage: launch.sh [--print] homogeneous_b200|mixed_fleet|mixed_fleet_top_p}
test -f "$here/$config.yaml" || { echo "no $config.yaml beside this script" >&2; exit 2; }

arguments=(
  # 128 prompts × 8 trajectories per update, one update per batch
  --rollout-batch-size 128
  --n-samples-per-prompt 8
  --global-batch-size 1024
  # group-mean advantage without std, token mean over the batch
  --advantage-estimator grpo
  --disable-grpo-std-normalization
  --calculate-per-token-loss
  --use-rollout-logprobs
  --rollout-temperature 1.0
  # fully asynchronous; staleness is corrected token by token, not capped
  --fully-async
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
  --entropy-coef 0.0
  --qkv-format thd
  --use-dynamic-batch-size
  --max-tokens-per-gpu "${MAX_TOKENS_PER_GPU:-16384}"
  --attention-backend flash
  --custom-config-path "$here/$config.yaml"
)
if [[ "$config" == *top_p ]]; then
  arguments+=(--rollout-top-p 0.97 --rollout-top-k 64)
fi
if [[ "$config" == homogeneous_b200 ]]; then
  arguments+=(--sglang-dtype bfloat16 --sglang-kv-cache-dtype auto)
  generate=${GENERATE-}
else
  # groups differ in accelerator and weight format: they are started and re-synchronized outside Miles (see README),
  # and generate.py sends each prompt to one of them and stamps which
  arguments+=(--rollout-external)
  generate=${GENERATE-generate.generate}
fi
if [[ -n "$generate" ]]; then
  arguments+=(--custom-generate-function-path "$generate")
else
  # Miles with native score centering records heads and supports by itself (ties at the cut-off may exceed top-k)
  arguments+=(--rollout-top-logprobs-num 128)
fi

if $print; then
  printf '%q ' "${arguments[@]}"
  exit
fi

offpolicy-corr miles check "$here/$config.yaml" "${arguments[@]}"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec python "${MILES:?path of a Miles checkout}/train_async.py" \
  --hf-checkpoint "${MODEL:?path of the model}" \
  --prompt-data "${PROMPTS:?path of the prompts}" \
  "${arguments[@]}" ${MODEL_ARGS:-}
