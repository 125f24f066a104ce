"""Write a trained drafter as servers load it, read it back by other code, and print the commands that serve it.

    # a run's newest checkpoint, for vLLM, SGLang and z-lab's own code
    python tools/export_drafter.py runs/qwen3-8b --format zlab --output-dir exports/qwen3-8b-dflash

    # one checkpoint, for vLLM and the speculators library (holds copies of the target's embedding and LM head)
    python tools/export_drafter.py runs/qwen3-8b/checkpoints/step-001000 --format speculators --output-dir exports/s1000

    # a drafter made elsewhere, from one form to the other
    python tools/export_drafter.py their-drafter --target Qwen/Qwen3-8B --format zlab --output-dir exports/theirs

Any checkpoint will do, whatever its ZeRO stage: each holds the drafter's whole weights. They are written in bfloat16.
Do not serve them in float16: where an activation exceeds its range, every proposal is wrong. The largest one is shown.

The folder gets its name only after it was read back by a second implementation, in this file and independent of the
training code, which checks names, shapes and settings, compares every tensor bit by bit, and compares the logits of a
block on random states. Loaders skip unknown tensors in silence; this is where a wrong name shows. `export.json` beside
the weights says which target the drafter was trained for.
"""

import argparse
import json
import math
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import UserError

SPECULATORS_VERSION = "0.9.0"  # the release whose files this form follows
TOLERANCE = 1e-4  # largest difference of two fp32 implementations, relative to the largest value
FLOAT16_LARGEST = 65504.0
CPU = torch.device("cpu")


# ---- Writing ----


def zlab_config(config: pipeline.DrafterConfig, text, dtype: str) -> dict:
    """config.json of z-lab's form: the drafter's geometry, and what it takes over from the target's text config.

    No `auto_map`: it would name a dflash.py that is not shipped, and no server needs one.
    """
    ends = {"bos_token_id": getattr(text, "bos_token_id", None), "eos_token_id": getattr(text, "eos_token_id", None)}
    return config.to_json() | ends | {"dtype": dtype}


def speculators_config(config: pipeline.DrafterConfig, target: str, target_config, dtype: str) -> dict:
    """config.json of the speculators form: the layers' settings nested, layer ids one higher, the target named."""
    layer = zlab_config(config, target_config.get_text_config(), dtype) | {"pad_token_id": None}
    own = ("architectures", "block_size", "num_target_layers", "dflash_config", "sample_from_anchor", "rope_theta",
           "rope_scaling", "dtype")  # fmt: skip
    greedy = {
        "proposal_type": "greedy", "speculative_tokens": config.block_size - 1, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "architectures": ["DFlashDraftModel"],
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        # Some vLLM releases read false as "all layers are causal", full ones too; speculators asks for sliding ones.
        "sliding_window_non_causal": "sliding_attention" not in config.layer_types,
        "sample_from_anchor": False,
        "transformer_layer_config": {key: value for key, value in layer.items() if key not in own},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": target, "architectures": list(target_config.architectures or [])},
        },
        "dtype": dtype,
    }


def frozen_copies(ends: pipeline.FrozenEnds) -> dict[str, Tensor]:
    """The target's embedding and head under the names of the speculators form, or UserError."""
    if ends.embed_scale != 1.0:
        raise UserError(
            f"the target multiplies its embedding by {ends.embed_scale:g}, which the speculators form cannot say: "
            "use --format zlab"
        )
    return {"embed_tokens.weight": ends.embedding, "lm_head.weight": ends.head_weight.clone()}  # tied or not


def target_record(target: pipeline.TargetArguments, origin: dict, target_config) -> dict:
    """What tells the target of this drafter from another: name, dtypes, and `pipeline.target_hashes`."""
    record = {"name": target.target, "dtype": target.target_dtype, "trained_on": origin.get("target_dtype")}
    if target.target in pipeline.RANDOM_TARGETS:
        return record | {"config_sha256": None, "weights_sha256": None}
    return record | pipeline.target_hashes(target.target)


