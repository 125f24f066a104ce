#!/usr/bin/env bash
# Train on several nodes: the same command on each of them.
#
#     NODES=2 RENDEZVOUS=host-a:29500 bash launch/multi_node.sh \
#         --target Qwen/Qwen3-8B --train-data chats.jsonl --num-epochs 3 --num-target-ranks 6 \
#         --tokens-per-micro-batch 4096 --anchors-per-micro-batch 512 --save-every 500 --output-dir /shared/run
#
# Arguments go to the pipeline. The output folder must be on a file system that all drafter ranks share. SIGUSR1 and
# SIGTERM on any node: the run finishes the step, saves and exits 0 everywhere; the same command goes on from there.
# NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the networks to use, where hosts have several.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source launch/torchrun.sh
nodes="${NODES:-2}"
rendezvous="${RENDEZVOUS:?HOST:PORT of one of the nodes, the same on all}"
ranks_per_node="${RANKS_PER_NODE:-auto}" # auto: one for each GPU
run_id="${RUN_ID:-dflash}"               # tells jobs on one rendezvous apart
# Of all ranks, after one failed: they go on from the newest checkpoint. Where a whole node is replaced, its new agent cannot
# join the old ones: end the command on all nodes and start it anew.
max_restarts="${MAX_RESTARTS:-3}"

check_flags "$@"
run_torchrun --nnodes "$nodes" --nproc_per_node "$ranks_per_node" --max-restarts "$max_restarts" \
    --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id "$run_id" train_dflash_pipeline.py "$@" || exit
