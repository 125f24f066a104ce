#!/usr/bin/env bash
# The original layout: Qwen3.6-27B on one node of eight GPUs, five target and three drafter ranks, an all-sliding drafter.
#
#     bash launch/one_node.sh --train-data chats.jsonl --num-epochs 3 --output-dir runs/qwen3.6-27b
#
# Arguments go to the pipeline, after those below, and win over them. SIGUSR1 and SIGTERM: finish the step, save, exit 0;
# the same command goes on from there.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source launch/torchrun.sh
target="${TARGET:-Qwen/Qwen3.6-27B}"
ranks="${RANKS:-8}"
target_ranks="${TARGET_RANKS:-5}"
max_restarts="${MAX_RESTARTS:-3}"

set -- --target "$target" --num-target-ranks "$target_ranks" --num-full-attention-layers 0 --sliding-window 2048 \
    --tokens-per-micro-batch 4096 --anchors-per-micro-batch 512 --gradient-accumulation-steps 4 --save-every 500 "$@"
check_flags "$@"
run_torchrun --standalone --nproc_per_node "$ranks" --max-restarts "$max_restarts" train_dflash_pipeline.py "$@" || exit
