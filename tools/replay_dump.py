"""Where was a NaN born? Replay a micro-batch that a run kept because it was not finite, stage by stage, on one device.

    # the folder that the run's error line names
    python tools/replay_dump.py runs/dflash/nonfinite/m-00000012

    # on the CPU, with another copy of the target, without the fp32 column (a large target in fp32 may not fit)
    python tools/replay_dump.py runs/dflash/nonfinite/m-00000012 --device cpu --target models/qwen3-8b --no-fp32

    # with the weights of a checkpoint, when the dump has none (ZeRO 3, or a dump of a target rank)
    python tools/replay_dump.py runs/dflash/nonfinite/m-00000012 --drafter runs/dflash/checkpoints/step-000400

    # a dump to try it on
    torchrun --nproc_per_node 2 train_dflash_pipeline.py --output-dir runs/try --inject-fault nan-layer@2

The target runs on the documents of the dump again; its captured layers are packed both ways (split and joined), noised,
put through the drafter both ways, and through loss and gradient, in the run's own precision and in fp32; on CUDA with
the drafter and its loss compiled, too. The table shows for each stage the largest magnitude, or the first value that is not
finite (document, token, element), and what differs between two sides of a switch. The last column compares the hidden
states that the run had with the ones computed here: a slot that was overwritten, or a broken transfer, shows there.
Rows within a tenth of their own length count as equal: other kernels round otherwise. The last line is the verdict: the
target's forward pass, packing, transport or slot lifetime, the drafter, or the loss; or that nothing repeats here.
"""

import argparse
import dataclasses
import gc
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import BatchPlan, UserError, first_line, first_nonfinite

ROUNDING = 0.1  # a row that is further off than this share of its length is another row


@dataclass
class Dump:
    """What a run kept: its finding, plan, settings, hidden states, and perhaps the drafter's weights."""

    finding: dict
    plan: BatchPlan
    args: pipeline.Arguments
    config: pipeline.DrafterConfig
    states: dict[str, Tensor]  # "layer.I" [n, H], "verifier_last" [n, H], "features" [N, K*H]; those that it has
    weights: Optional[dict[str, Tensor]]
    checkpoint: Optional[str]  # where the weights are when the dump has none; None: the drafter was as it starts


def read_dump(folder: Path) -> Dump:
    """The dump in a folder, or UserError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about, tensors = json.loads((folder / "dump.json").read_text()), load_file(folder / "tensors.safetensors")
        inside = about["drafter_weights"] == "drafter.safetensors"
        weights = load_file(folder / "drafter.safetensors") if inside else None
        arrays = {name.removeprefix("plan."): t.numpy() for name, t in tensors.items() if name.startswith("plan.")}
        settings = about["settings"]
        groups = [
            group(**{f.name: settings[f.name] for f in dataclasses.fields(group) if f.name in settings})
            for group in pipeline.ARGUMENT_GROUPS
        ]
        return Dump(
            about["finding"], BatchPlan(**arrays, **about["plan"]), pipeline.Arguments(*groups),
            pipeline.DrafterConfig.from_json(about["drafter"]),
            {name: t for name, t in tensors.items() if not name.startswith("plan.")},
            weights, None if inside else about["drafter_weights"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder} is no dump of a run: {first_line(error)}") from None


def place(plan: BatchPlan, row: int, element: int) -> str:
    document = int(plan.document_ids[row])
    if document < 0:
        return f"padded row {row}, element {element}"
    return f"document {plan.documents[document]}, token {plan.position_ids[row]}, element {element}"


def describe(rows: Tensor, plan: BatchPlan, block_size: Optional[int] = None) -> str:
    """The largest magnitude of [rows, width], or its first value that is not finite; block_size: rows are slots."""
    if (found := first_nonfinite(rows)) is None:
        return f"{float(pipeline.largest(rows)):.4g}"
    row, element, count = found
    value = float(rows[row, element])
    if block_size is None:
        return f"{value} at {place(plan, row, element)} ({count:,})"
    block, slot = divmod(row, block_size)
    return f"{value} at slot {slot} of {place(plan, int(plan.anchor_rows[block]), element)} ({count:,})"


def compare(run: Tensor, here: Tensor, plan: BatchPlan) -> tuple[bool, str]:
    """(whether they differ by more than rounding, how) of the run's rows and those computed here, [rows, width]."""
    run, here = run.cpu(), here.cpu()
    if torch.equal(run, here):
        return False, "equal"
    a, b = run.float(), here.float()
    wrong = torch.isfinite(a) != torch.isfinite(b)
    off = torch.nan_to_num(a - b, nan=0.0, posinf=0.0, neginf=0.0)
    share = off.norm(dim=1) / torch.nan_to_num(b, nan=0.0, posinf=0.0, neginf=0.0).norm(dim=1).clamp(min=1e-30)
    rows = (wrong.any(1) | (share > ROUNDING)).nonzero().flatten().tolist()
    if not rows:
        return False, f"equal but for rounding, {float(share.max()):.1e} of a row"
    first = rows[0]
    element = int((wrong[first] if wrong[first].any() else off[first].abs()).float().argmax())
    values = f"{float(a[first, element]):.6g} in the run, {float(b[first, element]):.6g} here"
    return True, f"differs at {place(plan, first, element)}: {values} ({len(rows):,} of {len(a):,} rows)"


