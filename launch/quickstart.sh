#!/usr/bin/env bash
# From nothing to a trained drafter on two CPU cores: environment, demo target, training, acceptance length.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
output="${1:-runs/quickstart}"

"$python" tools/prepare_demo_target.py
"$python" -m torch.distributed.run --standalone --nproc_per_node 2 train_dflash_pipeline.py \
    --config launch/quickstart.yaml --output-dir "$output"
result="$("$python" -m torch.distributed.run --standalone --nproc_per_node 2 tools/eval_acceptance.py "$output" \
    --prompts launch/demo_heldout.jsonl --num-prompts 6 --max-new-tokens 48 --untrained)"

echo "$result" | sed '$d'
echo "curves:     $python -m tensorboard.main --logdir $output/tensorboard"
echo "checkpoint: $output/checkpoints/$(cat "$output/checkpoints/latest")"
echo "$result" | tail -n 1