def write_folder(folder: Path, values: dict, weights: dict[str, Tensor], record: dict) -> None:
    folder.mkdir(parents=True)
    pipeline.write_tensors(folder / "model.safetensors", {k: w.contiguous() for k, w in weights.items()}, {"format": "pt"})
    pipeline.write_json(folder / "config.json", values)
    pipeline.write_json(folder / "export.json", record)


def free_for(output_dir: Path, overwrite: bool) -> None:
    """UserError unless the folder is new, empty, or an export that may be replaced."""
    if output_dir.is_dir() and any(output_dir.iterdir()):
        if not (output_dir / "export.json").is_file():
            raise UserError(f"--output-dir {output_dir}: not empty, and not an export of this tool")
        if not overwrite:
            raise UserError(f"--output-dir {output_dir}: holds an export already (--overwrite replaces it)")
    elif output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"--output-dir {output_dir}: a file of that name is in the way")


def move_into_place(partial: Path, output_dir: Path) -> None:
    old = output_dir.with_name(output_dir.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if output_dir.exists():
        output_dir.rename(old)
    partial.rename(output_dir)
    shutil.rmtree(old, ignore_errors=True)


# ---- Reading back: a second implementation, from the names in the formats alone ----


class PlainReader:
    """An exported folder as a loader sees it. Uses nothing of the training code; computes in fp32."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        self.values = json.loads((folder / "config.json").read_text())
        self.speculators = "speculators_model_type" in self.values
        self.layer = self.values["transformer_layer_config"] if self.speculators else self.values
        with safe_open(folder / "model.safetensors", "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        nested = self.values if self.speculators else self.values["dflash_config"]
        self.block, self.mask = nested["block_size"], nested["mask_token_id"]
        ids = nested["aux_hidden_state_layer_ids" if self.speculators else "target_layer_ids"]
        self.layer_ids = [i - 1 for i in ids] if self.speculators else list(ids)
        self.kinds, self.window = self.layer["layer_types"], self.layer["sliding_window"]
        self.theta = self.layer["rope_parameters"]["rope_theta"]
        self.largest = 0.0  # absolute value seen in any activation

    def shapes(self) -> dict[str, list[int]]:
        """Every tensor that the format asks for, and its shape."""
        c = self.layer
        hidden, inner, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        queries, keys = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
        shapes = {"fc": [hidden, len(self.layer_ids) * hidden], "hidden_norm": [hidden], "norm": [hidden]}
        for i in range(c["num_hidden_layers"]):
            for name, shape in {
                "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
                "self_attn.q_proj": [queries, hidden], "self_attn.k_proj": [keys, hidden],
                "self_attn.v_proj": [keys, hidden], "self_attn.o_proj": [hidden, queries],
                "self_attn.q_norm": [size], "self_attn.k_norm": [size],
                "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner],
            }.items():  # fmt: skip
                shapes[f"layers.{i}.{name}"] = shape
        if self.speculators:
            shapes |= {"embed_tokens": [c["vocab_size"], hidden], "lm_head": [c["vocab_size"], hidden]}
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def faults(self, target_layers: int, vocabulary: int) -> list[str]:
        """What a loader would stumble over, or worse, would not. vocabulary: rows of the target's embedding."""
        v, c, wanted = self.values, self.layer, self.shapes()
        slides = "sliding_attention" in self.kinds
        rules = {
            "architectures": v["architectures"] == ["DFlashDraftModel"],
            "model_type": c["model_type"] == "qwen3",
            "hidden_act": c["hidden_act"] == "silu",
            "attention_bias": c["attention_bias"] is False,
            "sample_from_anchor": v["sample_from_anchor"] is False,
            "vocab_size": c["vocab_size"] == vocabulary,
            "mask_token_id": 0 <= self.mask < vocabulary,
            "layer ids": self.layer_ids == sorted(set(self.layer_ids) & set(range(target_layers))),
            "layer_types": len(self.kinds) == c["num_hidden_layers"]
            and set(self.kinds) <= {"full_attention", "sliding_attention"},
            "sliding_window": c["use_sliding_window"] is slides and (self.window is not None) is slides,
            "rope_parameters": c["rope_parameters"] == {"rope_type": "default", "rope_theta": self.theta},
            "partial_rotary_factor": "partial_rotary_factor" not in c,
            "dtype": {str(t.dtype) for t in self.tensors.values()} == {f"torch.{v['dtype']}"},
            "finite weights": all(bool(t.isfinite().all()) for t in self.tensors.values()),
        }
        if self.speculators:
            method = v["speculators_config"]["proposal_methods"][0]
            rules["speculative_tokens"] = method["speculative_tokens"] == self.block - 1
            rules["draft_vocab_size"] = v["draft_vocab_size"] == c["vocab_size"]
            rules["sliding_window_non_causal"] = v["sliding_window_non_causal"] is not slides
        else:
            rules["block_size"] = v["block_size"] == self.block
            rules["rope_theta"] = v["rope_theta"] == self.theta and v["rope_scaling"] is None
            rules["num_target_layers"] = v["num_target_layers"] == target_layers
        found = [f"config.json: {name}" for name, holds in rules.items() if not holds]
        found += [f"tensor {name} is missing" for name in wanted.keys() - self.tensors.keys()]
        found += [f"tensor {name} belongs to no drafter" for name in self.tensors.keys() - wanted.keys()]
        both = wanted.keys() & self.tensors.keys()
        return found + [f"{name}: wrong shape" for name in both if list(self.tensors[name].shape) != wanted[name]]

    def seen(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.abs().max()))
        return x

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"].float()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.seen(x @ self.weight(name).T)

    def normed(self, x: Tensor, name: str) -> Tensor:
        scale = (x * x).mean(-1, keepdim=True).add(self.layer["rms_norm_eps"]).sqrt()
        return self.seen(x / scale * self.weight(name))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Dimension d is turned with dimension d + size/2, by position * theta^(-2d/size); x [T, heads, size]."""
        half = x.shape[-1] // 2
        angle = positions[:, None].float() / self.theta ** (torch.arange(half).float() / half)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def attention(self, name: str, kind: str, slots: Tensor, context: Tensor) -> Tensor:
        """slots [B, H] at the positions after context [T, H]; rows see themselves as the formats' servers do."""
        size, rows, every = self.layer["head_dim"], len(context), torch.cat([context, slots])
        at = torch.arange(len(every))
        q = self.normed(self.linear(slots, f"{name}.q_proj").unflatten(-1, (-1, size)), f"{name}.q_norm")
        k = self.normed(self.linear(every, f"{name}.k_proj").unflatten(-1, (-1, size)), f"{name}.k_norm")
        v = self.linear(every, f"{name}.v_proj").unflatten(-1, (-1, size))
        q, k = self.rotated(q, at[rows:]), self.rotated(k, at)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        if kind == "sliding_attention":
            behind = at[rows:, None] - at[None]
            hidden = (behind < 0) | (behind >= self.window)
            scores = scores.masked_fill(hidden, -torch.inf)
        return self.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1), f"{name}.o_proj")

    def hidden_states(self, states: dict[int, Tensor], slots: Tensor) -> Tensor:
        """Target layer id -> states [T, H], and embedded slots [B, H] -> the drafter's output [B, H]."""
        context = torch.cat([states[i] for i in self.layer_ids], -1)
        context = self.normed(self.linear(context, "fc"), "hidden_norm")
        for i, kind in enumerate(self.kinds):
            name = f"layers.{i}"
            normed = self.normed(slots, f"{name}.input_layernorm")
            slots = self.seen(slots + self.attention(f"{name}.self_attn", kind, normed, context))
            x = self.normed(slots, f"{name}.post_attention_layernorm")
            gate, up = self.linear(x, f"{name}.mlp.gate_proj"), self.linear(x, f"{name}.mlp.up_proj")
            slots = self.seen(slots + self.linear(self.seen(gate * gate.sigmoid() * up), f"{name}.mlp.down_proj"))
        return self.normed(slots, "norm")