@dataclass
class Replay:
    """One pass over all stages in one precision: lines of the table, and what the verdict needs."""

    precision: str
    cells: dict[str, str] = field(default_factory=dict)  # stage -> what to show
    bad: list[str] = field(default_factory=list)  # stages that are not finite, in order
    captured: dict[str, Tensor] = field(default_factory=dict)  # as `Dump.states`, before noise, on the host
    sent: dict[str, Tensor] = field(default_factory=dict)  # the same as the run's slot holds it: joined, with noise

    def add(self, stage: str, rows: Tensor, plan: BatchPlan, note: str = "", block_size: Optional[int] = None) -> None:
        rows = rows.detach()
        self.cells[stage] = describe(rows, plan, block_size) + note
        if not math.isfinite(pipeline.largest(rows)):
            self.bad.append(stage)


def run_target(dump: Dump, replay: Replay, device: torch.device) -> dict[bool, tuple[Tensor, Optional[Tensor]]]:
    """Forward pass, capture and packing both ways: {split: (drafter input [N, K*H], verifier_last [n, H] or None)}."""
    plan, args, layer_ids = dump.plan, dump.args, dump.config.target_layer_ids
    target_config = pipeline.load_target_config(args.target)
    with_last = args.data.loss == "kl"
    model = pipeline.load_target(args.target, target_config, device)
    layout, fp8 = args.target.target_layout, args.target.target_fp8
    runner = pipeline.TargetRunner(model, layer_ids, with_last, device, layout, fp8=fp8)
    del model
    shots = runner.forward(plan)
    last_id = dump.config.num_target_layers - 1
    for layer in sorted({*layer_ids, *([last_id] if with_last else [])}):
        rows = [shot.captured[layer].flatten(0, 1)[shot.real_rows(plan.lengths[documents])]
                for shot, documents in shots]  # fmt: skip
        replay.add(f"captured layer {layer}", torch.cat(rows), plan)
        replay.captured |= {f"layer.{layer}": torch.cat(rows).cpu()} if layer in layer_ids else {}
        replay.captured |= {"verifier_last": torch.cat(rows).cpu()} if layer == last_id and with_last else {}
    inputs, n = {}, plan.num_tokens
    for split in (True, False):
        slot = pipeline.Slot(0, len(plan.token_ids), len(layer_ids), dump.config.hidden_size, with_last,
                             target_config.dtype, device)  # fmt: skip
        slot.poison()
        layers, last = slot.layers(n, split), slot.verifier_last(n)
        pipeline.pack_shots(plan, shots, layers, last)
        packed = {f"layer.{i}": rows.cpu() for i, rows in zip(layer_ids, layers)}
        moved = [name for name, rows in packed.items() if not same(rows, replay.captured[name])]
        note = f"; {moved[0]} is not what was captured" if moved else ""
        replay.add(f"packed, {'split' if split else 'joined'}", torch.cat(layers, dim=1), plan, note)
        if not split:
            pipeline.add_noise_(slot.joined(n), plan.noise_std, plan.noise_seed)
        if split == args.pipeline.split_fc_layers:
            replay.sent = {f"layer.{i}": rows.cpu().clone() for i, rows in zip(layer_ids, layers)}
            replay.sent |= {} if last is None else {"verifier_last": last.cpu()}
        inputs[split] = pipeline.drafter_features(slot, plan, split), last
    for split, (features, _) in inputs.items():
        note = "" if split or same(features, inputs[True][0]) else "; not that of the split form"
        replay.add(f"drafter input, {'split' if split else 'joined'}", features, plan, note)
    return inputs


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def load_weights(dump: Dump, source: Optional[str]) -> tuple[dict[str, Tensor], str]:
    """(the drafter's weights, where they are from): `source`, else the dump, else the checkpoint that it names.

    Raises UserError for a drafter of another shape than the dump's.
    """
    if source is None and dump.weights is not None:
        return dump.weights, "the dump"
    source = source or dump.checkpoint
    if source is None:
        return pipeline.build_drafter(dump.config, dump.args).state_dict(), "the drafter's start"
    folder = pipeline.find_drafter_folder(source)
    weights = pipeline.load_drafter(folder, torch.device("cpu"), torch.float32).state_dict()
    with torch.device("meta"):
        own = pipeline.DFlashDrafter(dump.config).state_dict()
    for name in sorted(own.keys() | weights.keys()):
        there, here = (list(side[name].shape) if name in side else "not there" for side in (weights, own))
        if there != here:
            raise UserError(f"{folder}: {name} is {there}, in the drafter that was kept it is {here}")
    return weights, str(folder)


