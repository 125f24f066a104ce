"""Train SpecForge's DFlash drafter on what a run of ours trained on, as a reference for quality.

    pip install --no-deps specforge
    python tools/compare_specforge.py runs/smollm2 --output-dir runs/smollm2-specforge
    python tools/eval_acceptance.py runs/smollm2 runs/smollm2-specforge --target TARGET --prompts prompts.jsonl

Everything but the training code is the run's own: the documents of every micro-batch, the captured states, the initial
weights, steps, blocks per micro-batch, learning rates, AdamW's settings and clipping. SpecForge's `OnlineDFlashModel`
draws its anchors (per document, the micro-batch's blocks shared out evenly), builds its masks, computes its loss; its
`BF16Optimizer` keeps the fp32 masters. All captured states stay in memory after the first pass. First the two
implementations are compared on one micro-batch with the same anchors: the losses must agree within rounding. One process;
the drafter is written as a folder in z-lab's format.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import UserError


class Reference:
    """SpecForge's model and optimizer, from the initial weights of the run."""

    def __init__(self, args: pipeline.Arguments, config: pipeline.DrafterConfig, ends, device, dtype, total_steps: int):
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
        from specforge.optimizer import BF16Optimizer
        from transformers import Qwen3Config

        self.args, self.config, self.device, self.dtype = args, config, device, dtype
        # with SDPA and bf16 on a GPU its unused blocks, which see nothing, made every weight NaN within 2,000 steps
        attention = "flex_attention" if device.type == "cuda" else "sdpa"
        drafter = DFlashDraftModel._from_config(Qwen3Config(**config.to_json(), attn_implementation=attention))
        drafter.load_state_dict(pipeline.build_drafter(config, args).state_dict())
        head = nn.Linear(config.hidden_size, ends.head_weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(ends.head_weight, requires_grad=False)
        self.drafter = drafter.to(device, dtype)
        self.model = OnlineDFlashModel(
            self.drafter, head, ends.embed, config.mask_token_id, config.block_size, attention_backend=attention,
            loss_decay_gamma=args.data.loss_gamma or pipeline.loss_gamma(config.block_size),
        )  # fmt: skip
        optim = args.optimization
        self.optimizer = BF16Optimizer(
            self.drafter, optim.learning_rate, optim.weight_decay, optim.max_grad_norm or 1e9, total_steps
        )
        self.optimizer.optimizer.param_groups[0]["betas"] = (optim.adam_beta1, optim.adam_beta2)

    def loss(self, plan: pipeline.BatchPlan, features: Tensor) -> Tensor:
        """Mean loss over the documents of a plan, as rows padded on the right."""
        lengths = torch.from_numpy(plan.lengths)
        rows = [(plan.token_ids, torch.int64), (plan.loss_mask, torch.float32)]
        ids, mask = (self.pad(torch.from_numpy(x[: plan.num_tokens]).to(dtype), lengths) for x, dtype in rows)
        hidden = self.pad(features[: plan.num_tokens], lengths)
        return self.model(ids.to(self.device), hidden.to(self.dtype), mask.to(self.device))[0]

    def pad(self, packed: Tensor, lengths: Tensor) -> Tensor:
        """[n, ...] -> [documents, longest, ...]"""
        return nn.utils.rnn.pad_sequence(packed.split(lengths.tolist()), batch_first=True)

    def step(self, loss: Tensor, learning_rate: float) -> None:
        loss.backward()
        self.optimizer.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()


def plan_anchors(plan: pipeline.BatchPlan):
    """A function that gives SpecForge's model the plan's own anchors, document by document, in place of its draw."""
    rows = plan.anchor_rows[: plan.num_anchors]
    parts = [torch.from_numpy(plan.position_ids[rows[plan.document_ids[rows] == i]]) for i in range(len(plan.lengths))]
    kept = [torch.ones(len(part), dtype=torch.bool) for part in parts]
    anchors, kept = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (parts, kept))
    return lambda seq_len, loss_mask, device: (anchors.to(device), kept.to(device))


def check_same_loss(reference: Reference, ours: nn.Module, ends, plan, features: Tensor) -> None:
    """Both losses on one micro-batch with the plan's anchors; raises UserError when they differ beyond rounding."""
    batch = pipeline.DrafterBatch.from_plan(plan, reference.config, reference.device)
    total, _ = pipeline.micro_batch_loss(ours, ends, features, batch, None)
    mine = total.item() / plan.weight_sum

    draw, reference.model._sample_anchor_positions = reference.model._sample_anchor_positions, plan_anchors(plan)
    with torch.no_grad():
        theirs = reference.loss(plan, features).item()
    reference.model._sample_anchor_positions = draw
    print(f"loss on micro-batch 0 with the same anchors: {mine:.5f} here, {theirs:.5f} in SpecForge", flush=True)
    if abs(mine - theirs) > (2e-2 if reference.dtype == torch.bfloat16 else 1e-4) * mine:
        raise UserError("the two implementations disagree: they would not train the same thing")