# ---- The gate ----


def random_states(layer_id: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(layer_id + 1))


@torch.no_grad()
def check_export(folder: Path, drafter: pipeline.DFlashDrafter, ends: pipeline.FrozenEnds) -> dict:
    """Read the folder back and compare it with the drafter (fp32, weights already rounded to the written dtype).

    Returns the largest relative difference of logits and the largest activation. Raises UserError naming what is wrong.
    """
    c, rows = drafter.config, 32
    try:
        reader = PlainReader(folder)
        faults = reader.faults(c.num_target_layers, len(ends.embedding))
    except (KeyError, TypeError) as error:
        raise UserError(f"the export cannot be read back: {error!r} in config.json") from None
    own = drafter.state_dict() | (frozen_copies(ends) if reader.speculators else {})
    faults += [f"{name}: other values than the checkpoint's" for name in sorted(own.keys() & reader.tensors.keys())
               if not torch.equal(own[name].float(), reader.tensors[name].float())]  # fmt: skip
    if faults:
        raise UserError(f"the export is wrong: {'; '.join(faults[:5])}")
    if "sliding_attention" in c.layer_types:  # so much context that the window hides some of it from every slot
        rows = min(c.sliding_window + c.block_size, 4096)
    states = {i: random_states(i, rows, c.hidden_size) for i in {*c.target_layer_ids, *reader.layer_ids}}
    known = (c.mask_token_id + 1) % len(ends.embedding)
    features = torch.cat([states[i] for i in c.target_layer_ids], -1)
    slots = ends.embed(torch.tensor([known] + [c.mask_token_id] * (c.block_size - 1))).float()
    head = ends.head_weight.float()
    expected = drafter_output(drafter, features, slots) @ head.T
    ids = torch.tensor([known] + [reader.mask] * (reader.block - 1))
    if reader.speculators:  # its own copies of embedding and head
        found = reader.linear(reader.hidden_states(states, reader.weight("embed_tokens")[ids]), "lm_head")
    else:
        found = reader.hidden_states(states, ends.embed(ids).float()) @ head.T
    if found.shape != expected.shape:
        raise UserError(f"the export is wrong: a block gives {list(found.shape)} logits, not {list(expected.shape)}")
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:  # so NaN fails too
        raise UserError(f"the export computes something else than the checkpoint: logits differ by {difference:.2g}")
    return {"difference": difference, "largest": reader.largest, "context": rows}