def run_drafter(dump: Dump, replay: Replay, weights: dict, inputs: dict, device: torch.device) -> None:
    """Drafter, loss and gradient of every input: both sides of the split switch, and compiled on CUDA."""
    plan, config, args = dump.plan, dump.config, dump.args
    fp32 = device.type == "cpu" or replay.precision == "float32"
    dtype = torch.float32 if fp32 else torch.bfloat16
    ends = pipeline.load_frozen_ends(args.target, pipeline.load_target_config(args.target), device, dtype)
    alpha = args.data.dpace_alpha if args.data.loss_weights == "dpace" else None
    sides = [("split", True, False), ("joined", False, False)]
    sides += [("split, compiled", True, True)] if device.type == "cuda" else []
    outputs = {}
    for name, split, compiled in sides:
        drafter = pipeline.DFlashDrafter(config)
        drafter.load_state_dict(weights)
        drafter.to(device, dtype)
        if compiled:  # the last side: the loss stays compiled
            pipeline.compile_drafter(drafter, ends)
        batch = pipeline.DrafterBatch.from_plan(plan, config, device)
        flags = pipeline.StageFlags()
        features, last = inputs[split]
        loss, _ = pipeline.micro_batch_loss(drafter, ends, features, batch, last, alpha, flags.watch)
        out = outputs[name] = flags.stages[0][1][0]
        far = ""
        if name != "split" and not same(out, outputs["split"]):
            far = f"; {float((out - outputs['split']).abs().max()):.2g} from the eager split form"
        replay.add(f"drafter output, {name}", out, plan, far, config.block_size)
        loss = loss / max(plan.weight_sum, 1e-9)
        replay.cells[f"loss, {name}"] = f"{loss.item():.6g}"
        replay.bad += [] if math.isfinite(loss.item()) else [f"loss, {name}"]
        loss.backward()
        first = next((n for n, p in drafter.named_parameters() if not math.isfinite(pipeline.largest(p.grad))), None)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in drafter.parameters()]))
        replay.cells[f"gradient, {name}"] = f"norm {norm:.4g}" + (f", not finite in {first}" if first else "")
        replay.bad += [f"gradient, {name}"] if first or not math.isfinite(norm) else []


def replay_in(precision: str, dump: Dump, weights: dict, device: torch.device) -> Replay:
    dump.args.target.target_dtype = precision
    replay = Replay(precision)
    with torch.no_grad():
        inputs = run_target(dump, replay, device)
    gc.collect()  # the target goes before the drafter comes
    if device.type == "cuda":
        torch.cuda.empty_cache()
    run_drafter(dump, replay, weights, inputs, device)
    return replay


def compare_states(dump: Dump, replay: Replay) -> tuple[dict[str, str], bool]:
    """(stage -> how the run's states differ from those computed here, whether any does by more than rounding)."""
    notes, differ = {}, False
    for name, rows in dump.states.items():
        if name != "features":
            wrong, text = compare(rows, replay.sent[name], dump.plan)
            notes["verifier_last" if name == "verifier_last" else f"captured layer {name[6:]}"] = text
            differ |= wrong
    if "features" in dump.states:
        form = "split" if dump.args.pipeline.split_fc_layers else "joined"
        notes[f"drafter input, {form}"] = describe(dump.states["features"], dump.plan)
    return notes, differ