def train(args: pipeline.Arguments, steps: int, same_anchors: bool, output_dir: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target_config = pipeline.load_target_config(args.target)
    text = target_config.get_text_config()
    tokenizer = pipeline.load_tokenizer(args.target)
    config = pipeline.choose_drafter_config(args, text, tokenizer)
    layer_ids, paths = config.target_layer_ids, args.data.train_data or [str(pipeline.DEMO_DATA)]
    documents, _ = pipeline.open_documents(pipeline.settle_documents(paths, args, tokenizer, show_progress=True))
    planner = pipeline.Planner(documents, args, num_drafters=1)
    steps = min(steps or planner.total_steps, planner.total_steps)
    model = pipeline.load_target(args.target, target_config, device)
    layout, fp8 = args.target.target_layout, args.target.target_fp8
    runner = pipeline.TargetRunner(model, layer_ids, False, device, layout, args.pipeline.compile, fp8)
    ends = pipeline.load_frozen_ends(args.target, target_config, device, dtype)
    slot = pipeline.Slot(0, planner.tokens, len(layer_ids), text.hidden_size, False, target_config.dtype, device)
    torch.manual_seed(args.data.seed)  # SpecForge draws its anchors from the global generator
    reference = Reference(args, config, ends, device, dtype, planner.total_steps)
    kept = {}  # document -> its captured states [length, K*H]

    def captured(plan) -> Tensor:
        """The drafter's input of a micro-batch, [N, K*H], noise included. A document's states are computed once."""
        if not kept.keys() >= set(plan.documents):
            rows = [shot.get_hidden_states_packed(plan.lengths[docs])[0][0] for shot, docs in runner.forward(plan)]
            kept.update(zip(plan.documents, torch.cat(rows).split(plan.lengths.tolist())))
        slot.joined(plan.num_tokens).copy_(torch.cat([kept[document] for document in plan.documents]))
        pipeline.add_noise_(slot.joined(plan.num_tokens), plan.noise_std, plan.noise_seed)
        return pipeline.drafter_features(slot, plan, split=False)

    plan = planner.plan(0)
    ours = pipeline.build_drafter(config, args).to(device, dtype)
    check_same_loss(reference, ours, ends, plan, captured(plan))
    bar = tqdm(range(steps), desc="training", unit="step")
    for step in bar:
        plan = planner.plan(step)
        reference.model.num_anchors = max(1, round(plan.num_anchors / len(plan.lengths)))
        if same_anchors:
            reference.model._sample_anchor_positions = plan_anchors(plan)
        loss = reference.loss(plan, captured(plan))
        reference.step(loss, pipeline.learning_rate_at(step, planner.total_steps, args.optimization))
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    if not torch.isfinite(loss):
        raise UserError(f"SpecForge's loss is {loss.item()} after {steps} steps: nothing written")
    output_dir.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().cpu().contiguous() for name, p in reference.drafter.named_parameters()}
    pipeline.write_tensors(output_dir / "model.safetensors", weights, {"format": "pt"})
    pipeline.write_json(output_dir / "config.json", config.to_json() | {"dtype": str(dtype).removeprefix("torch.")})
    print(f"wrote {output_dir}: {steps} steps, last loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of the run to compare with (one drafter, no accumulation)")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the reference drafter goes")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps of the schedule (0: all)")
    parser.add_argument(
        "--same-anchors", action="store_true", help="train on the run's own anchors: what is left is the rest of the code"
    )
    options = parser.parse_args()
    args = pipeline.parse_arguments(["--config", str(options.run / "config.yaml")])
    if args.optimization.gradient_accumulation_steps != 1 or args.data.loss != "ce" or args.data.loss_weights != "decay":
        raise UserError(f"{options.run}: only runs with --loss ce, decaying weights and no accumulation can be compared")
    for folder in pipeline.step_folders(options.run / "checkpoints")[:1]:  # none yet where the run is still young
        _, identity = pipeline.read_state(folder)
        if (count := identity["micro_batches_per_step"]) != 1:
            raise UserError(f"{options.run}: it has {count} drafters, and only runs with one can be compared")
    try:
        import specforge  # noqa: F401
    except ImportError:
        raise UserError("SpecForge is missing: pip install --no-deps specforge") from None
    train(args, options.steps, options.same_anchors, options.output_dir)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