def drafter_output(drafter: pipeline.DFlashDrafter, features: Tensor, slots: Tensor) -> Tensor:
    """The training code's own answer for one block after a context of len(features) tokens."""
    c, rows = drafter.config, len(features)
    block = SimpleNamespace(
        token_ids=range(rows), position_ids=np.arange(rows + 1), anchor_rows=np.array([rows]), num_anchors=1
    )
    masks = {}
    for kind, window in (("full_attention", None), ("sliding_attention", c.sliding_window)):
        masks[kind] = pipeline.dense_mask(pipeline.visibility(block, c.block_size, window), rows + len(slots))
    positions = torch.arange(rows + len(slots))
    return drafter(features, positions[:rows], slots, positions[rows:], masks)


# ---- What is said ----


def notes(config: pipeline.DrafterConfig, form: str, record: dict, origin: dict, ends) -> list[str]:
    """What a user should know before serving, one line each. record: see `target_record`."""
    said, name = [], record["name"]
    if origin and absolute(origin["target"]) != name:
        said.append(f"warning: trained on states of {origin['target']}, exported for {name}")
    if form == "speculators" and Path(name).is_dir():
        said.append("note: config.json names the target by a folder of this machine; for others use --target HUB_ID")
    if origin.get("target_dtype") not in (None, record["dtype"]):
        said.append(
            f"warning: trained on {origin['target_dtype']} states, the target's checkpoint is {record['dtype']}: "
            f"serving it in another dtype than {origin['target_dtype']} changes what the drafter reads"
        )
    if config.target_layer_ids[-1] == config.num_target_layers - 1:
        said.append(
            "warning: the last target layer is captured before the final norm; z-lab's Transformers code reads it "
            "after the norm, and the speculators converter drops it"
        )
    if form == "speculators" and len(set(config.layer_types)) > 1:
        said.append(
            "warning: some vLLM releases read sliding_window_non_causal false as causal for full layers too; "
            "--format zlab says it per layer"
        )
    if ends.embed_scale != 1.0:
        said.append(f"warning: the server must scale the drafter's embedding by {ends.embed_scale:g}, as in the target")
    if ends.softcap is not None:
        said.append("note: no form holds the target's soft cap on logits; greedy proposals do not depend on it")
    return said


