"""Compare the captured states of a target shared by several ranks (--target-tp) with those of the whole one.

    # two GPUs, an 8B shape of random weights: both forms of the target in the memory of each
    torchrun --nproc_per_node 2 tools/check_target_tp.py --target qwen3-8b-shape

    # two processes on the CPU
    torchrun --nproc_per_node 2 tools/check_target_tp.py --target toy --device cpu

Every rank loads the whole target and, together with the others, the shared one, runs both on the same padded documents,
and rank 0 prints how far the outputs of every layer lie apart: the relative error of all rows together, and the lowest
cosine of a row. Sums over ranks round otherwise than one product does, so 16-bit targets differ by rounding. Exits
with 1 where a layer is beyond --tolerance.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import UserError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder, hub id, or a random target as in training")
    parser.add_argument("--target-dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
                        help="dtype of the target; auto: as in training")  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code shipped with the target")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"], help="auto: CUDA if there is any")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 200, 64, 3], help="tokens of the documents")
    parser.add_argument(
        "--tolerance", type=float, help="largest relative error of a layer; default 1e-4 in float32, 5e-2 in 16 bits"
    )
    args = parser.parse_args()
    if min(args.lengths) < 1:
        raise UserError("--lengths: a document has at least one token")
    if "RANK" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        raise UserError("start at least 2 ranks with torchrun, see --help")
    return args


def start(args: argparse.Namespace) -> torch.device:
    """This rank's device, in a default process group of all ranks."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    on_cpu = args.device == "cpu" or (args.device == "auto" and not gpus)
    if on_cpu and gpus:
        raise UserError("--device cpu: hide the GPUs (CUDA_VISIBLE_DEVICES=), or transformers uses them")
    if not on_cpu and gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        raise UserError(f"{os.environ['LOCAL_WORLD_SIZE']} ranks need as many GPUs; there are {gpus}")
    device = torch.device("cpu") if on_cpu else torch.device("cuda", local)
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl", device_id=None if on_cpu else device)
    return device


@torch.no_grad()
def captured(model, ids: Tensor, lengths: list[int]) -> list[Tensor]:
    """The real rows [N, H] of every decoder layer, in order."""
    depth = len(pipeline.decoder_layers(model))
    capture = pipeline.HookCapture(model, range(depth))
    model.get_decoder()(input_ids=ids, use_cache=False)
    layers, _ = capture.take().get_hidden_state_layer_packs(lengths)
    capture.remove()
    return [layer[0] for layer in layers]


def share_held(model) -> float:
    """The share of the target's weights that this rank computes with."""
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    return held / sum(p.numel() for p in model.parameters())


def compare(whole: list[Tensor], shared: list[Tensor], tolerance: float) -> list[int]:
    """Print every layer's figures; returns the layers beyond the tolerance."""
    beyond = []
    for layer, (one, other) in enumerate(zip(whole, shared)):
        one, other = one.float(), other.float()
        error = ((one - other).norm() / one.norm()).item()
        cosine = F.cosine_similarity(one, other, dim=1).min().item()
        bad = not error <= tolerance
        beyond += [layer] if bad else []
        print(f"layer {layer:3d}  relative error {error:.2e}  lowest cosine {cosine:.6f}" + ("  BEYOND" if bad else ""))
    return beyond


def main() -> int:
    args = parse_arguments()
    ranks, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    target = pipeline.TargetArguments(args.target, None, args.target_dtype, args.trust_remote_code)
    config = pipeline.load_target_config(target)
    pipeline.check_target_tp(config, ranks)
    device = start(args)
    pipeline.settle_target_dtype(target, config, device)
    lengths = sorted(args.lengths, reverse=True)
    vocabulary = config.get_text_config().vocab_size
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (len(lengths), lengths[0]))).to(device)
    states = {}
    for target_tp in tqdm((1, ranks), desc="target", disable=not first, leave=False):
        model = pipeline.load_target(target, config, device, target_tp)
        states[target_tp], share = captured(model, ids, lengths), share_held(model)
        del model
    if first:
        tolerance = args.tolerance
        if tolerance is None:
            tolerance = 1e-4 if config.dtype == torch.float32 else 5e-2
        beyond = compare(states[1], states[ranks], tolerance)
        verdict = f"layers {beyond} are beyond" if beyond else "all layers within"
        print(f"{ranks} ranks, {share:.0%} of the weights on each, {target.target_dtype}: {verdict} {tolerance:g}")
    dist.barrier()
    dist.destroy_process_group()
    return int(first and bool(beyond))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