def verdict(dump: Dump, replays: list[Replay], differ: bool, bad_weight: Optional[str]) -> str:
    """One sentence: where the first value that is not finite comes from."""
    stage, rank, here = dump.finding["stage"], dump.finding["rank"], replays[0]
    also = ""
    if len(replays) > 1:
        finite = f"; in fp32 all is finite, so it is the range of {here.precision}"
        also = "; in fp32, too" if replays[1].bad else finite
    if first := next((name for name in here.bad if name.startswith("captured")), None):
        return f"the target's forward pass: {first} is not finite here, either{also}"
    if stage.startswith("captured"):
        return (
            f"the target's forward pass: {stage} held it on {rank}, before packing; the same documents are finite here, "
            "so look at that rank's device, memory and software, not at the numbers"
        )
    if stage == "packed" or next((name for name in here.bad if name.startswith("packed")), None):
        return f"packing: the captured layers were finite on {rank}, the packed rows or their noise were not"
    if stage == "received" or differ:
        what = "differ from" if differ else "are"
        return (
            f"transport or slot lifetime: the states that {rank} had {what} those of the target, which were finite "
            "when they were sent; try --verify-transfers and --poison-slots"
        )
    if stage == "drafter input":
        if any(name.startswith("drafter input") for name in here.bad):
            return f"packing: joining the layers or adding the noise leaves the range of the numbers{also}"
        return f"transport or slot lifetime: the slot on {rank} was right, but not yet or no longer when it was read"
    if bad_weight is not None:
        return f"the drafter: its weight {bad_weight} was not finite before the step"
    for kind, name in (("drafter output", "the drafter"), ("loss", "the loss"), ("gradient", "the drafter")):
        if first := next((bad for bad in here.bad if bad.startswith(kind)), None):
            return f"{name}: {first} is not finite here, either{also}"
    where = "the loss" if stage == "loss" else "the drafter"
    return f"{where}, by the run's own finding ({stage}); nothing repeats here"


def show(dump: Dump, replays: list[Replay], notes: dict[str, str]) -> None:
    """The table: a line per stage, a column per precision, and the run's own states."""
    finding = pipeline.Finding(**dump.finding | {"files": tuple(dump.finding["files"])})
    print(f"the run: {finding.line()}")
    stages = [*replays[0].cells, *(name for name in notes if name not in replays[0].cells)]
    columns = [[f"here, {r.precision}", *(r.cells.get(stage, "") for stage in stages)] for r in replays]
    columns = [["stage", *stages], *columns, ["in the run", *(notes.get(stage, "") for stage in stages)]]
    widths = [max(map(len, column)) for column in columns]
    for line in zip(*columns):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="Folder m-NNNNNNNN under nonfinite/ of a run.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if any.")
    parser.add_argument("--target", help="Folder or hub id of the target, in place of the run's.")
    parser.add_argument("--drafter", help="Run, checkpoint or drafter folder with the weights, in place of the dump's.")
    parser.add_argument("--no-fp32", dest="fp32", action="store_false", help="Leave out the pass in fp32.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run Python code shipped with the target.")
    args = parser.parse_args()
    dump = read_dump(args.dump)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU here")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    pipeline.check_tiles(dump.args, device)
    dump.args.target.trust_remote_code = args.trust_remote_code
    dump.args.target.target = args.target or dump.args.target.target
    weights, source = load_weights(dump, args.drafter)
    bad_weight = next((name for name, w in weights.items() if not math.isfinite(pipeline.largest(w))), None)
    print(f"drafter weights from {source}" + (f": {bad_weight} is not finite" if bad_weight else ""))
    own = dump.args.target.target_dtype
    precisions = [own, "float32"] if args.fp32 and (own != "float32" or device.type == "cuda") else [own]
    replays = []
    for precision in dict.fromkeys(precisions):
        replays.append(replay_in(precision, dump, weights, device))
    notes, differ = compare_states(dump, replays[0])
    show(dump, replays, notes)
    print(f"verdict: {verdict(dump, replays, differ, bad_weight)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