def serve_commands(config: pipeline.DrafterConfig, form: str, target: str, folder: Path) -> list[str]:
    """The commands, one line each."""
    mixed = "VLLM_USE_V2_MODEL_RUNNER=1 " if len(set(config.layer_types)) > 1 else ""
    model, path = shlex.quote(target), str(folder)
    method = {"method": "dflash", "model": path, "num_speculative_tokens": config.block_size - 1}
    lines = [
        f"{mixed}vllm serve {model} --speculative-config {shlex.quote(json.dumps(method))} "
        "--attention-backend flash_attn --max-num-batched-tokens 32768"
    ]
    if form == "speculators":
        return [*lines, f"{mixed}vllm serve {shlex.quote(path)}  # the same: it names its target and token count"]
    return [
        *lines,
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(path)} --speculative-num-draft-tokens {config.block_size}",
    ]


SERVING = """\
Servers change what they accept and how they read it: note their version with every figure.
Measure with the prefix cache off (vLLM --no-enable-prefix-caching, SGLang --disable-radix-cache) and on: a fault there
looks like a bad drafter. An accepted length well below what tools/eval_acceptance.py measures on the same prompts is a fault
of the serving, not of the training; near 1.0, of layer ids, dtype or cache."""


def absolute(target: str) -> str:
    """A local folder by its full path, so that the export says the same anywhere; a hub id as it is."""
    return str(Path(target).resolve()) if Path(target).is_dir() else target


def read_origin(folder: Path) -> dict:
    """What is known about how a drafter was made; empty if nothing, or if what stands there is not ours.

    Of a checkpoint all flags of the run, of an export target, target_dtype and, where known, chat_template_kwargs; of both
    step, data (the documents' fingerprint) and hashes (the target's, see `pipeline.target_hashes`; None for random ones).
    """
    try:
        if (folder.parent / "state.json").is_file():
            state = json.loads((folder.parent / "state.json").read_text())
            flags, identity = state["arguments"], state["identity"]
            template = {"chat_template_kwargs": flags.get("chat_template_kwargs") or "{}"}
            hashes = identity["target"] if isinstance(identity["target"], dict) else None
            return flags | template | {"step": state["step"], "data": identity["data"], "hashes": hashes}
        if (folder / "export.json").is_file():
            record = json.loads((folder / "export.json").read_text())
            target = record["target"]
            hashes = {name: value for name, value in target.items() if name.endswith("_sha256") and value is not None}
            return {key: record[key] for key in ("step", "data", "chat_template_kwargs") if key in record} | {
                "target": target["name"], "target_dtype": target["trained_on"], "hashes": hashes or None,
            }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def check_same_target(config: pipeline.DrafterConfig, text, name: str) -> None:
    """UserError when the drafter's shapes cannot belong to the target."""
    for key in ("hidden_size", "vocab_size"):
        if getattr(config, key) != getattr(text, key):
            raise UserError(f"target {name} has {key} {getattr(text, key)}, the drafter {getattr(config, key)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="a run's output folder (newest checkpoint), a checkpoint, or a drafter folder")
    parser.add_argument("--format", required=True, choices=["zlab", "speculators"], help="form of the export")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder to make; it must be new or empty")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in --output-dir")
    parser.add_argument("--target", help="folder or hub id to serve with; default: the target of the run")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16",
        help="dtype of the weights; float16 is not offered, its range is too small",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code shipped with the target")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.output_dir = args.output_dir.resolve()
    free_for(args.output_dir, args.overwrite)
    folder = pipeline.find_drafter_folder(args.drafter)
    origin = read_origin(folder)
    if args.target is None and not origin:
        raise UserError(f"{args.drafter} does not say which target it is for: name it with --target")
    name = absolute(args.target or origin["target"])
    target = pipeline.TargetArguments(target=name, trust_remote_code=args.trust_remote_code)
    target_config = pipeline.load_target_config(target)
    text, dtype = target_config.get_text_config(), getattr(torch, args.dtype)
    target.target_dtype = str(target_config.dtype).removeprefix("torch.")
    drafter = pipeline.load_drafter(folder, CPU, dtype, text.num_hidden_layers).requires_grad_(False)
    config = drafter.config
    check_same_target(config, text, name)

    ends, weights = pipeline.load_frozen_ends(target, target_config, CPU, dtype), drafter.state_dict()
    if args.format == "speculators":
        weights = weights | frozen_copies(ends)
        values = speculators_config(config, name, target_config, args.dtype)
    else:
        values = zlab_config(config, text, args.dtype)
    record = {
        "format": args.format, "dtype": args.dtype, "step": origin.get("step"), "data": origin.get("data"),
        "chat_template_kwargs": origin.get("chat_template_kwargs"),
        "block_layout": "slot 0 is the known token, slots 1 to B-1 propose (sample_from_anchor false)",
        "target": target_record(target, origin, target_config),
    }  # fmt: skip
    partial = args.output_dir.with_name(args.output_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_folder(partial, values, weights, record)
        checked = check_export(partial, drafter.float(), ends)
    except UserError:
        shutil.rmtree(partial)
        raise
    move_into_place(partial, args.output_dir)
    say(args, config, record, origin, checked, ends)


def say(args, config: pipeline.DrafterConfig, record: dict, origin: dict, checked: dict, ends) -> None:
    """The report of an export that passed its check."""
    step = f"step {origin['step']}, " if origin.get("step") is not None else ""
    size = (args.output_dir / "model.safetensors").stat().st_size / 1e6
    print(
        f"{args.output_dir}: {step}{config.describe_layers()}, block {config.block_size}, reads target "
        f"layers {list(config.target_layer_ids)}, mask token {config.mask_token_id}, {args.dtype}, {size:,.1f} MB, "
        f"{args.format} form"
    )
    print(f"block layout: {record['block_layout']}")
    print(
        f"read back: every tensor equal; logits differ by {checked['difference']:.1e} at most (relative, fp32, random "
        f"states, {checked['context']} context tokens); largest activation {checked['largest']:.3g}"
    )
    for line in notes(config, args.format, record["target"], origin, ends):
        print(line)
    if checked["largest"] > FLOAT16_LARGEST:
        print(f"warning: activations exceed float16's range ({FLOAT16_LARGEST:g}): never serve this drafter in float16")
    print("\nserve it:")
    for line in serve_commands(config, args.format, record["target"]["name"], args.output_dir):
        print(f"  {line}")
    print("\n" + SERVING, flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
