"""Train a DFlash drafter (arXiv 2602.06036) for a frozen language model, target and drafter on ranks of their own.

    # any machine, no argument: the demo target if it was prepared, else a toy; 5 target and 3 drafter ranks
    torchrun --nproc_per_node 8 train_dflash_pipeline.py

    # your model, your conversations
    torchrun --nproc_per_node 8 train_dflash_pipeline.py --target Qwen/Qwen3-8B --train-data chats.jsonl --num-epochs 3 \
        --num-target-ranks 3 --tokens-per-micro-batch 4096 --anchors-per-micro-batch 512 --output-dir runs/qwen3-8b

    # every flag
    python train_dflash_pipeline.py --help

Target ranks run the frozen model, capture the hidden states of a few layers with hooks, pack the padding away and
send them. Drafter ranks receive them and train the drafter under DeepSpeed ZeRO. Only hidden states travel: which
documents are in micro-batch m, their tokens, masks, anchors, loss weights and noise all follow from m (section 4).

The file is laid out as the data flows:

     1 settings     flags -> dataclasses, checked          9 target rank   documents -> hidden states, sent
     2 topology     ranks -> roles, groups, links         10 drafter       context + mask tokens -> hidden states
     3 text         chat rows -> token ids and loss mask  11 loss          hidden states -> loss and its gradient
     4 plan         m -> everything but hidden states     12 checkpoints   step -> folder, folder -> step
     5 target       name -> frozen model, or its ends     13 monitor       sums -> console, JSON, TensorBoard
     6 capture      layer outputs -> packed rows          14 drafter rank  hidden states -> optimizer steps
     7 guard        a number not finite -> its name       15 main
     8 transport    slot on a target -> slot on a drafter
"""

import codecs
import contextlib
import copy
import dataclasses
import faulthandler
import functools
import gc
import gzip
import hashlib
import importlib.metadata
import inspect
import ipaddress
import itertools
import json
import math
import os
import pickle
import queue
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace
from typing import Iterable, Iterator, Optional

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, library, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent
DEMO_TARGET = REPOSITORY / "models" / "SmolLM2-135M-Instruct"  # made by tools/prepare_demo_target.py
DEMO_DATA = REPOSITORY / "launch" / "demo_train.jsonl.gz"

# Layer id i is the OUTPUT of decoder layer i, counted from 0. These are the ids for the 64-layer default target
# (Qwen3.6-27B); `choose_fc_layer_ids` gives those of other depths.
FC_LAYER_IDS = (1, 16, 31, 46, 61)
VERIFIER_LAST_LAYER = 63


class UserError(Exception):
    """A mistake the user can mend. Shown as one line, without a traceback."""


class NonFiniteError(RuntimeError):
    """A number that is not finite, or too many of them in a row: a message of one line that says where."""


def first_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = str(error).strip().split("\n", 1)[0]
    return text if isinstance(error, (UserError, NonFiniteError)) else f"{type(error).__name__}: {text}"


class DamagedFile(Exception):
    """What is wrong with a checkpoint or another folder or file that a run is given, in words."""


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Optional[dict[str, str]] = None) -> None:
    """A safetensors file with the rights of any new file: `save_file` alone hides it from other users."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def read_json_object(path: Path) -> dict:
    """The object in a JSON file. Raises DamagedFile."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedFile(f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name} cannot be read ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path.name} holds no JSON object")
    return value


def sync_to_disk(path: Path) -> None:
    """Return once a file, or the names in a folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ======================================================================================================================
# 1. Settings. In: command line and YAML. Out: one checked dataclass per group of flags.
# ======================================================================================================================


def setting(default, help: str, **metadata):
    """A dataclass field with the help text that `--help` shows."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class TargetArguments:
    target: str = setting(
        "auto",
        "Frozen model: folder or hub id; 'toy', 'qwen3-8b-shape' or 'qwen3.6-27b-shape' for random weights of that "
        "shape; 'auto': the demo target if tools/prepare_demo_target.py made it, else the toy.",
    )
    tokenizer: Optional[str] = setting(None, "Folder or hub id of the tokenizer. Default: the target's own.")
    target_dtype: str = setting(
        "auto",
        "Dtype of the target and of the hidden states that travel. auto: as in its checkpoint; "
        "float32 on a CPU without bf16 instructions.",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    trust_remote_code: bool = setting(False, "Run Python code shipped with the model or tokenizer.")
    num_fc_layers: Optional[int] = setting(
        None, "Captured layers K, spread by the z-lab rule. Independent of the drafter's depth. (default: 5)"
    )
    fc_layer_ids: Optional[list[int]] = setting(
        None, "Captured layers by id (outputs of decoder layers, counted from 0), in place of the rule."
    )
    target_layout: str = setting(
        "auto",
        "How documents lie in the target's forward pass. packed: end to end in one row of N, kept apart by "
        "variable-length attention, for targets of plain softmax attention and hybrids of the gated delta rule. padded: one "
        "a row, in buckets of similar length. auto: packed on CUDA in half precision where the target allows it; the start "
        "says which and why.",
        choices=["auto", "packed", "padded"],
    )
    target_fp8: bool = setting(
        False,
        "Compute the linear layers of the target's decoder layers in fp8 (e4m3, one scale a row). Faster, but the drafter "
        "then learns from other states than a served bf16 target has; the start says how far off they are.",
    )


@dataclass
class DrafterArguments:
    block_size: int = setting(16, "Block size B: one real token and B-1 proposed ones.")
    num_draft_layers: int = setting(5, "Layers of the drafter.")
    sliding_window: int = setting(
        2048, "Window W of sliding layers, in tokens. There are some where --num-full-attention-layers is below the depth."
    )
    num_full_attention_layers: Optional[int] = setting(
        None, "So many of the last draft layers attend to the whole context, the others slide. Default: all of them."
    )
    mask_token_id: Optional[int] = setting(
        None,
        "Token id of the slots to fill. Default: the tokenizer's mask token, else an unused embedding row, "
        "else a special token that the chat template never writes.",
    )
    init_from: Optional[str] = setting(
        None,
        "Start from a trained drafter: a run, a checkpoint, or a folder or hub id in z-lab's or speculators' format. "
        "Depth, block, window, mask token and captured layers are then its own unless flags say otherwise.",
    )
    init_from_target_layer: Optional[int] = setting(
        None,
        "Start every draft layer as a copy of this target layer, and the context as what that layer read: "
        "a far better start for a short run.",
    )


@dataclass
class DataArguments:
    train_data: Optional[list[str]] = setting(
        None,
        "JSONL files (.gz too) of chat rows (messages, ShareGPT conversations, or prompt and response), or one file of "
        "tools/prepare_data.py. "
        "Default: the demo's.",
    )
    eval_data: Optional[list[str]] = setting(
        None, "Held-out chat rows, in the same formats: their loss and acceptance estimate are measured on the way."
    )
    eval_every: int = setting(100, "Steps between evaluations on --eval-data; there is one after the last step, too.")
    max_document_tokens: Optional[int] = setting(
        None, "Longer documents are counted and left out. Default: --tokens-per-micro-batch."
    )
    cut_off_answers: str = setting(
        "keep",
        "Rows whose finish_reason is 'length'. keep: train on the answer, without an end of turn. drop: count and leave out.",
        choices=["keep", "drop"],
    )
    chat_template_kwargs: Optional[str] = setting(
        None, "JSON object of variables for the chat template, such as '{\"enable_thinking\": false}'."
    )
    tokens_per_micro_batch: int = setting(1024, "Packed length N of a micro-batch, in tokens.")
    anchors_per_micro_batch: int = setting(32, "Blocks A trained per micro-batch, at most.")
    anchor_draw: str = setting(
        "uniform",
        "How they are drawn. uniform: from all supervised positions alike. even: as many from every document, as far as "
        "it has them, so that short answers count as much as long ones. Held-out data: uniform.",
        choices=["uniform", "even"],
    )
    loss: str = setting(
        "ce",
        "ce: cross-entropy on the text. kl: KL divergence from the target's own distribution.",
        choices=["ce", "kl"],
    )
    loss_weights: str = setting(
        "decay",
        "decay: slot k weighs exp(-(k-1)/gamma). dpace: D-PACE, weights from the drafter's own probabilities (ce only).",
        choices=["decay", "dpace"],
    )
    loss_gamma: Optional[float] = setting(None, "Gamma of the decay. Default: 7, 5, 4 for B = 16, 10, 8, else B/2.")
    dpace_alpha: float = setting(0.5, "D-PACE: how far probabilities are drawn towards 1; 1 weighs by what is left.")
    noise_std: float = setting(0.0, "Standard deviation of the Gaussian noise added to the captured states.")
    noise_schedule: str = setting(
        "constant", "How the noise goes over the run.", choices=["constant", "linear", "cosine"]
    )
    seed: int = setting(0, "Seed of the initial weights, the order of the data, the anchors and the noise.")


@dataclass
class OptimizationArguments:
    max_steps: int = setting(20, "Optimizer steps.")
    num_epochs: Optional[float] = setting(None, "Passes over the data; takes the place of --max-steps.")
    gradient_accumulation_steps: int = setting(1, "Micro-batches per drafter rank and optimizer step.")
    learning_rate: float = setting(6e-4, "Peak learning rate.")
    warmup_ratio: float = setting(0.04, "Share of the steps in which the learning rate rises linearly.")
    lr_schedule: str = setting(
        "cosine",
        "After the warm-up. cosine: falls all the way. wsd: stays at the peak, then falls linearly. constant: stays.",
        choices=["cosine", "wsd", "constant"],
    )
    decay_ratio: float = setting(0.2, "Share of the steps, the last ones, in which wsd falls.")
    min_lr_ratio: float = setting(0.1, "Share of the peak at which cosine and wsd end.")
    adam_beta1: float = setting(0.9, "AdamW beta 1.")
    adam_beta2: float = setting(0.95, "AdamW beta 2.")
    weight_decay: float = setting(0.0, "AdamW weight decay.")
    max_grad_norm: float = setting(1.0, "Gradient clipping by global norm; 0 turns it off.")
    deepspeed: str = setting(
        str(REPOSITORY / "ds_configs" / "zero2.json"), "DeepSpeed JSON; its 'auto' values are filled from these flags."
    )


@dataclass
class PipelineArguments:
    num_target_ranks: str = setting(
        "auto",
        "Target ranks; the others train. auto: five eighths, one of each at least. measure: as auto, and after a few "
        "steps say which split of the same ranks would be faster, by the rates measured.",
    )
    target_tp: int = setting(
        1,
        "Ranks that hold one target together, by transformers' own tensor parallel plan: for a target that does not "
        "fit into one GPU. Divides the target ranks and the target's heads.",
    )
    placement: str = setting(
        "spread",
        "How roles are laid over nodes; losses do not depend on it. spread: every node gets targets and drafters in "
        "proportion, so that hidden states stay inside it; targets-first: the first nodes hold the targets.",
        choices=["spread", "targets-first"],
    )
    async_postprocess: bool = setting(
        True, "Pack, noise and send on a side stream and thread while the target computes the next forward."
    )
    split_fc_layers: bool = setting(
        True, "Send the K layers as K tensors and join them on the drafter; else join and add noise on the target."
    )
    prefetch_depth: int = setting(2, "Slots per rank: micro-batches in flight.")
    verify_transfers: bool = setting(False, "Send a checksum with every payload and compare it.")
    transport_timeout: float = setting(
        600.0, "Seconds any rank waits for another before it gives up. Starting and saving may take longer."
    )
    device: str = setting(
        "auto",
        "auto: CUDA when no two ranks of a role must share a GPU, else the CPU. A target and a drafter may share one: "
        "hidden states then pass through host memory.",
        choices=["auto", "cuda", "cpu"],
    )
    compile: bool = setting(
        True, "Compile the target's layers, the drafter and its loss (CUDA only; the drafter not under ZeRO 3)."
    )
    poison_slots: bool = setting(
        False, "Fill released slots with NaN, so that memory used after its release shows at once. For debugging."
    )
    inject_fault: Optional[str] = setting(
        None,
        "KIND@M[:RANK]: break micro-batch M on purpose, on a rank that works on it, to see the guard work. nan-layer: "
        "a captured state is NaN; nan-weight: a drafter weight is; early-release: a slot is freed while it is still "
        "read; short-payload: fewer bytes are sent than announced; stall: sleeps past --transport-timeout; die: "
        "kill -9; oom: out of memory; slow-save: the next save takes longer than --transport-timeout.",
    )


@dataclass
class RunArguments:
    output_dir: str = setting("runs/dflash", "Where checkpoints, metrics.jsonl and TensorBoard files go.")
    save_every: int = setting(0, "Steps between checkpoints; the last step is always saved. 0: that alone.")
    keep_checkpoints: int = setting(2, "Newest checkpoints kept.")
    resume: str = setting(
        "auto",
        "auto: from the output folder's newest checkpoint, if any; a checkpoint's path; never. The latter two hold at every "
        "restart, too, which then does all steps again: not for launchers that restart or requeue.",
    )
    log_every: int = setting(1, "Steps between console lines; metrics.jsonl and TensorBoard get every step.")
    on_nonfinite: str = setting(
        "raise",
        "What a NaN or an infinity does. raise: ends the run, naming the first tensor that held it. skip: its "
        "micro-batch counts for nothing, a step whose gradient is not finite is not taken; both are named and counted. "
        "Either way the micro-batch is kept under nonfinite/ in the output folder, for tools/replay_dump.py.",
        choices=["raise", "skip"],
    )
    max_skips: int = setting(10, "So many skips in a row, of micro-batches or of steps, end the run.")


@dataclass
class Arguments:
    """All flags, by group. Field names are unique across groups, so that flags and YAML keys are flat."""

    target: TargetArguments
    drafter: DrafterArguments
    data: DataArguments
    optimization: OptimizationArguments
    pipeline: PipelineArguments
    run: RunArguments

    def flat(self) -> dict:
        """Every setting as one flat dict, as printed, saved and compared."""
        return {k: v for group in dataclasses.fields(self) for k, v in vars(getattr(self, group.name)).items()}


ARGUMENT_GROUPS = [group.type for group in dataclasses.fields(Arguments)]


def parse_arguments(argv: Optional[list[str]] = None) -> Arguments:
    """Flags, over those of `--config FILE.yaml`, over those of the drafter that `--init-from` names, over the defaults.

    Raises UserError for an unknown flag or key, a wrong type or a value that cannot work.
    """
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message):
            raise UserError(f"{message} (--help lists the flags)")

    parser = Parser(
        ARGUMENT_GROUPS, description=__doc__.split("\n", 1)[0], prog="train_dflash_pipeline.py", allow_abbrev=False
    )
    parser.add_argument("--config", help="YAML file of flag defaults, one `key: value` a flag.")
    argv = sys.argv[1:] if argv is None else argv
    first = Parser([], add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--init-from", "--init_from")
    config_path, yaml_flags = first.parse_known_args(argv)[0].config, []
    if config_path is not None:
        try:
            yaml_flags = read_yaml_flags(config_path)
            parser.parse_args(yaml_flags)
        except UserError as error:
            raise UserError(f"--config {config_path}: {error}") from None
    init_from = first.parse_known_args([*yaml_flags, *argv])[0].init_from
    drafter_flags = [] if init_from is None else read_drafter_flags(init_from)
    namespace = parser.parse_args([*drafter_flags, *yaml_flags, *argv])
    groups = [G(**{f.name: getattr(namespace, f.name) for f in dataclasses.fields(G)}) for G in ARGUMENT_GROUPS]
    args = Arguments(*groups)
    check_arguments(args)
    return args


def read_yaml_flags(path: str) -> list[str]:
    """A YAML file as flags, so that its values are checked as flags are; its keys may use hyphens or underscores."""
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(" ".join(str(error).split())) from None
    if not isinstance(values, dict):
        raise UserError("expected `key: value` lines")
    known, flags = {f.name for G in ARGUMENT_GROUPS for f in dataclasses.fields(G)}, []
    for key, value in values.items():
        if (name := str(key).replace("-", "_")) not in known:
            raise UserError(f"unknown key '{key}'")
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


def read_drafter_flags(name: str) -> list[str]:
    """The flags that describe a trained drafter, see `--init-from`."""
    config = read_drafter_config(find_drafter_folder(name))
    values = {
        "block_size": config.block_size,
        "num_draft_layers": config.num_hidden_layers,
        "sliding_window": config.sliding_window,
        "num_full_attention_layers": config.layer_types.count("full_attention"),
        "mask_token_id": config.mask_token_id,
    }
    layer_ids = ["--fc_layer_ids", *map(str, config.target_layer_ids)]
    return [f"--{key}={value}" for key, value in values.items()] + layer_ids


def check_arguments(args: Arguments) -> None:
    """Raise UserError for values that no run could use, before anything is loaded."""
    drafter, data, optim, pipe, run = args.drafter, args.data, args.optimization, args.pipeline, args.run
    at_least = [
        ("--num-fc-layers", args.target.num_fc_layers, 1),
        ("--block-size", drafter.block_size, 2),
        ("--num-draft-layers", drafter.num_draft_layers, 1),
        ("--sliding-window", drafter.sliding_window, 1),
        ("--tokens-per-micro-batch", data.tokens_per_micro_batch, 2),
        ("--anchors-per-micro-batch", data.anchors_per_micro_batch, 1),
        ("--max-document-tokens", data.max_document_tokens, 2),
        ("--noise-std", data.noise_std, 0),
        ("--seed", data.seed, 0),
        ("--learning-rate", optim.learning_rate, 0),
        ("--weight-decay", optim.weight_decay, 0),
        ("--max-grad-norm", optim.max_grad_norm, 0),
        ("--max-steps", optim.max_steps, 1),
        ("--gradient-accumulation-steps", optim.gradient_accumulation_steps, 1),
        ("--target-tp", pipe.target_tp, 1),
        ("--prefetch-depth", pipe.prefetch_depth, 1),
        ("--transport-timeout", pipe.transport_timeout, 1),
        ("--eval-every", data.eval_every, 1),
        ("--save-every", run.save_every, 0),
        ("--keep-checkpoints", run.keep_checkpoints, 1),
        ("--log-every", run.log_every, 1),
        ("--max-skips", run.max_skips, 1),
    ]
    for flag, value, least in at_least:
        if value is not None and not least <= value < math.inf:  # so NaN is refused too
            raise UserError(f"{flag} {value}: must be at least {least}")
    if args.target.target_fp8 and pipe.target_tp > 1:
        raise UserError("--target-fp8: not with --target-tp")
    for flag, value in (("--loss-gamma", data.loss_gamma), ("--num-epochs", optim.num_epochs)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag} {value}: must be above 0")
    for flag, value in (("--adam-beta1", optim.adam_beta1), ("--adam-beta2", optim.adam_beta2)):
        if not 0 <= value < 1:
            raise UserError(f"{flag} {value}: must lie in 0..1, 1 excluded")
    for flag, value in (("--warmup-ratio", optim.warmup_ratio), ("--decay-ratio", optim.decay_ratio),
                        ("--min-lr-ratio", optim.min_lr_ratio), ("--dpace-alpha", data.dpace_alpha)):  # fmt: skip
        if not 0 <= value <= 1:
            raise UserError(f"{flag} {value}: must lie in 0..1")
    if data.loss_weights == "dpace" and data.loss != "ce":
        raise UserError("--loss-weights dpace needs --loss ce: it weighs by the probability of the text's own token")
    if drafter.init_from is not None and drafter.init_from_target_layer is not None:
        raise UserError("--init-from and --init-from-target-layer exclude each other")
    full = drafter.num_full_attention_layers
    if full is not None and not 0 <= full <= drafter.num_draft_layers:
        raise UserError(f"--num-full-attention-layers {full}: the drafter has {drafter.num_draft_layers} layers")
    if pipe.num_target_ranks not in ("auto", "measure") and not pipe.num_target_ranks.isdecimal():
        raise UserError(f"--num-target-ranks {pipe.num_target_ranks}: a number, auto or measure")
    if (data.max_document_tokens or 0) > data.tokens_per_micro_batch:
        raise UserError("--max-document-tokens must not exceed --tokens-per-micro-batch: a document is never cut")
    for flag, paths in (("--train-data", data.train_data), ("--eval-data", data.eval_data)):
        for path in paths or []:
            if not Path(path).is_file():
                raise UserError(f"{flag} {path}: no such file")
        is_prepared(paths or [])  # raises where one stands among other files
    parse_template_kwargs(data.chat_template_kwargs)
    parse_fault(pipe.inject_fault)
    if not Path(optim.deepspeed).is_file():
        raise UserError(f"--deepspeed {optim.deepspeed}: no such file")


def learning_rate_at(step: int, total_steps: int, args: OptimizationArguments) -> float:
    """Linear warm-up to the peak, then by `lr_schedule` down to its `min_lr_ratio` at the last step (steps from 0)."""
    warmup = max(1, round(args.warmup_ratio * total_steps))
    if step < warmup:
        return args.learning_rate * (step + 1) / warmup
    falling_from = warmup if args.lr_schedule == "cosine" else total_steps - 1 - round(args.decay_ratio * total_steps)
    progress = min(1.0, max(0, step - falling_from) / max(1, total_steps - 1 - falling_from))
    height = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "wsd": 1 - progress, "constant": 1.0}
    return args.learning_rate * (args.min_lr_ratio + (1 - args.min_lr_ratio) * height[args.lr_schedule])


def noise_std_at(step: int, total_steps: int, args: DataArguments) -> float:
    """Noise of one optimizer step: constant, or falling to 0 along a line or a cosine."""
    progress = step / max(1, total_steps)
    share = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return args.noise_std * share[args.noise_schedule]


# ======================================================================================================================
# 2. Topology. In: torchrun's environment. Out: this rank's role, its process group and its links to the other role.
# ======================================================================================================================
# DeepSpeed takes the whole torch world for its own. So each role gets a world of its own: rank and size within the
# role, on one store under a prefix. Links across roles are two-rank groups on the same store.


@dataclass(frozen=True)
class Topology:
    """Who this process is, and where every role lives. A role's ranks are numbered in the order of global ranks.

    With `target_tp` above 1 a target is a rank of role "target", its leader, and the next ranks, "target shard". They
    compute the same micro-batches; to the drafters the leader is the target.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    num_targets: int
    hosts: dict[int, str] = field(default_factory=dict, compare=False)  # by rank, where there are several
    nodes: tuple[int, ...] = ()  # by rank, the number of its node; empty: all on one
    target_ranks: tuple[int, ...] = ()  # global ranks of targets, or of their leaders, ascending; empty: the first ones
    target_tp: int = 1  # ranks of one target

    @property
    def num_drafters(self) -> int:
        return self.world_size - self.num_targets * self.target_tp

    @functools.cached_property
    def ranks_of(self) -> dict[str, list[int]]:
        """Role -> the global ranks that have it, in order of their rank within the role."""
        targets = list(self.target_ranks or range(0, self.num_targets * self.target_tp, self.target_tp))
        shards = [leader + i for leader in targets for i in range(1, self.target_tp)]
        drafters = sorted(set(range(self.world_size)).difference(targets, shards))
        return {"target": targets, "target shard": shards, "drafter": drafters}

    @property
    def role(self) -> str:
        return next(role for role, ranks in self.ranks_of.items() if self.rank in ranks)

    @property
    def role_rank(self) -> int:
        return self.ranks_of[self.role].index(self.rank)

    def global_rank(self, role: str, role_rank: int) -> int:
        return self.ranks_of[role][role_rank]

    @property
    def target(self) -> int:
        """The target that this rank, no drafter, is or belongs to."""
        return self.role_rank if self.role == "target" else self.role_rank // (self.target_tp - 1)

    @property
    def shard_peers(self) -> list[int]:
        """The other ranks of this rank's target, by global rank."""
        leader = self.global_rank("target", self.target)
        return [rank for rank in range(leader, leader + self.target_tp) if rank != self.rank]

    @property
    def default_group(self) -> tuple[str, int, int]:
        """(name, rank, size) of the process group that is this rank's torch world: its role, or the ranks of its target
        where that is sharded, since transformers shards over the whole world."""
        if self.role == "drafter" or self.target_tp == 1:
            return self.role, self.role_rank, len(self.ranks_of[self.role])
        return f"target{self.target}", self.rank - self.global_rank("target", self.target), self.target_tp

    def node_of(self, role: str, role_rank: int) -> int:
        """The number of the node on which a rank lives."""
        return self.nodes[self.global_rank(role, role_rank)] if self.nodes else 0

    # Which ranks a micro-batch meets. Every target and every drafter works through its own numbers in order, and a
    # transfer of m needs both at m. That cannot deadlock, whatever fixed function of m `target_of` is. Take the least m
    # not yet received. Its target has sent all its smaller numbers, so it is at m. Its drafter has received all its
    # smaller ones; if it lacks a free slot for m, it trains on one of them, and that ends: what it needs from the other
    # drafters are their micro-batches of the same micro-step, m' with m' // D < m // D, and those are received, being
    # smaller than m. A stream ends at one m for both of its sides, after which both pass over it (section 8).

    @functools.cached_property
    def target_table(self) -> list[int]:
        """The target of every m of one period. Each target computes the same number of them, m mod T on one node.

        On several nodes a micro-batch stays on its drafter's node as far as the targets there can take their drafters'
        load; what they cannot take goes evenly, as it comes, to the nodes that have targets to spare.
        """
        num_targets, num_drafters = self.num_targets, self.num_drafters
        targets, homes = defaultdict(list), [self.node_of("drafter", d) for d in range(num_drafters)]
        for target in range(num_targets):
            targets[self.node_of("target", target)].append(target)
        # both in units of one T x D-th of all micro-batches
        able = {node: len(targets[node]) * num_drafters for node in {*homes, *targets}}
        wanted = {node: homes.count(node) * num_targets for node in able}
        spare = {node: able[node] - wanted[node] for node in sorted(able) if able[node] > wanted[node]}
        table, asked, given, helped = [], Counter(), Counter(), Counter()
        for m in range(math.lcm(num_targets, num_drafters)):
            node = homes[m % num_drafters]
            asked[node] += 1
            if able[node] < wanted[node]:  # so often evenly: of `wanted` micro-batches `able` stay
                stays = asked[node] * able[node] // wanted[node] > (asked[node] - 1) * able[node] // wanted[node]
                if not stays:
                    node = min(spare, key=lambda other: ((helped[other] + 1) / spare[other], other))  # the next one due
                    helped[node] += 1
            table.append(targets[node][given[node] % len(targets[node])])
            given[node] += 1
        return table

    def target_of(self, m: int) -> int:
        """Target (rank within its role) that computes micro-batch m. Any fixed function of m gives the same run."""
        return self.target_table[m % len(self.target_table)]

    def drafter_of(self, m: int) -> int:
        """Drafter (rank within its role) that trains on micro-batch m."""
        return m % self.num_drafters

    def micro_batches_of(self, target: int, first_m: int) -> Iterator[int]:
        """All numbers from `first_m` on that a target computes, in order, without end."""
        return (m for m in itertools.count(first_m) if self.target_of(m) == target)

    def pairs(self) -> list[tuple[int, int]]:
        """All (target, drafter) that ever exchange a micro-batch, in the one order in which links are made."""
        return sorted({(target, self.drafter_of(m)) for m, target in enumerate(self.target_table)})

    def crossings(self) -> np.ndarray:
        """By m over a period: whether its target and its drafter live on different nodes."""
        pairs = enumerate(self.target_table)
        return np.array([self.node_of("target", t) != self.node_of("drafter", self.drafter_of(m)) for m, t in pairs])

    def of(self, rank: int) -> "Topology":
        """The same, seen from another rank."""
        return dataclasses.replace(self, rank=rank)

    def others(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def role_peers(self) -> list[int]:
        """The other ranks of this role, by global rank."""
        return [rank for rank in self.ranks_of[self.role] if rank != self.rank]

    def name(self, role: str, role_rank: int) -> str:
        """How messages call a rank: 'drafter 0 (rank 5)', or 'drafter 0 (rank 5 on host-b)' where hosts are known."""
        rank = self.global_rank(role, role_rank)
        host = f" on {self.hosts[rank]}" if rank in self.hosts else ""
        return f"{role} {role_rank} (rank {rank}{host})"

    def __str__(self) -> str:
        return self.name(self.role, self.role_rank)


def read_topology(num_target_ranks: str, target_tp: int = 1) -> Topology:
    """Topology from torchrun's environment, as on one node. Raises UserError when the roles cannot be laid out."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in names):
        raise UserError("start with torchrun, for example: torchrun --nproc_per_node 2 train_dflash_pipeline.py")
    rank, world, local_rank, local_world = (int(os.environ[name]) for name in names)
    if world < 2:
        raise UserError("one rank cannot hold both roles: start at least 2 (torchrun --nproc_per_node 2)")
    most = max(1, world * 5 // 8 // target_tp) * target_tp
    num_target_ranks = most if num_target_ranks in ("auto", "measure") else int(num_target_ranks)
    if not 1 <= num_target_ranks < world:
        raise UserError(
            f"--num-target-ranks {num_target_ranks} of {world} ranks leaves {max(0, world - num_target_ranks)} drafter "
            f"ranks: both roles need at least 1"
        )
    if num_target_ranks % target_tp:
        raise UserError(f"--target-tp {target_tp} does not divide the {num_target_ranks} target ranks")
    return Topology(rank, world, local_rank, local_world, num_target_ranks // target_tp, target_tp=target_tp)


def num_nodes() -> int:
    """How many torchrun agents the job has: a node is what one of them started."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def place_sharded_targets(nodes: tuple[int, ...], num_targets: int, placement: str, target_tp: int) -> tuple[int, ...]:
    """`place_targets` in units of `target_tp` ranks of one node: the global ranks of the leaders.

    Raises UserError where so many units cannot be laid out.
    """
    own = {node: [rank for rank, at in enumerate(nodes) if at == node] for node in sorted(set(nodes))}
    units = [(ranks[i], node) for node, ranks in own.items() for i in range(0, len(ranks) - target_tp + 1, target_tp)]
    if num_targets > len(units):
        raise UserError(f"--target-tp {target_tp}: the nodes have room for {len(units)} targets, not for {num_targets}")
    return tuple(units[i][0] for i in place_targets(tuple(node for _, node in units), num_targets, placement))


def place_targets(nodes: tuple[int, ...], num_targets: int, placement: str) -> tuple[int, ...]:
    """The global ranks that are targets, see --placement. `nodes`: the node of every rank. Rank `len(nodes) - 1` and,
    with 'spread', one rank of node 0 at least are drafters."""
    if placement == "targets-first":
        return tuple(range(num_targets))
    chosen, seen = [], 0
    for node in sorted(set(nodes)):
        own = [rank for rank, at in enumerate(nodes) if at == node]
        before, seen = seen, seen + len(own)
        chosen += own[: seen * num_targets // len(nodes) - before * num_targets // len(nodes)]
    return tuple(sorted(chosen))


def lay_over_nodes(topology: Topology, store, placement: str, limit_s: float) -> Topology:
    """The topology with every rank's node and host, and the targets placed. Also settles which interface gloo uses.

    Raises UserError with the words of a rank that failed before, or where one is not there after `limit_s` seconds.
    """
    if num_nodes() == 1:
        return topology
    own = [int(os.environ["GROUP_RANK"]), socket.gethostname(), address_towards(os.environ["MASTER_ADDR"])]
    store.set(f"node/{topology.rank}", json.dumps(own))
    deadline = time.monotonic() + limit_s

    def read(key: str, rank: int):
        while not store.check([key]):
            if store.check(["failure"]):
                raise UserError(store.get("failure").decode())
            if time.monotonic() > deadline:
                raise UserError(f"rank {rank} did not start within {limit_s:.0f} s; noticed on {own[1]}")
            time.sleep(0.05)
        return json.loads(store.get(key))

    if topology.rank == 0:  # so that not every rank reads what every rank wrote
        store.set("nodes", json.dumps([read(f"node/{rank}", rank) for rank in range(topology.world_size)]))
    else:
        deadline += 5  # rank 0 says first who is missing
    known = read("nodes", 0)
    choose_gloo_interface([address for _, _, address in known])
    nodes, hosts = tuple(node for node, _, _ in known), {rank: host for rank, (_, host, _) in enumerate(known)}
    targets = place_sharded_targets(nodes, topology.num_targets, placement, topology.target_tp)
    return dataclasses.replace(topology, hosts=hosts, nodes=nodes, target_ranks=targets)


def address_towards(host: str) -> str:
    """This machine's own address on its way to another; nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return probe.getsockname()[0].split("%")[0]


def choose_gloo_interface(addresses: list[str]) -> None:
    """Keep gloo from listening where other hosts cannot reach it: it takes the address of the host's name, which many
    systems map to 127.0.1.1. Then, unless GLOO_SOCKET_IFNAME is set, it gets the interface that leads to the others.

    `addresses`: every rank's own address towards the rendezvous.
    """
    import psutil

    others = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if "GLOO_SOCKET_IFNAME" in os.environ or not others:
        return
    with contextlib.suppress(OSError):  # a name that leads nowhere
        if not ipaddress.ip_address(socket.getaddrinfo(socket.gethostname(), None)[0][4][0]).is_loopback:
            return
    own = {each.address.split("%")[0]: name for name, some in psutil.net_if_addrs().items() for each in some}
    # towards the host of the rendezvous, or, on that one, whose own way there may be the loopback, towards another
    mine = next((own[a] for a in others if a in own), None) or own.get(address_towards(others[0]))
    if mine is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = mine


def choose_device(requested: str, topology: Topology) -> tuple[torch.device, bool]:
    """(device, whether GPUs are shared). A GPU may serve one target and one drafter, never two ranks of a role."""
    gpus = torch.cuda.device_count() if requested != "cpu" else 0
    first = topology.rank - topology.local_rank
    on_host = set(range(first, first + topology.local_world_size))
    drafters = len(on_host.intersection(topology.ranks_of["drafter"]))
    needed = max(drafters, topology.local_world_size - drafters)
    if requested == "cuda" and gpus < needed:
        raise UserError(f"--device cuda: {needed} ranks of one role on this host, but {gpus} GPUs")
    if gpus < needed:
        if requested == "auto" and topology.local_rank == 0:
            print(f"device: CPU ({topology.local_world_size} ranks on this host, {gpus} GPUs)", flush=True)
        if topology.target_tp > 1 and torch.cuda.is_available():
            raise UserError("--target-tp on the CPU: hide the GPUs (CUDA_VISIBLE_DEVICES=), or transformers uses them")
        return torch.device("cpu"), False
    return torch.device("cuda", topology.local_rank % gpus), gpus < topology.local_world_size


# Groups of processes wait this long: the FailureBoard ends a wait, since it knows what the awaited rank is doing.
GROUP_TIMEOUT = timedelta(days=7)
ROUND_S = 1.0  # between two rounds of the FailureBoard's watch
SILENT_S = 30.0  # without a sign of life: a rank that was at work is taken for dead
ASLEEP_ROUNDS = 5  # without a new sign of life, when somebody already complained
HELPER = "helper"  # what a main thread awaits when this rank's own transfer thread must act first
PEER_GONE = re.compile(
    "closed by peer|reset by peer|[Bb]roken pipe|pair closure|[Cc]onnection (refused|closed)|[Rr]emote (process|error)|"
    "communicator was aborted|ncclRemoteError"
)


class TransportError(RuntimeError):
    """A message that is late, out of order or not what was announced."""


def open_store(topology: Topology, limit: timedelta) -> tuple[dist.Store, dist.Store]:
    """Two connections to torchrun's rendezvous store: the second one stays free while the first waits for a key.

    The store outlives a restart of the workers by `torchrun --max-restarts`, so every key carries the attempt's number.
    """
    first, _, _ = next(dist.rendezvous("env://", topology.rank, topology.world_size, timeout=limit))
    return dist.PrefixStore(attempt(), first), store_client(limit)


def attempt() -> str:
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def store_client(limit: timedelta) -> dist.Store:
    """One more connection to the rendezvous store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(attempt(), dist.TCPStore(host, port, is_master=False, timeout=limit))


def tell_other_nodes(cause: str) -> None:
    """Make a failure known that came before this rank had a FailureBoard: torchrun ends ranks of its own node only."""
    if num_nodes() > 1:
        with contextlib.suppress(Exception):  # the failure itself is what matters
            store_client(timedelta(seconds=SILENT_S)).compare_set("failure", "", cause)


def wait_for_key(store, key: str, what: str, announce_every_s: float = 60.0) -> None:
    """Wait without limit for a store key (a failing rank ends us through the FailureBoard); say so now and then."""
    said = time.monotonic()
    while not store.check([key]):
        time.sleep(0.05)
        if time.monotonic() - said > announce_every_s:
            print(what, flush=True)
            said = time.monotonic()


@dataclass
class Stage:
    """What a thread does, the global ranks it awaits for that (or HELPER), and for how many rounds of the watch.

    may_last: a stage without limit (start-up, saving). Neither it nor those who wait for it are timed.
    """

    what: str
    awaits: object = ()
    may_last: bool = False
    rounds: int = 0


class LifeSigns:
    """What other ranks last said of themselves, and for how many looks in a row nothing new came."""

    def __init__(self, store):
        self.store, self.texts, self.unchanged = store, {}, Counter()

    def look(self, rank: int) -> tuple[dict, int]:
        """(the rank's last sign, {} before its first; looks in a row that found the same)."""
        key = f"life/{rank}"
        text = self.store.get(key).decode() if self.store.check([key]) else "{}"
        self.unchanged[rank] = self.unchanged[rank] + 1 if text == self.texts.get(rank) else 0
        self.texts[rank] = text
        return json.loads(text), self.unchanged[rank]


class FailureBoard:
    """Ends every rank soon after the first one fails, with the same words on each.

    The main thread and the transfer thread say what they do and whom they await (`now`, `doing`). A thread of the board
    publishes that on the store every second, as a sign of life, and ends this process

    - when the key `failure` is there: the first failure of any rank, in words;
    - when the next rank shows no sign of life: it was killed or stopped, or its machine is gone;
    - when this rank waited beyond the time-out: the cause is found by following who awaits whom to a rank that awaits
      nobody. If that one is in a stage that may last, or went on meanwhile, the wait goes on;
    - when the store is gone or does not answer, or the torchrun agent that started this process is gone.

    Time is counted in rounds of this thread, not by the clock, so that a job that was suspended as a whole goes on.
    """

    def __init__(self, topology: Topology, store, timeout_s: float):
        self.topology, self.store, self.timeout_s = topology, store, timeout_s
        self.number = itertools.count()
        self.stages = {threading.main_thread().name: Stage("starting", may_last=True)}  # by thread
        self.next_rank, self.next_signs = (topology.rank + 1) % topology.world_size, LifeSigns(store)
        self.signs: Optional[LifeSigns] = None  # of all ranks, while this one waits too long
        self.parent = os.getppid()
        self.reporting = False
        self.ending = threading.Lock()  # taken once, by the thread that ends the process
        self.finished = threading.Event()
        self.unanswered = 0  # seconds since the last round of the watch that came to its end
        self._publish()
        threading.Thread(target=self._watch, name="failure-watch", daemon=True).start()
        threading.Thread(target=self._watch_store, name="store-watch", daemon=True).start()

    # What this rank says of itself

    def now(self, what: str, awaits=(), may_last: bool = False) -> None:
        """The stage of this thread from here on; `doing` sets others within it."""
        thread = threading.current_thread().name
        before, self.stages[thread] = self.stages.get(thread), Stage(what, awaits, may_last)
        if before is not None and before.may_last != may_last:
            with contextlib.suppress(RuntimeError):  # a store that is gone is the watch's to report
                self._publish()  # at once: it decides how long others wait

    @contextlib.contextmanager
    def doing(self, what: str, awaits=(), may_last: bool = False):
        """The stage of this thread within a `with` block. An exception that leaves it carries `what` as `stage`."""
        thread, outer = threading.current_thread().name, self.stages.get(threading.current_thread().name)
        self.stages[thread] = Stage(what, awaits, may_last or (outer is not None and outer.may_last))
        try:
            yield
        except BaseException as error:
            error.stage = getattr(error, "stage", what)
            raise
        finally:
            if outer is None:
                del self.stages[thread]
            else:
                outer.rounds = 0
                self.stages[thread] = outer

    def state(self) -> Stage:
        """What this rank does and awaits: its main thread, or the transfer thread that this one awaits."""
        main, helper = self._threads()
        if main.awaits == HELPER:
            helper = helper or Stage("its transfer thread is at work")
            return Stage(f"{main.what} ({helper.what})", helper.awaits, main.may_last or helper.may_last, main.rounds)
        beside = f", its transfer thread at: {helper.what}" if helper else ""
        return dataclasses.replace(main, what=main.what + beside)

    def _threads(self) -> tuple[Stage, Optional[Stage]]:
        """The stages of the main and of the transfer thread, which has one only while it awaits another rank."""
        stages = dict(self.stages)
        return stages.pop(threading.main_thread().name), next(iter(stages.values()), None)

    def _publish(self) -> None:
        sign = {"number": next(self.number), "pid": os.getpid(), "agent": agent_of_this_host()}
        self.store.set(f"life/{self.topology.rank}", json.dumps(sign | dataclasses.asdict(self.state())))

    # What it sees of others

    def _watch(self) -> None:
        while not self.finished.wait(ROUND_S):
            try:
                self._round()
            except Exception as error:
                if not self.reporting and not self.finished.wait(2.0):
                    self._end(f"lost the rendezvous store {self._store_address()}: {first_line(error)}")
            self.unanswered = 0

    def _watch_store(self) -> None:
        """The watch itself hangs in the store when the link to it is cut: TCP notices after a quarter of an hour."""
        while not self.finished.wait(ROUND_S):
            self.unanswered += 1
            if not self.reporting and self.unanswered * ROUND_S > (limit_s := self._patience(self.state().may_last)):
                self._end(f"no answer for {limit_s:.0f} s from the rendezvous store {self._store_address()}")

    def _store_address(self) -> str:
        return f"on {os.environ.get('MASTER_ADDR')}"

    def _patience(self, may_last: bool) -> float:
        """Seconds of silence after which a rank at work, or one in a stage that may last, is taken for dead. The latter
        may keep its interpreter busy (a large file written in one call), so it has longer."""
        return (max if may_last else min)(self.timeout_s, SILENT_S)

    def _round(self) -> None:
        for stage in list(self.stages.values()):
            stage.rounds += 1
        self._publish()
        if self.reporting:
            return
        if self.store.check(["failure"]):
            self._wake_stopped_siblings()
            self._end(self.store.get("failure").decode())
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent:
            self._end("the torchrun agent of this host is gone")
        if cause := self._silence() or self._overdue():
            self._end(self._settle(f"{self._me()}{cause}"))

    def _silence(self) -> Optional[str]:
        """Why the next rank is taken for dead, if it is."""
        sign, unchanged = self.next_signs.look(self.next_rank)
        limit_s = self._patience(may_last=not sign or sign["may_last"])
        if unchanged * ROUND_S <= limit_s:
            return None
        return f"no sign of life for {limit_s:.0f} s from {self.describe(self.next_rank, sign)}"

    def _overdue(self) -> Optional[str]:
        """Why a wait of this rank for others is over, if one is: of its main thread or of its transfer thread (a
        payload that never ends can hold the GPU, and with it the main thread, in a call that awaits nobody)."""
        main, helper = self._threads()
        waits = [] if main.may_last else [self.state(), *([helper] if helper else [])]
        late = [w for w in waits if w.awaits and not w.may_last and w.rounds * ROUND_S > self.timeout_s]
        if not late:
            self.signs = None
            return None
        self.signs = self.signs or LifeSigns(self.store)
        signs = {rank: self.signs.look(rank) for rank in range(self.topology.world_size)}
        for wait in late:  # so many more looks it takes to tell who is asleep
            if wait.rounds * ROUND_S > self.timeout_s + ASLEEP_ROUNDS * ROUND_S and (cause := self._blame(wait, signs)):
                return cause
        return None

    def _blame(self, state: Stage, signs: dict[int, tuple[dict, int]]) -> Optional[str]:
        """Follow who awaits whom from this rank to those that await nobody; None where they are at work or may last."""
        me, waiting = self.topology.rank, f"waited {self.timeout_s:.0f} s: {state.what}"
        chain, roots = [me, *state.awaits], []
        for rank in chain:  # grows while it is read
            sign, unchanged = signs[rank]
            if rank == me:
                continue
            if not sign or (unchanged >= ASLEEP_ROUNDS - 1 and not sign["may_last"]):
                return f"{waiting}; no sign of life from {self.describe(rank, sign)}"
            chain += [other for other in sign["awaits"] if other not in chain] if not sign["may_last"] else []
            roots += [rank] if sign["may_last"] or not sign["awaits"] else []
        if any(signs[r][0]["may_last"] or signs[r][0]["rounds"] * ROUND_S <= self.timeout_s for r in roots):
            return None
        if not roots:  # they wait for each other
            return waiting
        return f"{waiting}; the one that keeps all waiting: {self.describe(roots[0], signs[roots[0]][0])}"

    def describe(self, rank: int, sign: dict) -> str:
        """'target 1 (rank 1), last seen at: forward pass of micro-batch 7'."""
        return f"{self.topology.of(rank)}, " + (f"last seen at: {sign['what']}" if sign else "which never started")

    # The end

    def report(self, error: BaseException) -> str:
        """Make this rank's failure known; returns the first failure of any rank, once the others had time to read it.

        That a peer is gone is not news: its own report, or its silence, comes first.
        """
        self.reporting = True
        cause = self._me() + self._describe_failure(error)
        settled: list[str] = []
        second_hand = not isinstance(error, UserError) and PEER_GONE.search(str(error)) is not None

        def settle():
            try:
                settled.append(self._settle((second_hand and self._first_hand(cause)) or cause))
            except RuntimeError as lost:  # with the store, every rank goes
                settled.append(f"{self._me()}lost the rendezvous store {self._store_address()}: {first_line(lost)}")

        thread = threading.Thread(target=settle, daemon=True)  # the store may be gone, or not answer
        thread.start()
        thread.join(ASLEEP_ROUNDS * ROUND_S + 10)
        self.ending.acquire()  # from here on no thread of the board ends this process
        return settled[0] if settled else f"{cause}; no answer from the rendezvous store {self._store_address()}"

    def _first_hand(self, cause: str) -> Optional[str]:
        """The failure that another rank reports within a few seconds, or who falls silent meanwhile."""
        signs = LifeSigns(self.store)
        for _ in range(ASLEEP_ROUNDS):
            if self.store.check(["failure"]):
                return self.store.get("failure").decode()
            seen = {rank: signs.look(rank) for rank in self.topology.others()}
            time.sleep(ROUND_S)
        gone = [self.describe(rank, sign) for rank, (sign, unchanged) in seen.items() if unchanged >= ASLEEP_ROUNDS - 1]
        return f"gone without a word: {gone[0]}; noticed by {cause}" if gone else None

    def _settle(self, cause: str) -> str:
        """Write `cause` unless another rank was first; returns the first one, once the others had time to read it."""
        try:
            first = self.store.compare_set("failure", "", cause).decode()
            self._wake_stopped_siblings()
            time.sleep(2 * ROUND_S)
        except RuntimeError:  # the store is gone: our own cause is all we know
            first = cause
        return first

    def _wake_stopped_siblings(self) -> None:
        """Continue ranks of this host that were stopped (SIGSTOP), so that they read the failure and end too."""
        for rank in range(self.topology.world_size):
            sign, _ = LifeSigns(self.store).look(rank)
            if sign and sign["agent"] == agent_of_this_host():
                with contextlib.suppress(OSError):
                    os.kill(sign["pid"], signal.SIGCONT)

    def _describe_failure(self, error: BaseException) -> str:
        """An exception as one line, behind the stage in which it arose where its text does not say that."""
        stage = getattr(error, "stage", self.stages[threading.main_thread().name].what)
        says_where = isinstance(error, (UserError, TransportError, NonFiniteError))
        return first_line(error) if says_where else f"{stage}: {first_line(error)}"

    def _me(self) -> str:
        return f"[{self.topology}] "

    def _end(self, cause: str) -> None:
        if not self.finished.is_set() and self.ending.acquire(blocking=False):
            print(f"\n{self._me()}stopping: {cause}", file=sys.stderr, flush=True)
            os._exit(1)


def agent_of_this_host() -> str:
    """What ranks started by one torchrun agent have in common."""
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}/{os.environ.get('TORCHELASTIC_RUN_ID')}"


@dataclass
class Link:
    """The two-rank groups between one target (its rank 0) and one drafter (its rank 1)."""

    control: object  # gloo: headers and credits, on the CPU
    payload: object  # NCCL or gloo: hidden states
    peer: int  # 0 or 1: the other side's rank in both groups
    peer_rank: int  # its global rank
    peer_name: str
    board: FailureBoard


def freeze_objects() -> None:
    """Keep what start-up made out of garbage collections to come: to look through the 465,000 objects that the imports
    alone leave stops a process for 0.2 s each time (one core of an AMD EPYC), and its GPU soon after."""
    gc.collect()
    gc.freeze()


class Fabric:
    """All process groups of one rank: the role's default group, the world's control group and the links."""

    def __init__(self, topology: Topology, device: torch.device, shares_gpus: bool, store, board: FailureBoard):
        self.topology, self.device, self.shares_gpus = topology, device, shares_gpus
        self.store, self.board = store, board
        self.world = self.role_control = None
        self.links: dict[int, Link] = {}  # by the peer's rank within its role
        self.token = 0  # of this run: headers and credits without it are refused

    def meet(self, place: str) -> None:
        """Wait, without limit, until every rank has come here."""
        if self.store.add(f"meet/{place}", 1) == self.topology.world_size:
            self.store.set(f"met/{place}", "")
        wait_for_key(self.store, f"met/{place}", f"[{self.topology}] waiting for all ranks: {place}")

    def introduce(self) -> None:
        """Learn the run's token."""
        if self.topology.rank == 0:
            self.store.set("token", str(secrets.randbits(62)))
        self.meet("connecting")
        self.token = int(self.store.get("token"))

    def connect(self) -> None:
        """Make the links and the role's groups, in one fixed order. (DeepSpeed's follow: see `drafter_group`.)"""
        topology, device = self.topology, self.device
        self.introduce()
        self.board.now("connecting to the other ranks", topology.others())
        self.world = self._gloo("world", topology.rank, topology.world_size)
        group, rank, size = topology.default_group
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
        if device.type == "cuda":
            os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes its GPU from it
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"role/{group}", self.store),
            rank=rank,
            world_size=size,
            timeout=GROUP_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        self.role_control = self._gloo(f"role/{group}/control", rank, size)
        for target, drafter in topology.pairs():
            if (topology.role, topology.role_rank) not in (("target", target), ("drafter", drafter)):
                continue
            side = 0 if topology.role == "target" else 1
            key = f"link/{target}-{drafter}"
            control = self._gloo(f"{key}/control", side, 2)
            payload = self._payload_group(f"{key}/payload", side)
            peer_role, peer = ("drafter", drafter) if side == 0 else ("target", target)
            peer_rank = topology.global_rank(peer_role, peer)
            self.links[peer] = Link(control, payload, 1 - side, peer_rank, topology.name(peer_role, peer), self.board)

    def _gloo(self, key: str, rank: int, size: int):
        """On the interfaces that GLOO_SOCKET_IFNAME lists (see `choose_gloo_interface`), else on that of the host's
        name, as torch's own groups."""
        try:
            return dist.ProcessGroupGloo(dist.PrefixStore(key, self.store), rank, size, timeout=GROUP_TIMEOUT)
        except RuntimeError as error:
            hint = "where hosts have several networks, GLOO_SOCKET_IFNAME names the interface to use"
            raise TransportError(f"cannot connect ({key}): {first_line(error)}; {hint}") from None

    def _payload_group(self, key: str, side: int):
        """A connected two-rank group for hidden states. NCCL makes its communicator here, not in the first step."""
        if self.device.type == "cpu" or self.shares_gpus:  # NCCL refuses two ranks on one GPU
            return self._gloo(key, side, 2)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        group = dist.ProcessGroupNCCL(dist.PrefixStore(key, self.store), side, 2, options)
        probe = torch.zeros(1, device=self.device)
        (group.send([probe], 1, 0) if side == 0 else group.recv([probe], 0, 0)).wait()
        torch.cuda.synchronize(self.device)
        return group

    def start(self) -> None:
        """The end of start-up: from here on every wait has a limit, but for stages that may last."""
        freeze_objects()
        self.meet("training")
        self.board.now("at work")

    def check_same_everywhere(self, place: str, identity: dict) -> None:
        """Compare `identity` over all ranks. Raises UserError on every rank, with one line that names what differs and
        on which hosts. Called by every rank; `place` serves once in a run.
        """
        topology, store = self.topology, self.store
        mine = {name: json.dumps(value, sort_keys=True) for name, value in identity.items()}
        if topology.rank == 0:
            store.set(f"{place}/reference", json.dumps(mine))
        wait_for_key(store, f"{place}/reference", f"[{topology}] waiting for rank 0 to prepare the run")
        reference = json.loads(store.get(f"{place}/reference"))
        other = {name: value for name, value in mine.items() if value != reference.get(name)}
        store.set(f"{place}/{topology.rank}", json.dumps(other))
        if topology.rank == 0:
            differences = []
            for rank in range(topology.world_size):
                wait_for_key(store, f"{place}/{rank}", f"[{topology}] waiting for {topology.of(rank)} to prepare it")
                differences.append(json.loads(store.get(f"{place}/{rank}")))
            store.set(f"{place}/verdict", describe_differences(reference, differences, topology))
        wait_for_key(store, f"{place}/verdict", f"[{topology}] waiting for all ranks to prepare the run")
        if verdict := store.get(f"{place}/verdict").decode():
            raise UserError(verdict)

    def close(self) -> None:
        """Wait for every rank, then shut links down before the role's group."""
        with self.board.doing("waiting for the others to finish", self.topology.others()):
            self.world.barrier().wait()
        self.board.finished.set()
        leaving = threading.Timer(60, os._exit, (0,))  # all is done and saved: nothing may hold this process back now
        leaving.daemon = True
        leaving.start()
        for link in self.links.values():
            if self.device.type == "cuda" and not self.shares_gpus:
                link.payload.shutdown()
        self.links.clear()
        dist.destroy_process_group()


def describe_differences(reference: dict[str, str], differences: list[dict[str, str]], topology: Topology) -> str:
    """What ranks have other than rank 0, as one line; '' where nothing. `differences`: of every rank, by name."""
    def where(rank: int) -> str:
        return topology.hosts.get(rank, f"rank {rank}")

    parts = []
    for name in sorted({name for own in differences for name in own}):
        values = defaultdict(dict)  # value -> the places that have it, in order
        for rank, own in enumerate(differences):
            values[own.get(name, reference.get(name))][where(rank)] = None
        shown = (f"{short(value)} on {', '.join(places)}" for value, places in values.items())
        parts.append(f"{name} is {' but '.join(shown)}")
    more = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
    return f"ranks disagree: {'; '.join(parts[:4])}{more}" if parts else ""


def short(text: Optional[str]) -> str:
    return str(text) if len(str(text)) <= 60 else f"{text[:57]}..."


def set_up_of(args: Arguments, device: torch.device) -> dict:
    """What must be the same on every rank of a run before it looks at its data: settings, code and libraries.

    Of flags that name files the contents count, wherever they lie.
    """
    paths = {"target", "tokenizer", "train_data", "eval_data", "output_dir", "init_from", "deepspeed"}
    set_up = {f"--{name.replace('_', '-')}": value for name, value in args.flat().items() if name not in paths}
    for name, path in (("--deepspeed (contents)", args.optimization.deepspeed), ("code version", __file__)):
        set_up[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    for package in ("torch", "transformers", "deepspeed"):
        set_up[package] = importlib.metadata.version(package)
    nccl = torch.cuda.nccl.version() if device.type == "cuda" else ()
    return set_up | {"NCCL": ".".join(map(str, nccl)), "kind of device": device.type}


def shared_folder(folder: Path, topology: Topology, store) -> list[int]:
    """The nodes that see the same `folder` as this one, itself included, found by a file that each of them writes there.

    Called by every rank. Raises UserError where the folder cannot be written.
    """
    nodes = sorted(set(topology.nodes)) or [0]
    if topology.local_rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"--output-dir {folder}: {first_line(error)}") from None
    if len(nodes) == 1:
        return nodes
    node = topology.nodes[topology.rank]
    nonce = store.compare_set("folder/nonce", "", secrets.token_hex(8)).decode()  # a name that no cache knows
    if topology.local_rank == 0:
        mark = folder / f".{nonce}-{node}"
        mark.touch()
        store.set(f"folder/marked/{node}", "")
        for other in nodes:
            wait_for_key(store, f"folder/marked/{other}", f"[{topology}] waiting for node {other} to write to {folder}")
        for wait_s in (0, 1, 2):  # some file systems show a new file late
            time.sleep(wait_s)
            seen = [other for other in nodes if (folder / f".{nonce}-{other}").exists()]
            if seen == nodes:
                break
        store.set(f"folder/seen/{node}", json.dumps(seen))
        for other in nodes:
            wait_for_key(store, f"folder/seen/{other}", f"[{topology}] waiting for node {other} to look into {folder}")
        mark.unlink()
    wait_for_key(store, f"folder/seen/{node}", f"[{topology}] waiting for the first rank of this node")
    return json.loads(store.get(f"folder/seen/{node}"))


def check_shared_by_drafters(folder: Path, shared: list[int], topology: Topology) -> None:
    """Raise UserError where this rank is a drafter that does not see what drafter 0 writes: all write to a checkpoint."""
    if topology.role == "drafter" and topology.node_of("drafter", 0) not in shared:
        raise UserError(
            f"--output-dir {folder} must be on a file system that all drafters share: {topology} does not see what "
            f"{topology.name('drafter', 0)} writes there"
        )


# ======================================================================================================================
# 3. Text. In: JSONL chat rows and a tokenizer. Out: `Documents`: token ids with a loss mask on assistant tokens.
# ======================================================================================================================

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY_THINK = r"(\s*<think>\s*</think>\s*)?"  # some templates write it before an answer without reasoning
REST_OF_EMPTY_THINK = r"(\s*</think>\s*)?"  # where the prompt opens it
PROBE = "PROBE-7f3a"  # an answer that no template writes by itself
BESIDE_CONTENT = ("reasoning_content", "reasoning", "thinking", "tool_calls")  # what else a model may write in a turn
GENERATION_TAG = r"\{%-?\s*generation\s*-?%\}"  # marks, in some templates, what the model writes
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # others are called alike in both formats
TEMPLATE_ARGUMENTS = {"messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize",
                      "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"}  # fmt: skip
DOCUMENT_ARRAYS = ("token_ids", "loss_mask", "offsets", "rows")


@dataclass
class Documents:
    """Tokenised text. Document i is the slice offsets[i]:offsets[i+1] of the flat arrays.

    token_ids int32 [total], loss_mask bool [total], offsets int64 [count + 1], rows int64 [count]: the row of the
    input (over all files, from 0) each document came from. `dropped` counts what was left out of the `num_rows` rows
    read, by reason. A document needs two neighbouring supervised tokens to be trained on (an anchor and its first
    label); shorter ones stay, as context that weighs nothing, and so do a block's slots beyond a document's end.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    dropped: dict[str, int]
    num_rows: int = 0
    mapped: Optional[object] = None  # the open file behind the arrays, where they are mapped from one
    mapped_bytes: int = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around reads of the arrays. Raises UserError where the file behind them was cut off: before, since to read
        what is gone kills a process (SIGBUS), or meanwhile, since the rest of the last page reads as zeros."""
        self._check_whole()
        try:
            yield
        finally:
            self._check_whole()

    def _check_whole(self) -> None:
        if self.mapped is not None and os.fstat(self.mapped.fileno()).st_size < self.mapped_bytes:
            raise UserError(f"{self.mapped.name} was shortened while this run reads it")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for array in (self.token_ids, self.loss_mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    @functools.cached_property
    def num_trainable(self) -> int:
        """Documents with two neighbouring supervised tokens."""
        count = 0
        for some in range(0, len(self), 1 << 14):
            offsets = self.offsets[some : some + (1 << 14) + 1]
            mask = self.loss_mask[offsets[0] : offsets[-1]]
            pairs = mask & np.append(mask[1:], False)
            pairs[offsets[1:] - offsets[0] - 1] = False  # the neighbour is of the next document
            count += int(np.logical_or.reduceat(pairs, offsets[:-1] - offsets[0]).sum())
        return count

    def holding(self, token_id: int) -> int:
        """How many documents hold a token."""
        starts, size = range(0, len(self.token_ids), 1 << 24), 1 << 24
        places = np.concatenate([i + np.flatnonzero(self.token_ids[i : i + size] == token_id) for i in starts])
        return len(np.unique(np.searchsorted(self.offsets, places, "right")))

    def summary(self) -> str:
        idle = len(self) - self.num_trainable
        return (
            f"{len(self):,} documents, {self.offsets[-1]:,} tokens, {self.loss_mask.mean():.0%} supervised, "
            f"longest {self.lengths.max():,}{f', {idle:,} without anything to predict' if idle else ''}; "
            f"rows left out: {by_reason(self.dropped) or 'none'}"
        )


def by_reason(dropped: dict[str, int]) -> str:
    """What was left out, as text; empty where nothing was."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))


class RowError(ValueError):
    """Why a row, or one of its documents, is left out. The text is the reason that is counted and shown."""


def byte_tokenizer():
    """The tokenizer of random targets: one token a byte, ChatML. Needs no download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    special = dict(eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **special)
    tokenizer.chat_template = CHATML
    return tokenizer


def load_tokenizer(args: TargetArguments):
    """The tokenizer, with a chat template and character offsets, or UserError."""
    if args.tokenizer is None and args.target in RANDOM_TARGETS:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    name = args.tokenizer or args.target
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load the tokenizer of {name}: {first_line(error)}") from None
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {name} has no chat template: give one that has with --tokenizer")
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer of {name} gives no character offsets: a fast tokenizer is needed")
    return tokenizer


def parse_template_kwargs(text: Optional[str]) -> dict:
    """`--chat-template-kwargs` as a dict. Raises UserError unless it is a JSON object of names that are free."""
    try:
        values = json.loads(text or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"--chat-template-kwargs {text}: expected a JSON object, as in " + '{"enable_thinking": false}')
    if taken := sorted(values.keys() & TEMPLATE_ARGUMENTS):
        raise UserError(f"--chat-template-kwargs: {', '.join(taken)} cannot be set: it comes from the data or the run")
    return values


def read_lines(paths: list[str]) -> Iterator[tuple[str, int, bytes]]:
    """(file, line number, line) of every line that is not blank, in order; .gz files are unpacked."""
    for path in paths:
        try:
            with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line := line.removeprefix(codecs.BOM_UTF8).strip():
                        yield path, number, line
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read {path}: {first_line(error)}") from None


def parse_row(path: str, number: int, line: bytes) -> dict:
    """A line's JSON object. Raises UserError naming file and line where it is none, or holds no valid Unicode."""
    try:
        row = json.loads(line.decode())
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no character: no tokenizer takes it
    except UnicodeError as error:
        raise UserError(f"{path}, line {number}: not valid Unicode ({first_line(error)})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not valid JSON ({first_line(error)})") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
    return row


def read_rows(paths: list[str]) -> Iterator[dict]:
    """The JSON objects of JSONL files (.gz too), in order. Raises UserError naming file and line of a broken one."""
    return (parse_row(*line) for line in read_lines(paths))


def line_chunks(paths: list[str], max_lines: int = 256, max_bytes: int = 1 << 20) -> Iterator[list]:
    """The lines in consecutive lists, each closed by the line that reaches either limit."""
    chunk, size = [], 0
    for line in read_lines(paths):
        chunk.append(line)
        size += len(line[2])
        if len(chunk) >= max_lines or size >= max_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def plain_message(message: dict) -> dict:
    """A message as chat templates expect it, and as servers hand it to them. Raises RowError.

    Keys without a value go, text parts are joined, a tool call's arguments become an object where they are its JSON.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise RowError("with a turn without a role")
    content = message.get("content", "")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        message["content"] = content = "".join(texts) if whole else None
    if not isinstance(content, str):
        raise RowError("with content that is not text")
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise RowError("with tool calls that are no list")
        message["tool_calls"] = [plain_tool_call(call) for call in message["tool_calls"]]
    return message


def plain_tool_call(call: dict) -> dict:
    """A tool call whose arguments are an object; as it is where they are no JSON object."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}} if isinstance(arguments, dict) else call


def row_messages(row: dict) -> list[dict]:
    """The chat of a row in any of the three formats, as `messages`. Raises RowError where it has none to train on."""
    messages = row.get("messages")
    if isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    turns = row.get("conversations")
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        roles = [SHAREGPT_ROLES.get(str(turn.get("from")), turn.get("from")) for turn in turns]
        messages = [{"role": role, "content": turn.get("value")} for role, turn in zip(roles, turns)]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RowError("without a conversation")
    messages = [plain_message(message) for message in messages]
    answers = [j for j, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [j for j in answers if messages[j].get("content") or messages[j].get("tool_calls")]
    if not answers:
        raise RowError("without an assistant turn")
    if answers == [0]:
        raise RowError("whose only assistant turn answers nothing")
    return messages


class ChatTokenizer:
    """Chat rows -> (token ids, loss mask), with the tokenizer's own template.

    Supervised are each answer and its end-of-turn token; what the template itself writes before an answer (an empty
    think block, say) is not, nor is an assistant turn that opens the chat. Where answers stand is told by the
    template's `{% generation %}` tags, else by the prefix method: what the chat with the turn has beyond the chat
    before it and the generation prompt.

    max_tokens: longer documents are left out · cut_off_answers: what becomes of rows whose `finish_reason` is
    "length": "keep" (the last answer ends the document, without an end of turn) or "drop" · template_kwargs: variables
    of the template
    """

    def __init__(self, tokenizer, max_tokens: Optional[int] = None, cut_off_answers: str = "keep",
                 template_kwargs: Optional[dict] = None):  # fmt: skip
        self.tokenizer, self.max_tokens, self.cut_off_answers = tokenizer, max_tokens, cut_off_answers
        self.template_kwargs = template_kwargs or {}
        # What may end a turn: special tokens, else other added ones that are no closing tags of reasoning or tool calls.
        added = sorted(tokenizer.added_tokens_decoder.items())
        special = {i: token.content for i, token in added if token.special}
        others = {i: token.content for i, token in added if not token.special and not token.content.startswith("</")}
        self.closing_ids, self.closing_texts = (set(special), set(others)), [*special.values(), *others.values()]

    def describe(self) -> dict:
        """What decides, beside the rows, which documents they become, by the name that an error gives it."""

        def digest(value) -> str:
            return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]

        backend = json.loads(self.tokenizer.backend_tokenizer.to_str())
        backend |= {"truncation": None, "padding": None}  # left by earlier calls
        return {
            "tokenizer": digest([backend, self.tokenizer.special_tokens_map]),
            "chat template": digest(self.tokenizer.chat_template),
            "--chat-template-kwargs": self.template_kwargs,
            "--max-document-tokens": self.max_tokens,
            "--cut-off-answers": self.cut_off_answers,
            "layout": 5,  # counted up when the same text becomes other documents
        }

    def documents(self, row: dict) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[str]]:
        """([(token ids int32, loss mask bool)], [why a document, or the whole row, is left out]) of a row.

        One document, or one per assistant turn where the template rewrites earlier turns. Never neither of both.
        """
        kept, reasons = [], []
        try:
            chats = self._chats(row)
        except RowError as reason:
            return [], [str(reason)]
        for chat in chats:
            try:
                kept.append(self._tokenise(*chat))
            except RowError as reason:
                reasons.append(str(reason))
        return kept, reasons

    def tokenise_lines(self, lines: list[tuple[str, int, bytes]]) -> Documents:
        """The documents of lines as `read_lines` gives them, perhaps none; `rows` counts from the first line."""
        ids, masks, rows, dropped = [np.empty(0, np.int32)], [np.empty(0, bool)], [], Counter()
        for number, line in enumerate(lines):
            documents, reasons = self.documents(parse_row(*line))
            dropped.update(reasons)
            for token_ids, mask in documents:
                ids.append(token_ids)
                masks.append(mask)
                rows.append(number)
        offsets = np.cumsum([len(x) for x in ids])
        rows = np.array(rows, np.int64)
        return Documents(np.concatenate(ids), np.concatenate(masks), offsets, rows, dropped, len(lines))

    def _chats(self, row: dict) -> list[tuple[str, list[tuple[int, int, int]], bool]]:
        """[(rendered chat, [(answer start, answer end, turn end)] in characters, was its last answer cut off)]."""
        messages, tools = row_messages(row), row.get("tools") or None
        cut_off = row.get("finish_reason") == "length"
        if cut_off and self.cut_off_answers == "drop":
            raise RowError("cut off by a length limit")
        answers = [j for j, message in enumerate(messages) if j > 0 and message["role"] == "assistant"]
        cut_off = cut_off and answers[-1] == len(messages) - 1
        try:
            turns = [self._turn(messages, j, tools) for j in answers]
        except RowError:
            raise
        except Exception:  # templates raise what they like: jinja's TemplateError, TypeError on odd content, ...
            raise RowError("refused by the chat template") from None
        whole = turns[-1][0]
        if all(whole.startswith(text) for text, _ in turns):
            return [(whole, [span for _, spans in turns for span in spans], cut_off)]
        return [(text, spans, cut_off and text is whole) for text, spans in turns]

    def _turn(self, messages: list[dict], j: int, tools) -> tuple[str, list[tuple[int, int, int]]]:
        """(chat up to and with turn j, the spans of that turn)."""
        prompt, text = self._render(messages[:j], tools, True), self._render(messages[: j + 1], tools, False)
        template = self.tokenizer.get_chat_template(tools=tools)
        tagged = re.search(GENERATION_TAG, template)
        if tagged and not text.startswith(prompt):  # the tags know better where an answer starts
            prompt = self._render(messages[:j], tools, False)
        if not text.startswith(prompt) or len(text) == len(prompt):
            raise RowError("whose chat template does not continue its own generation prompt")
        if tagged:
            return text, self._tagged_spans(template, messages[: j + 1], tools, text, len(prompt))
        content = messages[j].get("content", "")
        answer = content if text.find(content, len(prompt)) >= 0 else content.strip()
        start = self._find_answer(messages, j, tools, len(prompt), text, answer)
        if start >= 0:  # a space that the template writes before the answer is of its first token, which the model chooses
            begin = len(prompt) + len(text[len(prompt) : start].rstrip(" "))
            return text, [(begin, start + len(answer), len(text))]
        # The template reshaped the answer (reasoning, tool calls): all beyond the prompt is the model's.
        empty = REST_OF_EMPTY_THINK if prompt.rstrip().endswith("<think>") else EMPTY_THINK
        start = len(prompt) + len(re.match(empty, text[len(prompt) :]).group())
        body = text.rstrip()
        return text, [(start, len(body) - len(self._closing_token(body)), len(text))]

    def _render(self, messages: list[dict], tools, generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.template_kwargs
        )

    def _tagged_spans(self, template: str, messages: list[dict], tools, text: str, begin: int):
        """The spans of `{% generation %}` tags beyond `begin`; an end of turn counts in or right behind the tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **self.template_kwargs}
        [marked], [spans] = render_jinja_template(
            [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **variables
        )
        if marked != text:
            raise RowError("that renders otherwise when its generation tags are followed")
        found = []
        for start, end in spans:
            if end <= begin:
                continue
            body = text[:end].rstrip()
            if closing := self._closing_token(body):
                found.append((max(start, begin), len(body) - len(closing), end))
                continue
            behind = re.compile(r"\s*").match(text, end).end()
            closing = next((token for token in self.closing_texts if text.startswith(token, behind)), "")
            found.append((max(start, begin), end, behind + len(closing)))
        return found

    def _closing_token(self, text: str) -> str:
        """The token at the end of a text that may end a turn, or nothing."""
        return next((token for token in self.closing_texts if text.endswith(token)), "")

    def _find_answer(self, messages: list[dict], j: int, tools, begin: int, text: str, answer: str) -> int:
        """Where the answer of turn j starts; -1 where it is not all that the model wrote in this turn."""
        if not answer or any(messages[j].get(key) for key in BESIDE_CONTENT):
            return -1
        start = text.find(answer, begin)
        if text.find(answer, start + 1) < 0:
            return start
        # It stands there more than once, perhaps in what the template writes: see where another answer would stand.
        start = self._render([*messages[:j], messages[j] | {"content": PROBE}], tools, False).find(PROBE, begin)
        return start if text.startswith(answer, max(start, 0)) else -1

    def _tokenise(self, text: str, spans: list[tuple[int, int, int]], cut_off: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokenise rendered chat; supervise each span's answer and the first special token after it (the first added one,
        if none is special), with the white space that a template writes between them: blocks end at gaps.

        A last answer that was cut off by a length limit ends the document: no end of turn is invented for it.
        """
        if self.max_tokens is not None and len(text) > 64 * self.max_tokens:
            beginning = len(self._encode(text[: 64 * self.max_tokens]))  # enough to tell a giant from a long document
            self._check_length(beginning // 2)
        encoding = self._encode(text)
        ids, mask = np.array(encoding.ids, np.int32), np.zeros(len(encoding), bool)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        # some tokenizers trim white space from offsets: a token of nothing else starts where the one before it ended
        begins = np.where(begins < ends, begins, np.append(0, np.maximum.accumulate(ends)[:-1])) if len(ids) else begins
        bounds = np.searchsorted(np.maximum.accumulate(begins), np.array(spans, np.int64).reshape(-1, 3))
        for (first, answer_end, turn_end), (_, answer_ends_at, _) in zip(bounds.tolist(), spans):
            mask[first:answer_end] = True
            beyond = [int(token) for token in ids[answer_end:turn_end]]
            closing = (i for kind in self.closing_ids for i, token in enumerate(beyond) if token in kind)
            if (place := next(closing, None)) is not None:
                end_of_turn = answer_end + place
                gap = text[answer_ends_at : begins[end_of_turn]].strip()
                mask[end_of_turn if gap else answer_end : end_of_turn + 1] = True
        if cut_off and len(bounds):
            ids, mask = ids[: bounds[-1, 1]], mask[: bounds[-1, 1]]
        self._check_length(len(ids))
        if not mask.any():
            raise RowError("without a supervised token")
        if mask.all():
            raise RowError("in which every token would be supervised")
        return ids, mask

    def _encode(self, text: str):
        return self.tokenizer(text, add_special_tokens=False, verbose=False).encodings[0]

    def _check_length(self, num_tokens: int) -> None:
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise RowError(f"over {self.max_tokens} tokens")


def tokenise_rows(paths: list[str], chat: ChatTokenizer, show_progress: bool,
                  parts: Optional[Iterable[Documents]] = None) -> Documents:  # fmt: skip
    """Read and tokenise every row; rows that give no usable document are counted by reason, and where none gives one,
    UserError tells them.

    parts: what `tokenise_lines` makes of consecutive chunks of the files, where other processes do that.
    """
    kept, dropped, num_rows = ([], [], [], []), Counter(), 0
    total = sum(1 for _ in read_lines(paths)) if show_progress else None
    with tqdm(total=total, desc="tokenising", unit=" rows", disable=not show_progress, leave=False) as bar:
        for part in parts or map(chat.tokenise_lines, line_chunks(paths)):
            for column, array in zip(kept, (part.token_ids, part.loss_mask, part.lengths, part.rows + num_rows)):
                column.append(array)
            dropped.update(part.dropped)
            num_rows += part.num_rows
            bar.update(part.num_rows)
    if not any(map(len, kept[3])):
        name = chat.tokenizer.name_or_path
        template = f" with the chat template of {name}" if name else ""
        raise UserError(f"no usable row in {', '.join(paths)}{template}: {by_reason(dropped) or 'the files are empty'}")
    ids, mask, lengths, rows = map(concatenate, kept)
    return Documents(ids, mask, np.append(0, np.cumsum(lengths)), rows, dict(sorted(dropped.items())), num_rows)


def concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """Joined into one; the list is empty afterwards, so that not all of a large data set is held twice."""
    whole = np.concatenate(arrays)
    arrays.clear()
    return whole


def write_documents(documents: Documents, path: Path, text: dict) -> None:
    """One safetensors file, whole or not there at all, the same bytes each time. text: of `ChatTokenizer.describe`."""
    about = {"text": text, "fingerprint": documents.fingerprint, "dropped": documents.dropped,
             "num_rows": documents.num_rows}  # fmt: skip
    arrays = {name: torch.from_numpy(getattr(documents, name)) for name in DOCUMENT_ARRAYS}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.environ.get('GROUP_RANK', '0')}.partial")  # hosts may share the folder
    write_tensors(partial, arrays, {"documents": json.dumps(about)})
    sync_to_disk(partial)
    partial.replace(path)


def open_documents(path: str | Path) -> tuple[Documents, dict]:
    """(documents, what `ChatTokenizer.describe` gave) of a file of `write_documents`.

    The arrays are mapped into memory, not read: all processes of a host share them. Raises UserError for another file.
    """
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["documents"])
            arrays = [file.get_tensor(name).numpy() for name in DOCUMENT_ARRAYS]
        mapped = open(path, "rb")
        documents = Documents(*arrays, about["dropped"], about["num_rows"], mapped, os.fstat(mapped.fileno()).st_size)
        documents.fingerprint = about["fingerprint"]  # hashed when they were written
        return documents, about["text"]
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} is no file of tools/prepare_data.py: {first_line(error)}") from None


def check_prepared(path: str, text: dict) -> None:
    """Raise UserError, naming what differs, unless a prepared file was made as text (of `ChatTokenizer.describe`) says."""
    saved, differences = open_documents(path)[1], []
    for name, here in text.items():
        if (there := saved.get(name)) != here:
            values = f"{name} {json.dumps(there)}, not {json.dumps(here)}"
            differences.append(values if name.startswith("--") else f"another {name}")
    if differences:
        raise UserError(f"{path} was prepared with {', '.join(differences)}: prepare it again or use its settings")


def load_documents(paths: list[str], args: Arguments, tokenizer, topology: Topology, store, name: str,
                   shared: Iterable[int] = ()) -> Documents:  # fmt: skip
    """The documents of `paths`, tokenised once per file system and mapped into memory by all ranks of a host.

    Local rank 0 of each node does it, after the first of the nodes that share the output folder (`shared`, of
    `shared_folder`), whose cache it then finds.

    JSONL goes through a cache whose name is a hash of the files, the tokenizer, its template and the settings, so that
    a stale one is never read. A file of tools/prepare_data.py is taken as it is; raises UserError where it was made
    with another tokenizer or other settings than this run's. `name` ("train", ...) is unique within a run.
    """
    host = os.environ.get("GROUP_RANK", "0")
    if topology.local_rank == 0:
        first = str(min(shared, default=host))
        if first != host:
            wait_for_key(store, f"data/{name}/{first}", f"[{topology}] waiting for host {first}'s {name} data")
        path = settle_documents(paths, args, tokenizer, show_progress=topology.rank == 0)
        store.set(f"data/{name}/{host}", str(path))
    # no rank goes on before every host is ready: this wait has no limit, those to come have one
    for other in range(num_nodes()):
        wait_for_key(store, f"data/{name}/{other}", f"[{topology}] waiting for host {other} to tokenise {name} data")
    return open_documents(store.get(f"data/{name}/{host}").decode())[0]


def settle_documents(paths: list[str], args: Arguments, tokenizer, show_progress: bool) -> Path:
    """The file with the documents of `paths` for this run: the prepared one, or the cache, made if it is missing."""
    data, kwargs = args.data, parse_template_kwargs(args.data.chat_template_kwargs)
    chat = ChatTokenizer(
        tokenizer, data.max_document_tokens or data.tokens_per_micro_batch, data.cut_off_answers, kwargs
    )
    text = chat.describe()
    if is_prepared(paths):
        check_prepared(paths[0], text)
        return Path(paths[0])
    key = hashlib.sha256(json.dumps(text, sort_keys=True).encode())
    for path in paths:
        try:
            with open(path, "rb") as file:
                key.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"cannot read {path}: {first_line(error)}") from None
    cache = Path(args.run.output_dir) / "data" / f"{key.hexdigest()[:16]}.safetensors"
    if not cache.exists():
        write_documents(tokenise_rows(paths, chat, show_progress), cache, text)
    return cache


def is_prepared(paths: list[str]) -> bool:
    """Whether `paths` is a file of tools/prepare_data.py. Raises UserError where one stands among other files."""
    prepared = [path.endswith(".safetensors") for path in paths]
    if any(prepared) and len(paths) > 1:
        raise UserError(f"a prepared file stands alone: {', '.join(paths)}")
    return any(prepared)


def template_ids(tokenizer) -> set[int]:
    """The ids of chats of all roles as the template renders them, as far as it takes them, with and without a prompt."""
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
    others = [[{"role": role, "content": "x"}] for role in ("system", "developer", "tool")]
    found = set()
    for chat, prompt in itertools.product(([], *others), (False, True)):
        for messages in ([*chat, user], [*chat, user, answer], [user, answer, *chat]):
            with contextlib.suppress(Exception):  # templates raise what they like
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
                found.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def choose_mask_token(tokenizer, embedding_rows: int, requested: Optional[int], text_config=None) -> int:
    """The mask token's id: `--mask-token-id`, else the tokenizer's, else an embedding row beyond the tokenizer's
    last id, else a special token that the chat template never writes. Never bos, eos, pad or unk, be it the tokenizer
    or the target's text config that calls it so (Llama 3 ends texts with more tokens than its tokenizer says).

    Raises UserError when there is none, or when the requested one is taken or outside the embedding. Whether it stands
    in the text is for `check_data` to see.
    """
    taken = dict.fromkeys(template_ids(tokenizer), "a chat template's")
    for source, name in itertools.product((text_config, tokenizer), ("bos", "eos", "pad", "unk")):
        ids = getattr(source, f"{name}_token_id", None)
        taken |= dict.fromkeys(ids if isinstance(ids, list) else [ids], name)
    if requested is not None:
        if not 0 <= requested < embedding_rows:
            raise UserError(f"--mask-token-id {requested}: the target's embedding has rows 0 to {embedding_rows - 1}")
        if requested in taken:
            name = taken[requested]
            name = name if name.startswith("a ") else f"the {name}"
            raise UserError(f"--mask-token-id {requested} is {name} token: choose one that no text holds")
        return requested
    own = tokenizer.mask_token_id
    if own is not None and own < embedding_rows and own not in taken:
        return own
    for token_id in range(max(tokenizer.get_vocab().values()) + 1, embedding_rows):
        if token_id not in taken:
            return token_id
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        free = token_id < embedding_rows and token_id not in taken
        if free and token.special and token.content not in str(tokenizer.chat_template):
            return token_id
    raise UserError("no token is free to serve as mask token: name one with --mask-token-id")


def check_data(documents: Documents, held_out: Optional[Documents], mask_token_id: int) -> None:
    """Raise UserError for text in which there is nothing to predict, and for a mask token that is a part of the text: more
    than a quotation, which is warned of."""
    for flag, part in (("--train-data", documents), ("--eval-data", held_out)):
        if part is not None and not part.num_trainable:
            raise UserError(f"{flag}: no document has two supervised tokens in a row, so there is nothing to predict")
        if part is not None and (count := part.holding(mask_token_id)):
            line = f"{flag}: {count:,} of {len(part):,} documents hold the mask token {mask_token_id}"
            if count > 0.01 * len(part):
                raise UserError(f"{line}: choose another with --mask-token-id")
            print(f"warning: {line}, as if their text were to be filled in there", flush=True)


# ======================================================================================================================
# 4. Plan. In: documents, seed, micro-batch number m. Out: everything about m but its hidden states, on any rank.
# ======================================================================================================================


def random_stream(*key: int) -> np.random.Generator:
    """A generator that depends on its key alone, so that no state is ever carried or saved."""
    return np.random.Generator(np.random.Philox(key))


EPOCH_STREAM, ANCHOR_STREAM, NOISE_STREAM, HELD_OUT_STREAM = 1, 2, 3, 4


def pack_epoch(lengths: np.ndarray, budget: int, seed: int, epoch: int, open_packs: int = 16) -> list[np.ndarray]:
    """Shuffle all documents and lay them into packs of at most `budget` tokens; every document is used once.

    First fit over the last `open_packs` open packs: with documents of mixed lengths the packs are nearly full.
    """
    order = random_stream(seed, EPOCH_STREAM, epoch).random(len(lengths)).argsort(kind="stable")
    packs, room, open_ids = [], [], deque(maxlen=open_packs)
    for document in order.tolist():
        length = int(lengths[document])
        place = next((p for p in open_ids if room[p] >= length), None)
        if place is None:
            place = len(packs)
            packs.append([])
            room.append(budget)
            open_ids.append(place)  # the oldest one leaves
        packs[place].append(document)
        room[place] -= length
    return [np.array(pack) for pack in packs]


def loss_gamma(block_size: int) -> float:
    """Decay of the slot weights (DFlash paper: 7, 5, 4 for blocks of 16, 10, 8)."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)


@dataclass(frozen=True)
class BatchPlan:
    """Micro-batch m without its hidden states: documents laid end to end, padded to N rows.

    documents: indices, longest first · lengths: their tokens · num_tokens: their sum, at most N
    token_ids, document_ids (-1 in the tail), position_ids int64 [N] · loss_mask bool [N]
    anchor_rows int64 [A], ascending; the first num_anchors are used, the rest are 0
    labels int64 [A, B] and weights float32 [A, B]: slot k predicts the token at anchor + k; weight 0 is untrained
    """

    m: int
    documents: np.ndarray
    lengths: np.ndarray
    num_tokens: int
    token_ids: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray
    loss_mask: np.ndarray
    anchor_rows: np.ndarray
    num_anchors: int
    labels: np.ndarray
    weights: np.ndarray
    noise_std: float
    noise_seed: int

    @property
    def weight_sum(self) -> float:
        return float(self.weights.sum(dtype=np.float64))

    def unsupervised(self) -> "BatchPlan":
        """The same rows with nothing to train: what a drafter works on in place of a micro-batch that is skipped."""
        return dataclasses.replace(self, num_anchors=0, weights=np.zeros_like(self.weights))


class Planner:
    """Plans of one run: `plan(m)` is a pure function of (dataset fingerprint, seed, m), the same on every rank.

    With held-out documents, every `eval_every` steps and after the last one, the numbers continue through all of them:
    an evaluation is so many more micro-batches in the one global order, and does not change what the others hold.
    """

    def __init__(self, documents: Documents, args: Arguments, num_drafters: int, held_out: Optional[Documents] = None):
        self.documents, self.held_out, self.data = documents, held_out, args.data
        self.tokens, self.anchors = args.data.tokens_per_micro_batch, args.data.anchors_per_micro_batch
        self.block = args.drafter.block_size
        gamma = args.data.loss_gamma or loss_gamma(self.block)
        self.slot_weights = np.exp(-(np.arange(self.block) - 1) / gamma).astype(np.float32)
        if args.data.loss_weights == "dpace":  # the weights proper follow in the loss: see `dpace_weights`
            self.slot_weights[:] = 1.0
        self.slot_weights[0] = 0.0
        self.micro_batches_per_step = num_drafters * args.optimization.gradient_accumulation_steps
        self.total_steps = args.optimization.max_steps
        self.epoch_starts = [0]  # epoch_starts[e]: number of the first training pack of epoch e
        self.plan = functools.lru_cache(maxsize=4 * self.micro_batches_per_step)(self._plan)
        packs_of = functools.partial(pack_epoch, documents.lengths, self.tokens, self.data.seed)
        self.epoch = functools.lru_cache(maxsize=2)(packs_of)
        if (epochs := args.optimization.num_epochs) is not None:
            whole = sum(len(self.epoch(e)) for e in range(int(epochs)))
            part = round((epochs % 1) * len(self.epoch(int(epochs)))) if epochs % 1 else 0
            self.total_steps = max(1, -(-(whole + part) // self.micro_batches_per_step))
        self.held_out_packs = [] if held_out is None else pack_epoch(held_out.lengths, self.tokens, self.data.seed, 0)
        # every drafter takes part in an evaluation with the same number of micro-batches, the last ones perhaps empty
        self.eval_micro_batches = -(-len(self.held_out_packs) // num_drafters) * num_drafters

    def first_m(self, step: int) -> int:
        """Number of the first micro-batch of a step: after those of all earlier steps and evaluations."""
        return step * self.micro_batches_per_step + step // self.data.eval_every * self.eval_micro_batches

    @functools.cached_property
    def end_m(self) -> int:
        """One past the run's last micro-batch."""
        return self.evaluation_after(self.total_steps).stop  # without held-out documents: that of an empty range there

    def micro_batches(self, step: int) -> range:
        """The numbers that optimizer step `step` consumes."""
        return range(self.first_m(step), self.first_m(step) + self.micro_batches_per_step)

    def evaluation_after(self, steps: int) -> range:
        """The numbers of the evaluation after so many steps; empty where none is due."""
        if steps % self.data.eval_every and steps != self.total_steps:
            return range(0)
        start = self.micro_batches(steps - 1).stop
        return range(start, start + self.eval_micro_batches)

    def locate(self, m: int) -> tuple[int, int]:
        """(step, index within the step's micro-batches, or past them: within the evaluation after it) of number m."""
        every = self.data.eval_every
        cycles, rest = divmod(m, self.first_m(every))
        step = cycles * every + min(rest // self.micro_batches_per_step, every - 1)
        if self.eval_micro_batches:
            step = min(step, self.total_steps - 1)
        return step, m - self.first_m(step)

    def locate_pack(self, index: int) -> tuple[int, int]:
        """(epoch, pack within it) of the training pack of that number, counted over all epochs."""
        starts = self.epoch_starts  # replaced, never changed: a drafter plans on its receiver's thread too
        while starts[-1] <= index:
            starts = [*starts, starts[-1] + len(self.epoch(len(starts) - 1))]
        self.epoch_starts = starts
        epoch = next(e for e in reversed(range(len(starts))) if starts[e] <= index)
        return epoch, index - starts[epoch]

    def _plan(self, m: int) -> BatchPlan:
        step, place = self.locate(m)
        if place >= self.micro_batches_per_step:
            index = place - self.micro_batches_per_step
            pack = self.held_out_packs[index % len(self.held_out_packs)]
            anchors = self.anchors if index < len(self.held_out_packs) else 0
            return self._lay_out(m, self.held_out, pack, (HELD_OUT_STREAM, index), anchors, noise_std=0.0)
        index = step * self.micro_batches_per_step + place
        epoch, pack = self.locate_pack(index)
        std = noise_std_at(step, self.total_steps, self.data)
        return self._lay_out(m, self.documents, self.epoch(epoch)[pack], (ANCHOR_STREAM, index), self.anchors, std)

    def _lay_out(self, m: int, source: Documents, documents, anchor_key, max_anchors: int, noise_std: float) -> BatchPlan:
        lengths = source.lengths[documents]
        longest_first = np.argsort(-lengths, kind="stable")  # the target's length buckets are then contiguous
        documents, lengths = documents[longest_first], lengths[longest_first]
        used = int(lengths.sum())
        token_ids, document_ids = np.zeros(self.tokens, np.int64), np.full(self.tokens, -1)
        position_ids, loss_mask = np.zeros(self.tokens, np.int64), np.zeros(self.tokens, bool)
        row = 0
        with source.reading():
            for i, (document, length) in enumerate(zip(documents, lengths)):
                tokens = slice(source.offsets[document], source.offsets[document + 1])
                rows = slice(row, row + length)
                token_ids[rows], loss_mask[rows] = source.token_ids[tokens], source.loss_mask[tokens]
                document_ids[rows], position_ids[rows] = i, np.arange(length)
                row += length
        evenly = self.data.anchor_draw == "even" and source is self.documents
        anchor_rows, num_anchors = self._draw_anchors(anchor_key, max_anchors, document_ids, loss_mask, evenly)
        labels, weights = self._label(token_ids, document_ids, loss_mask, anchor_rows, num_anchors)
        noise_seed = int(random_stream(self.data.seed, NOISE_STREAM, anchor_key[1]).integers(2**62))
        return BatchPlan(m, documents, lengths, used, token_ids, document_ids, position_ids, loss_mask,
                         anchor_rows, num_anchors, labels, weights, noise_std, noise_seed)  # fmt: skip

    def _draw_anchors(self, key, max_anchors: int, document_ids, loss_mask, evenly: bool) -> tuple[np.ndarray, int]:
        """Up to A rows, without replacement, where the row and the next are supervised in one document: uniformly, or
        one from every document in turn until A are drawn or none is left."""
        valid = loss_mask[:-1] & loss_mask[1:] & (document_ids[:-1] == document_ids[1:])
        candidates = np.flatnonzero(valid)
        drawn = candidates[random_stream(self.data.seed, *key).random(len(candidates)).argsort(kind="stable")]
        if evenly:
            by_document = document_ids[drawn].argsort(kind="stable")
            _, counts = np.unique(document_ids[drawn], return_counts=True)
            turn = np.empty(len(drawn), np.int64)  # how many of its document were drawn before it
            turn[by_document] = np.concatenate([np.arange(count) for count in counts] or [[]])
            drawn = drawn[turn.argsort(kind="stable")]
        chosen = np.sort(drawn[:max_anchors])
        return np.pad(chosen, (0, self.anchors - len(chosen))), len(chosen)

    def _label(self, token_ids, document_ids, loss_mask, anchor_rows, num_anchors) -> tuple[np.ndarray, np.ndarray]:
        """Labels and weights [A, B]: slots count up to the first unsupervised token or document end, never after."""
        rows = anchor_rows[:, None] + np.arange(self.block)
        inside = rows < self.tokens
        rows = np.minimum(rows, self.tokens - 1)
        counts = inside & loss_mask[rows] & (document_ids[rows] == document_ids[anchor_rows][:, None])
        counts = np.logical_and.accumulate(counts, axis=1)
        counts[num_anchors:] = False
        return token_ids[rows], (counts * self.slot_weights).astype(np.float32)


# ======================================================================================================================
# 5. Target. In: a name. Out: the whole frozen model (target ranks), or only its embedding, final norm and head.
# ======================================================================================================================

# Random weights in real shapes, built on the device: nothing to download. The toy also serves tests.
RANDOM_TARGETS = {
    "toy": dict(
        model_type="qwen3", vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, dtype="float32",
    ),
    "qwen3-8b-shape": dict(
        model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3.6-27b-shape": dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_value_heads=48, linear_num_key_heads=16,
        linear_value_head_dim=128, linear_key_head_dim=128, max_position_embeddings=262144, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
}  # fmt: skip

# Families, by the `model_type` of their config, that tests/test_families.py proves. Others run with a warning, after
# `check_unproven_target` saw no reason to refuse them.
PROVEN_FAMILIES = (
    "llama", "mistral", "mistral3", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "gpt_oss", "gemma2", "gemma3", "gemma3_text",
)  # fmt: skip


def choose_target(args: TargetArguments) -> None:
    """Resolve `--target auto` in place, and say so."""
    if args.target == "auto":
        args.target = str(DEMO_TARGET) if (DEMO_TARGET / "config.json").exists() else "toy"
        if os.environ.get("RANK", "0") == "0":
            note = "" if args.target != "toy" else " (random weights; tools/prepare_demo_target.py makes a real one)"
            print(f"target: {args.target}{note}", flush=True)


def load_target_config(args: TargetArguments):
    """The target's transformers config, with `dtype` resolved to a torch dtype.

    Raises UserError for a model that is no causal decoder, as far as its config tells.
    """
    from transformers import AutoConfig

    if args.target in RANDOM_TARGETS:
        config = AutoConfig.for_model(**RANDOM_TARGETS[args.target], tie_word_embeddings=False)
    else:
        try:
            config = AutoConfig.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"cannot load --target {args.target}: {first_line(error)}") from None
    check_target_config(args.target, config)
    name = args.target_dtype
    if name == "auto":
        name = str(config.get_text_config().dtype or config.dtype or "float32").removeprefix("torch.")
    config.dtype = config.get_text_config().dtype = getattr(torch, name)
    return config


def check_target_config(target: str, config) -> None:
    """Raise UserError, before anything is loaded, for what is no causal decoder of a width and depth of its own."""
    target_class(config)
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UserError(f"--target {target}: {config.model_type} is an encoder-decoder, not a decoder alone")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(f"--target {target}: its text tokens see those after them (use_bidirectional_attention)")
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    if missing := [name for name in needed if not isinstance(getattr(text, name, None), int)]:
        raise UserError(f"--target {target}: the {missing[0]} of a {config.model_type} is not one number")


def target_class(config):
    """transformers' auto class for a target: the causal language model, else the multimodal model around it.

    Raises UserError if there is neither.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    for name, known in (("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING),
                        ("AutoModelForImageTextToText", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)):  # fmt: skip
        if type(config) in known or name in (getattr(config, "auto_map", None) or {}):
            return getattr(transformers, name)
    raise UserError(f"a model of type {config.model_type} is no causal language model: it cannot be a target")


def settle_target_dtype(args: TargetArguments, config, device: torch.device) -> None:
    """Resolve `--target-dtype auto` in place: the checkpoint's, or fp32 on a CPU that has no instructions for it.

    (bf16 on an AVX2 CPU ran many times slower than fp32.)
    """
    fast_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if args.target_dtype == "auto" and device.type == "cpu" and not (config.dtype == torch.bfloat16 and fast_bf16):
        config.dtype = config.get_text_config().dtype = torch.float32
    args.target_dtype = str(config.dtype).removeprefix("torch.")


def choose_fc_layer_ids(num_layers: int, args: TargetArguments) -> tuple[int, ...]:
    """`--fc-layer-ids`, else K layers by the z-lab rule: n // 2 for one, else round(1 + j * (n - 4) / (K - 1)).

    Raises UserError when ids repeat, are unsorted or lie outside the target, or are not as many as `--num-fc-layers`.
    """
    k = 5 if args.num_fc_layers is None else args.num_fc_layers
    if args.fc_layer_ids is not None:
        ids = tuple(args.fc_layer_ids)
    elif k == 1:
        ids = (num_layers // 2,)
    else:
        ids = tuple(round(1 + j * (num_layers - 4) / (k - 1)) for j in range(k))
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        raise UserError(
            f"captured layers {list(ids)} of a target with {num_layers} layers: ids must rise and lie in "
            f"0..{num_layers - 1}; set --fc-layer-ids or a smaller --num-fc-layers"
        )
    if args.num_fc_layers not in (None, len(ids)):
        raise UserError(
            f"--num-fc-layers {args.num_fc_layers}, but layers {list(ids)} are asked for, by --fc-layer-ids or the drafter "
            "that training starts from"
        )
    return ids


def random_weight(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A normal(0, 0.02) matrix that depends on its name alone: ranks of both roles make the same one."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)


def check_target_tp(config, target_tp: int) -> None:
    """Raise UserError where transformers cannot share a target among `target_tp` ranks. In: its config alone."""
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}  # some share the embedding alone
    if target_tp > 1 and not any(name.startswith("layers.") for name in plan):
        raise UserError(f"--target-tp {target_tp}: transformers has no plan to share the layers of a {text.model_type}")
    if target_tp not in (able := target_tp_degrees(text)):
        raise UserError(
            f"--target-tp {target_tp}: the widths of this target can be shared by {', '.join(map(str, able))} ranks"
        )


def target_tp_degrees(text_config) -> list[int]:
    """The numbers of ranks, up to 64, that divide all that tensor parallelism splits."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
    widths = [width for name in names if isinstance(width := getattr(text_config, name, None), int)]
    return [k for k in range(1, 65) if not any(width % k for width in widths)]


def check_target_fits(num_bytes: int, free_bytes: int, target_tp: int, degrees: list[int]) -> None:
    """Raise UserError, naming the memory and the --target-tp that would do, where a target's share of `num_bytes` of
    weights takes more than nine tenths of `free_bytes`: activations and captured states need the rest."""
    if num_bytes / target_tp <= 0.9 * free_bytes:
        return
    enough = next((k for k in degrees if num_bytes / k <= 0.9 * free_bytes), None)
    way_out = "no degree of tensor parallelism does" if enough is None else f"--target-tp {enough} would do"
    needed = f"{num_bytes / 2**30:.1f} GiB" + (f" / {target_tp}" if target_tp > 1 else "")
    raise UserError(
        f"the target's weights need {needed}, more than nine tenths of the {free_bytes / 2**30:.1f} GiB free on its "
        f"GPU: {way_out}"
    )


def check_rope(text_config, longest: int) -> None:
    """Raise UserError where a document's states would depend on its neighbours' lengths: some variants of RoPE choose the
    frequencies of a whole forward pass by its longest document. longest: tokens."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    for variant in [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]:  # by kind of layer
        kind = variant.get("rope_type")
        limits = {"longrope": variant.get("original_max_position_embeddings"),
                  "dynamic": getattr(text_config, "max_position_embeddings", 0) - 1}  # at the limit it keeps the last pass's
        limit = limits.get(kind)
        if limit is not None and longest > limit:
            raise UserError(
                f"documents of up to {longest:,} tokens: this target's RoPE ({kind}) changes its frequencies "
                f"for all documents of a forward pass that holds one of more than {limit:,}; set --max-document-tokens {limit}"
            )


def target_bytes(args: TargetArguments, config) -> int:
    """Bytes of the target's weights in its dtype, from a skeleton without memory."""
    with torch.device("meta"):
        skeleton = target_class(config).from_config(config, trust_remote_code=args.trust_remote_code)
    return sum(parameter.numel() for parameter in skeleton.parameters()) * config.dtype.itemsize


class Float8Linear(nn.Module):
    """A frozen linear layer in fp8: e4m3 with one scale for each row of the input and each row of the weight.

    A token's result depends on its own row alone. Sizes must be multiples of 16. On the CPU, where not every torch has a
    kernel for it, the product of what was rounded is taken.
    """

    LARGEST = torch.finfo(torch.float8_e4m3fn).max

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = self.quantise(linear.weight)
        self.register_buffer("weight", weight)  # [out, in]
        self.register_buffer("scale", scale.T.contiguous())  # [1, out]
        self.bias = linear.bias

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Whether the kernel takes it, and it is no gate: those have a few outputs a token."""
        into, out = linear.in_features, linear.out_features
        return into % 16 == out % 16 == 0 and 16 * out >= into

    @classmethod
    def quantise(cls, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(fp8 rows [n, width], their scales fp32 [n, 1])"""
        wide = rows.float()
        scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / cls.LARGEST
        return (wide / scale).to(torch.float8_e4m3fn), scale

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = self.quantise(x.flatten(0, -2))
        if x.is_cuda:
            out = torch._scaled_mm(rows, self.weight.T, scale_a=scale, scale_b=self.scale, out_dtype=x.dtype)
        else:
            out = ((rows.float() * scale) @ (self.weight.float().T * self.scale)).to(x.dtype)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError where `Float8Linear` has no kernel."""
    if device.type == "cuda" and (torch.cuda.get_device_capability(device) < (8, 9) or dtype != torch.bfloat16):
        raise UserError("--target-fp8: needs a target in bfloat16 and a GPU that computes in fp8 (Ada, Hopper or newer)")


def load_target(args: TargetArguments, config, device: torch.device, target_tp: int = 1) -> nn.Module:
    """The frozen target in eval mode, straight onto its device: the whole of it, or with `target_tp` above 1 this
    rank's share, by transformers' tensor parallel plan over the default process group, which has `target_tp` ranks.

    Raises UserError for a target that does not fit into its GPU, or one in fp8 that this GPU cannot compute.
    """
    if args.target_fp8:
        check_fp8(config.dtype, device)
    if device.type == "cuda" and getattr(config, "quantization_config", None) is None:
        degrees = target_tp_degrees(config.get_text_config())
        check_target_fits(target_bytes(args, config), torch.cuda.mem_get_info(device)[0], target_tp, degrees)
    place = {"device_map": {"": device}}
    if target_tp > 1:
        from transformers.distributed import DistributedConfig

        place = {"distributed_config": DistributedConfig(tp_size=target_tp)}
    if args.target in RANDOM_TARGETS:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            model = target_class(config).from_config(copy.deepcopy(config), dtype=config.dtype)
        for name, module in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
            module.weight.data = random_weight(name, module.weight.shape, device, config.dtype)
        if target_tp > 1:
            distributed_config, _, mesh = model.prepare_distribute_model(place["distributed_config"])
            model = model.maybe_distribute_model(model, distributed_config, mesh)
    else:
        model = target_class(config).from_pretrained(
            args.target, dtype=config.dtype, trust_remote_code=args.trust_remote_code, **place,
            # SDPA knows no soft-capped scores (Gemma 2): some transformers versions then leave the cap out in silence
            attn_implementation="eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None,
        )  # fmt: skip
    return model.eval().requires_grad_(False)


def stop_token_ids(model: nn.Module, tokenizer) -> set[int]:
    """The tokens that end an answer: the tokenizer's end of sequence and those of the target's generation settings."""
    own = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}


class FrozenEnds(nn.Module):
    """The target's embedding, final norm and LM head, as the drafter uses them. No gradient reaches its weights.

    embed(ids) -> [.., H], scaled as the target scales it (Gemma) · head_weight [V, H] · logits soft-capped by `softcap`
    """

    def __init__(self, embedding: Tensor, head: Tensor, norm: nn.Module, embed_scale: float, softcap: Optional[float]):
        super().__init__()
        self.register_buffer("embedding", embedding)
        self.register_buffer("head_weight", head)
        self.norm = norm.requires_grad_(False)
        self.embed_scale, self.softcap = embed_scale, softcap
        self.compiled = False  # whether the loss over the head is to run compiled

    def embed(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.embedding)
        return rows if self.embed_scale == 1.0 else rows * torch.tensor(self.embed_scale, dtype=rows.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., V] in fp32, soft-capped."""
        return soft_cap((hidden.to(self.head_weight.dtype) @ self.head_weight.T).float(), self.softcap)


def soft_cap(logits: Tensor, cap: Optional[float]) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def load_frozen_ends(args: TargetArguments, config, device: torch.device, dtype: torch.dtype) -> FrozenEnds:
    """Read the three ends out of the target's safetensors (single, sharded, tied or not), and nothing else of it.

    A skeleton on the meta device gives the norm's class, the embedding's scale, and whether the head is the embedding.
    Raises UserError for a target whose ends are of another make.
    """
    text = config.get_text_config()
    with torch.device("meta"):
        skeleton = target_class(config).from_config(config, trust_remote_code=args.trust_remote_code)
    norm, head_module = getattr(skeleton.get_decoder(), "norm", None), skeleton.get_output_embeddings()
    if norm is None or head_module is None or getattr(head_module, "bias", None) is not None:
        name = type(skeleton).__name__
        raise UserError(f"--target {args.target}: {name} has no final `norm` or no head without a bias")
    norm = norm.to_empty(device=device)
    if args.target in RANDOM_TARGETS:
        shape = (text.vocab_size, text.hidden_size)
        embedding, head = (random_weight(name, shape, device, config.dtype) for name in ("embedding", "head"))
        norm_weights = {"weight": type(norm)(text.hidden_size).weight}  # as it starts: 1, or 0 where 1 is added to it
    else:
        files, tied = safetensors_index(args.target), head_module.weight is skeleton.get_input_embeddings().weight
        embedding, head, norm_weights = read_ends(files, tied, list(norm.state_dict()), args.target)
    norm.load_state_dict(norm_weights)
    softcap = getattr(text, "final_logit_softcapping", None)
    # Rounded to the target's dtype first: the drafter sees exactly the numbers that the target uses.
    embedding, head = (x.to(config.dtype).to(device, dtype) for x in (embedding, head))
    return FrozenEnds(embedding, head, norm.to(device, dtype), embed_scale(skeleton, config.dtype), softcap)


def embed_scale(model: nn.Module, dtype: torch.dtype) -> float:
    """What the target multiplies its embedding by, rounded to `dtype` as there."""
    return torch.tensor(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)).to(dtype).item()


def read_ends(files: dict[str, Path], tied: bool, norm_names: list[str], target: str) -> tuple[Tensor, Tensor, dict]:
    """(embedding, head, final norm's weights by name) of a checkpoint.

    A tied head is usually not in the file. Where it is, transformers uses it, and ties nothing if the two differ.
    """
    outside_layers = r"^(?!.*layers\.\d).*\b"  # multi-token prediction layers bring embeddings and heads of their own
    embedding_key = only_key(files, outside_layers + r"embed_tokens\.weight$", target)
    norm_prefix = embedding_key.removesuffix("embed_tokens.weight") + "norm."
    norm_weights = {name: read_tensor(files, norm_prefix + name, target) for name in norm_names}
    embedding = head = read_tensor(files, embedding_key, target)
    head_pattern = outside_layers + r"lm_head\.weight$"
    if not tied or any(re.search(head_pattern, key) for key in files):
        head = read_tensor(files, only_key(files, head_pattern, target), target)
    for name, matrix in (("embedding", embedding), ("LM head", head)):
        if matrix.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            dtype = str(matrix.dtype).removeprefix("torch.")
            raise UserError(f"{target}: its {name} is stored in {dtype}, whose scales are not read: take a checkpoint with "
                            "both ends in 16 or 32 bits")  # fmt: skip
    return embedding, head, norm_weights


def safetensors_index(target: str) -> dict[str, Path]:
    """Tensor name -> safetensors file, of a local folder or a hub id."""
    from transformers.utils import cached_file

    def find(name: str) -> Optional[str]:
        return cached_file(target, name, _raise_exceptions_for_missing_entries=False)

    if index := find("model.safetensors.index.json"):
        names = json.loads(Path(index).read_text())["weight_map"]
        shards = {shard: find(shard) for shard in set(names.values())}
        if missing := sorted(shard for shard, path in shards.items() if path is None):
            raise UserError(f"{target}: shard {missing[0]} is missing")
        return {name: Path(shards[shard]) for name, shard in names.items()}
    if single := find("model.safetensors"):
        with safe_open(single, "pt") as file:
            return {name: Path(single) for name in file.keys()}
    raise UserError(f"{target}: no safetensors weights found (model.safetensors, single or sharded)")


def only_key(files: dict[str, Path], pattern: str, target: str) -> str:
    """The one tensor name of the text model that matches."""
    keys = [key for key in files if re.search(pattern, key) and not re.search(r"visual|vision|audio|^mtp\.", key)]
    if len(keys) != 1:
        raise UserError(f"{target}: expected one tensor named like {pattern}, found {keys or 'none'}")
    return keys[0]


def target_hashes(target: str) -> dict[str, str]:
    """A target by what it is, not by where it lies: hashes of its config.json and of its weights.

    weights_sha256 covers names, dtypes and shapes of all tensors and the values of its vectors (norms, biases),
    matrices_sha256 the middle row of every matrix (of many experts in one tensor, the middle one's): cheap at any size,
    and different after a fine-tune or with an adapter merged in.
    """
    from transformers.utils import cached_file

    config, digest, matrices = Path(cached_file(target, "config.json")).read_bytes(), hashlib.sha256(), hashlib.sha256()
    for path in sorted(set(safetensors_index(target).values())):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                digest.update(f"{name} {part.get_dtype()} {part.get_shape()}\n".encode())
                *outer, _ = part.get_shape() or [0]
                rows = part[tuple(slice(n // 2, n // 2 + 1) for n in outer)] if outer else file.get_tensor(name)
                (matrices if outer else digest).update(rows.flatten().view(torch.uint8).numpy().tobytes())
    hashes = {"config": hashlib.sha256(config), "weights": digest, "matrices": matrices}
    return {f"{what}_sha256": found.hexdigest() for what, found in hashes.items()}


def read_tensor(files: dict[str, Path], key: str, target: str) -> Tensor:
    if key not in files:
        raise UserError(f"{target}: tensor {key} is missing")
    with safe_open(files[key], "pt") as file:
        return file.get_tensor(key)


# ======================================================================================================================
# 6. Capture. In: a forward pass over some documents. Out: rows of real tokens, packed, with or without noise.
# ======================================================================================================================


class Span:
    """Time of one stage, from construction to `end()`: by CUDA events on the current stream, else by the host clock."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks = [self._mark()]

    def _mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self) -> "Span":
        self.marks.append(self._mark())
        return self

    def wait(self) -> None:
        """Make the current stream wait for the end of the stage."""
        if self.cuda:
            torch.cuda.current_stream().wait_event(self.marks[1])

    def ms(self) -> float:
        """Milliseconds; waits for the stage to be over."""
        if not self.cuda:
            return (self.marks[1] - self.marks[0]) * 1e3
        self.marks[1].synchronize()
        return self.marks[0].elapsed_time(self.marks[1])


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting: through pinned memory, which the allocator keeps until the copy is done."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor):
    """(a copy on the host, the CUDA event that says when it has arrived, or None): enqueued, without waiting."""
    if tensor.device.type == "cpu":
        return tensor, None
    host, ready = torch.empty_like(tensor, device="cpu", pin_memory=True), torch.cuda.Event()
    host.copy_(tensor, non_blocking=True)
    ready.record()
    return host, ready


# Inductor else chooses kernels by timing them, each process for itself, and sums and contractions round as the chosen ones
# do: of 9 runs of one configuration on an H200 (torch 2.11), 4 rounded otherwise; with these options, 14 of 14 runs were
# equal in every gradient of 40 steps. They go with each compilation, since Dynamo sets a global `deterministic` back after
# every frame.
UNTIMED_KERNELS = {"deterministic": True, "triton.autotune_pointwise": False}


def compile_repeatably(function, dynamic: bool = False, **options):
    """The function, compiled; its kernels round alike in every run and on every rank."""
    return torch.compile(function, dynamic=dynamic, options=UNTIMED_KERNELS, **options)


compiled_once = functools.cache(compile_repeatably)  # for module-level functions: the same compiled one at each call


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of the text model, also inside a multimodal wrapper."""
    depth = model.config.get_text_config().num_hidden_layers
    found = [
        module for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and re.search(r"(^|\.)(layers|h|blocks)$", name)
        and not re.search(r"visual|vision|audio", name)
    ]  # fmt: skip
    if len(found) != 1:
        raise UserError(f"{type(model).__name__}: found {len(found)} lists of {depth} decoder layers, expected one")
    return found[0]


def packed_index(lengths, max_length: int) -> Tensor:
    """Rows of real tokens in a padded batch flattened to [batch * Lmax]: int64 [sum(lengths)], in batch order."""
    lengths = np.asarray(lengths, np.int64)
    starts = np.arange(len(lengths)) * max_length
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.repeat(starts, lengths) + within)


class HookCapture:
    """Forward hooks that keep the outputs of chosen decoder layers, and the packing of what they kept.

    `captured[layer_id]` is [batch, Lmax, H], documents padded on the right; where `end_to_end` is set, it is one row
    [1, N, H] that holds all documents and then padding. The packing methods need only `fc_layer_ids`,
    `verifier_last_layer` (None: not wanted) and `captured`, so an instance made with `HookCapture.__new__` and given
    those three packs without any model.
    """

    end_to_end = False

    def __init__(self, model: nn.Module, fc_layer_ids, verifier_last_layer: Optional[int] = None):
        self.fc_layer_ids, self.verifier_last_layer = tuple(fc_layer_ids), verifier_last_layer
        self.captured: dict[int, Tensor] = {}
        layers = decoder_layers(model)
        self.handles = [layers[i].register_forward_hook(functools.partial(self._keep, i)) for i in self._wanted()]

    def _wanted(self) -> list[int]:
        last = [] if self.verifier_last_layer is None else [self.verifier_last_layer]
        return sorted({*self.fc_layer_ids, *last})

    def _keep(self, layer_id: int, module, inputs, output) -> None:
        if layer_id in self.captured:
            raise RuntimeError(f"layer {layer_id} fired twice in one forward pass")
        self.captured[layer_id] = output[0] if isinstance(output, tuple) else output

    def take(self) -> "HookCapture":
        """Move what one forward pass left here into an instance of its own, ready for the next pass.

        Raises RuntimeError if a layer did not fire.
        """
        if missing := [i for i in self._wanted() if i not in self.captured]:
            raise RuntimeError(f"layers {missing} did not fire in the forward pass")
        shot, self.captured = copy.copy(self), {}
        return shot

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def real_rows(self, lengths) -> Tensor:
        """Where the real tokens of documents of these lengths lie in a captured layer, flattened to [batch * Lmax]:
        int64 [sum(lengths)]. Raises ValueError where they cannot."""
        some = self.captured[self.fc_layer_ids[0]]
        filled = [int(sum(lengths))] if self.end_to_end else lengths
        if len(filled) != some.shape[0] or max(filled) > some.shape[1]:
            raise ValueError(f"lengths {list(lengths)} do not fit captured layers of shape {tuple(some.shape)}")
        return to_device(packed_index(filled, some.shape[1]), some.device)

    def pack_into(self, lengths, layers: list[Tensor], last: Optional[Tensor]) -> None:
        """Gather the real tokens of every captured layer straight into `layers` (K views [N, H]) and `last` [N, H].

        The views may be columns of one [N, K*H] tensor: packed and split form differ in nothing but the views.
        """
        index = self.real_rows(lengths)
        targets = list(zip(self.fc_layer_ids, layers))
        if self.verifier_last_layer is not None:
            targets.append((self.verifier_last_layer, last))
        for layer_id, out in targets:
            if out.shape[0] != len(index):
                raise ValueError(f"{len(index)} tokens do not fit {out.shape[0]} rows")
            torch.index_select(self.captured[layer_id].flatten(0, 1), 0, index, out=out)

    def get_hidden_states_packed(self, lengths) -> tuple[Tensor, Optional[Tensor]]:
        """(hidden [1, N, K*H], verifier_last [1, N, H] or None): rows of real tokens in batch order."""
        some = self.captured[self.fc_layer_ids[0]]
        hidden = some.new_empty(int(sum(lengths)), len(self.fc_layer_ids) * some.shape[2])
        last = None if self.verifier_last_layer is None else some.new_empty(hidden.shape[0], some.shape[2])
        self.pack_into(lengths, list(hidden.split(some.shape[2], dim=1)), last)
        return hidden[None], None if last is None else last[None]

    def get_hidden_state_layer_packs(self, lengths) -> tuple[list[Tensor], Optional[Tensor]]:
        """(list of K tensors [1, N, H], verifier_last [1, N, H] or None): `get_hidden_states_packed` before joining."""
        some = self.captured[self.fc_layer_ids[0]]
        layers = [some.new_empty(int(sum(lengths)), some.shape[2]) for _ in self.fc_layer_ids]
        last = None if self.verifier_last_layer is None else torch.empty_like(layers[0])
        self.pack_into(lengths, layers, last)
        return [layer[None] for layer in layers], None if last is None else last[None]


def whole(weight: Tensor) -> Tensor:
    """A weight of the target at full size; all ranks of a sharded target call it together."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@torch.no_grad()
def check_unproven_target(model: nn.Module, config) -> Optional[str]:
    """Of a family that no test proves: see on a few tokens that layers and ends compute what is expected, and that no
    token sees those after it, on which right padding rests. Returns a warning that says what was not verified.

    None for a family in `PROVEN_FAMILIES`. Raises UserError naming what is not as expected.
    """
    if config.model_type in PROVEN_FAMILIES and not hasattr(config, "auto_map"):
        return None
    embedding, head, decoder = model.get_input_embeddings(), model.get_output_embeddings(), model.get_decoder()
    layers, text, known = decoder_layers(model), config.get_text_config(), 32
    ids = torch.randint(text.vocab_size, (2, 1, known + 16), generator=torch.Generator().manual_seed(0))
    ids[1, :, :known] = ids[0, :, :known]  # the same beginning, other tokens after it
    first, second = ids.to(embedding.weight.device)
    capture, entry = HookCapture(model, range(len(layers))), []
    hook = layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: entry.append(args[0] if args else kwargs.get("hidden_states")), with_kwargs=True
    )
    final = decoder(input_ids=first, use_cache=False).last_hidden_state
    states = capture.take().captured
    decoder(input_ids=second, use_cache=False)
    others = capture.take().captured
    logits = model(input_ids=first, use_cache=False).logits
    hook.remove()
    capture.remove()
    if any(state.shape != (1, known + 16, text.hidden_size) for state in states.values()):
        raise UserError(f"--target: layers of a {config.model_type} give more than one hidden state a token")
    rows = F.embedding(first, whole(embedding.weight)) * embed_scale(model, config.dtype)
    own_logits = soft_cap((final @ whole(head.weight).T).float(), getattr(text, "final_logit_softcapping", None))
    proofs = {
        "its embedding computes more than scaled rows": (entry[0], rows),
        "its last hidden state is not the final norm of the last layer": (decoder.norm(states[len(layers) - 1]), final),
        "its logits are not the soft-capped product with its head": (logits, own_logits),
        "its tokens see those after them": tuple(torch.cat([x[i][:, :known] for i in x]) for x in (states, others)),
    }
    for failure, (one, other) in proofs.items():
        one, other = one.float(), other.float()
        if not (one - other).norm() <= (1e-3 if config.dtype == torch.float32 else 5e-2) * other.norm():
            raise UserError(f"--target: a {config.model_type} cannot be a target here: {failure}")
    return (
        f"no test proves targets of type {config.model_type}. Seen right on {known + 16} tokens: layers, embedding, "
        "final norm, head, no look-ahead. Not verified: longer documents, bits that do not depend on the other "
        "documents of a batch, and whether servers know the family"
    )


def pack_shots(plan: BatchPlan, shots: list[tuple[HookCapture, slice]], layers: list[Tensor], last) -> None:
    """Pack all forward passes of a micro-batch, each with the documents it covered: see `HookCapture.pack_into`."""
    row = 0
    for shot, documents in shots:
        lengths = plan.lengths[documents]
        rows = slice(row, row + int(lengths.sum()))
        try:
            shot.pack_into(lengths, [layer[rows] for layer in layers], None if last is None else last[rows])
        except ValueError as error:
            raise RuntimeError(f"micro-batch {plan.m}, documents {plan.documents[documents].tolist()}: {error}") from None
        row = rows.stop
    if row != plan.num_tokens:
        missing = plan.documents[shots[-1][1].stop if shots else 0 :].tolist()
        raise RuntimeError(
            f"micro-batch {plan.m}: {row} rows of hidden states for {plan.num_tokens} tokens, none for documents {missing}"
        )


def add_noise_(hidden: Tensor, std: float, seed: int) -> Tensor:
    """Add Gaussian noise in place to the joined states [N, K*H], whichever side does it, from a generator of its own."""
    if std > 0:
        generator = torch.Generator(hidden.device).manual_seed(seed)
        hidden.add_(torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=hidden.dtype), alpha=std)
    return hidden


# ======================================================================================================================
# 7. Guard. In: the tensors of a stage. Out: nothing, or the first number that is not finite: named, and dumped.
# ======================================================================================================================
# The stages in order: captured layer and packed (on a target); received, drafter input, drafter output, loss and gradient
# (on a drafter). What always runs is one norm a stage, read where the host waits anyway. Only when it is not finite is
# anything searched, copied or written.


def largest(*tensors: Optional[Tensor]) -> Tensor:
    """The largest magnitude among tensors (None: left out), fp32 []; NaN or inf where a value is. No copy, no wait."""
    norms = [torch.linalg.vector_norm(t.detach(), math.inf).float() for t in tensors if t is not None]
    return norms[0] if len(norms) == 1 else torch.stack(norms).max()


def first_nonfinite(rows: Tensor) -> Optional[tuple[int, int, int]]:
    """(row, element, how many there are) of the first value of [n, width] that is not finite, or None. Waits."""
    bad = ~torch.isfinite(rows)
    count = int(bad.sum())
    return (*divmod(int(bad.flatten().to(torch.uint8).argmax()), rows.shape[1]), count) if count else None


@dataclass
class Finding:
    """The first value of a stage that is not finite. None where a stage has no such place."""

    stage: str
    rank: str
    m: int
    step: int  # from 0
    value: str  # nan, inf or -inf
    count: int = 1  # how many of the searched tensor are not finite
    layer: Optional[int] = None
    document: Optional[int] = None  # index among the tokenised documents
    source_row: Optional[int] = None  # of the data files, counted from 0 over all of them, blank lines left out
    files: tuple[str, ...] = ()
    token: Optional[int] = None  # position in the document; of a block, its anchor's
    slot: Optional[int] = None  # within a block of the drafter
    element: Optional[int] = None  # of the row

    def line(self) -> str:
        places = [f"{name} {value}" for name, value in (
            ("document", self.document), ("token", self.token), ("slot", self.slot), ("element", self.element),
        ) if value is not None]  # fmt: skip
        if self.source_row is not None:
            places.append(f"source row {self.source_row} (from 0) of {', '.join(self.files)}")
        where = f" at {', '.join(places)}" if places else ""
        more = f" and {self.count - 1:,} more" if self.count > 1 else ""
        return (
            f"micro-batch {self.m} (step {self.step + 1}): {self.stage} is not finite on {self.rank}: "
            f"{self.value}{where}{more}"
        )


class StageFlags:
    """Whether the stages of one micro-batch are finite: told by the device, read by the host later.

    The watched tensors are kept until then, so that the first bad value can be looked up.
    """

    def __init__(self):
        self.stages: list[tuple[str, list[Optional[Tensor]]]] = []
        self.norms: list[Tensor] = []

    def watch(self, stage: str, *tensors: Optional[Tensor]) -> Tensor:
        """Note a stage, in order; returns whether it is bad: bool [], on the device."""
        self.stages.append((stage, [t if t is None else t.detach() for t in tensors]))
        self.norms.append(largest(*tensors))
        return ~torch.isfinite(self.norms[-1])

    def send(self) -> None:
        """All stages are noted: start the flags' way to the host."""
        self.host, self.ready = to_host(torch.stack(self.norms))

    def first_bad(self) -> Optional[tuple[str, list[Optional[Tensor]]]]:
        """(stage, its tensors) of the first one that is not finite, or None; waits until the flags are there."""
        if self.ready is not None:
            self.ready.synchronize()
        finite = torch.isfinite(self.host).tolist()
        return None if all(finite) else self.stages[finite.index(False)]


class Guard:
    """Finds the first value of a micro-batch that is not finite, dumps the micro-batch, and ends the run or reports it.

    `drafter_weights`, set by a drafter that holds them whole, gives a dump the weights that were used.
    """

    MAX_DUMPS = 8  # per rank and start: a dump may be large

    def __init__(self, args: Arguments, topology: Topology, planner: Planner, config):
        self.args, self.rank, self.planner, self.config = args, str(topology), planner, config
        self.skips = args.run.on_nonfinite == "skip"
        self.drafter_weights = lambda: None
        self.dumps = 0

    def named(self, layers: list[Tensor], last: Optional[Tensor]) -> list[tuple[int, Tensor]]:
        """[(layer id, rows)] of the captured layers and, where there is one, the target's last."""
        named = list(zip(self.config.target_layer_ids, layers))
        return named if last is None else [*named, (self.config.num_target_layers - 1, last)]

    def finding(self, stage: str, plan: BatchPlan, value: str, **place) -> Finding:
        return Finding(stage, self.rank, plan.m, self.planner.locate(plan.m)[0], value, **place)

    def find(self, stage: str, plan: BatchPlan, layers: Iterable[tuple[Optional[int], Tensor]]) -> Optional[Finding]:
        """The first value that is not finite among [(layer id or None, [rows, width])], or None.

        Rows are those of the plan; for the stage "drafter output" the slots of its blocks; for the loss there are none.
        """
        for layer, rows in layers:
            if found := first_nonfinite(rows):
                row, element, count = found
                place = {} if stage == "loss" else {"element": element} | self._place(stage, plan, row)
                return self.finding(stage, plan, str(float(rows[row, element])), count=count, layer=layer, **place)
        return None

    def must_find(self, stage: str, plan: BatchPlan, layers: Iterable[tuple[Optional[int], Tensor]]) -> Finding:
        """`find` in a stage whose norm was not finite."""
        gone = "nan, but finite when searched: its memory was written to in between"
        return self.find(stage, plan, layers) or self.finding(stage, plan, gone, count=0)

    def _place(self, stage: str, plan: BatchPlan, row: int) -> dict:
        """Where a row (of a block's slots: its anchor's) comes from, as fields of a Finding."""
        place = {}
        if stage == "drafter output":
            block, place["slot"] = divmod(row, self.config.block_size)
            row = int(plan.anchor_rows[block])
        if plan.document_ids[row] < 0:
            return place  # the padded tail belongs to no document
        held_out = self.planner.locate(plan.m)[1] >= self.planner.micro_batches_per_step
        documents = self.planner.held_out if held_out else self.planner.documents
        paths = self.args.data.eval_data if held_out else self.args.data.train_data
        document = int(plan.documents[plan.document_ids[row]])
        return place | {"document": document, "token": int(plan.position_ids[row]),
                        "source_row": int(documents.rows[document]), "files": tuple(paths or [str(DEMO_DATA)])}  # fmt: skip

    def find_on_target(self, plan: BatchPlan, shots, layers: list[Tensor], last: Optional[Tensor]) -> Finding:
        """What a payload that is not finite comes from: the captured layers' real rows in order, else the packing."""
        for layer in sorted(shots[0][0].captured):
            rows = [shot.captured[layer].flatten(0, 1)[shot.real_rows(plan.lengths[documents])]
                    for shot, documents in shots]  # fmt: skip
            if finding := self.find(f"captured layer {layer}", plan, [(layer, torch.cat(rows))]):
                return finding
        return self.must_find("packed", plan, self.named(layers, last))

    def find_on_drafter(self, stage: str, plan: BatchPlan, tensors: list[Optional[Tensor]]) -> Finding:
        """The finding of a stage that `StageFlags` told to be bad."""
        if stage == "drafter input":
            features, last = tensors
            parts = self.named(list(features.split(self.config.hidden_size, dim=1)), last)
        else:
            parts = [(None, tensors[0].reshape(-1, tensors[0].shape[-1] if tensors[0].dim() else 1))]
        return self.must_find(stage, plan, parts)

    def report(self, finding: Finding, plan: BatchPlan, states: list[tuple[int, Tensor]] = (), features=None) -> None:
        """Dump the micro-batch, then raise NonFiniteError, or with --on-nonfinite skip print the line.

        states: its hidden states as this rank has them, see `named` · features: the drafter's input, where it is that
        """
        try:
            path = self._dump(finding, plan, states, features)
            kept = f"kept in {path}" if path else f"not kept, as {self.MAX_DUMPS} others were"
        except Exception as error:  # a full disk, say: the finding matters more
            kept = f"not kept ({first_line(error)})"
        if not self.skips:
            raise NonFiniteError(f"{finding.line()}; {kept}")
        print(f"[{self.rank}] skipped: {finding.line()}; {kept}", flush=True)

    def _dump(self, finding: Finding, plan: BatchPlan, states, features: Optional[Tensor]) -> Optional[Path]:
        """Write nonfinite/m-NNNNNNNN/: dump.json, tensors.safetensors and, where whole, drafter.safetensors."""
        if self.dumps == self.MAX_DUMPS:
            return None
        self.dumps += 1
        folder = Path(self.args.run.output_dir) / "nonfinite" / f"m-{plan.m:08d}"
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        plan_values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
        numbers = {name: value for name, value in plan_values.items() if not isinstance(value, np.ndarray)}
        count = len(self.config.target_layer_ids)
        tensors = {f"plan.{name}": torch.from_numpy(plan_values[name]) for name in plan_values.keys() - numbers.keys()}
        tensors |= {f"layer.{layer}": rows for layer, rows in states[:count]}
        tensors |= {"verifier_last": rows for _, rows in states[count:]}
        tensors |= {} if features is None else {"features": features}
        tensors = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        write_tensors(partial / "tensors.safetensors", tensors)
        of_drafter = ("drafter input", "drafter output", "loss", "gradient")
        weights = self.drafter_weights() if finding.stage in of_drafter else None
        if weights is not None:
            write_tensors(partial / "drafter.safetensors", weights)
        checkpoint = None if weights is not None else read_pointer(Path(self.args.run.output_dir) / "checkpoints")
        about = {
            "finding": dataclasses.asdict(finding), "plan": numbers, "settings": self.args.flat(),
            "drafter": self.config.to_json(), "drafter_weights": "drafter.safetensors" if weights else checkpoint,
            "versions": {"torch": torch.__version__}, "cuda": torch.cuda.is_available(),
        }  # fmt: skip
        write_json(partial / "dump.json", about)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder


# The faults that --inject-fault knows, and the roles that meet each: the first unless a rank is named.
FAULTS = {"nan-layer": ("target",), "nan-weight": ("drafter",), "early-release": ("drafter", "target"),
          "short-payload": ("target",), "stall": ("target", "drafter"), "die": ("target", "drafter"),
          "oom": ("target", "drafter"), "slow-save": ("drafter",)}  # fmt: skip


def parse_fault(text: Optional[str]) -> Optional[tuple[str, int, Optional[int]]]:
    """(kind, m, global rank or None) of --inject-fault; None without one. Raises UserError."""
    if text is None:
        return None
    found = re.fullmatch(r"([a-z-]+)@(\d+)(?::(\d+))?", text)
    if not found or found[1] not in FAULTS:
        raise UserError(f"--inject-fault {text}: expected KIND@M or KIND@M:RANK; kinds: {', '.join(FAULTS)}")
    return found[1], int(found[2]), None if found[3] is None else int(found[3])


class FaultInjector:
    """Breaks one micro-batch on one rank on purpose: `--inject-fault`.

    Raises UserError for a rank that never meets it.
    """

    def __init__(self, args: PipelineArguments, topology: Topology):
        self.kind, self.m, self.timeout_s = None, -1, args.transport_timeout
        if (fault := parse_fault(args.inject_fault)) is None:
            return
        kind, m, rank = fault
        numbers = {"target": topology.target_of(m), "drafter": topology.drafter_of(m)}
        can = [topology.global_rank(role, numbers[role]) for role in FAULTS[kind]]
        if rank is not None and rank not in can:
            ranks = " or ".join(map(str, sorted(can)))
            raise UserError(f"--inject-fault {args.inject_fault}: on this run it can strike rank {ranks}")
        if topology.rank == (can[0] if rank is None else rank):  # on all others: no kind, which is never due
            self.kind, self.m = kind, m

    def check_end(self, end_m: int) -> None:
        """Raise UserError where the run ends before the fault strikes."""
        if self.m >= end_m:
            raise UserError(f"--inject-fault {self.kind}@{self.m}: the run ends with micro-batch {end_m - 1}")

    def due(self, kind: str, m: int) -> bool:
        return (self.kind, self.m) == (kind, m)

    def before_forward(self, m: int, device: torch.device) -> None:
        """On either role, before it works on m: stall, die or oom."""
        if self.due("stall", m):
            time.sleep(10 * self.timeout_s)
        if self.due("die", m):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due("oom", m):
            torch.empty(2**50, dtype=torch.uint8, device=device)

    def after_capture(self, shots, plan: BatchPlan) -> None:
        """nan-layer: in the middle captured layer, the last token of the longest document."""
        if self.due("nan-layer", plan.m):
            capture = shots[0][0]
            layer = capture.fc_layer_ids[len(capture.fc_layer_ids) // 2]
            capture.captured[layer][0, plan.lengths[0] - 1, 3] = math.nan

    def before_drafter(self, drafter: nn.Module, m: int) -> None:
        """nan-weight: the first entry of the drafter's fc (of this rank's part of it, under ZeRO 3)."""
        if self.due("nan-weight", m):
            weight = drafter.fc.weight
            getattr(weight, "ds_tensor", weight.data).view(-1)[0] = math.nan

    def release_early(self, ring, slot, m: int):
        """early-release: `slot` goes back to the ring while the returned alias of it, same memory, is still to be read.

        The next owner finds an event that nobody recorded, so it waits for nothing. The poison, or else the next owner's
        data, is there before the reader, which is held up for a second then. (A target packs and sends on one stream, in
        order: on its slots only the poison shows.)
        """
        if not self.due("early-release", m):
            return slot
        alias = copy.copy(slot)
        alias.poison = lambda: None  # the memory is not its own any more when it is released
        if slot.in_use is not None:
            slot.in_use = torch.cuda.Event()
        if ring.poison:
            slot.poison()
        with ring.changed:
            slot.owner = "free"
            ring.changed.notify_all()
        if not ring.poison:
            time.sleep(1.0) if slot.in_use is None else torch.cuda._sleep(2 * 10**9)
        return alias

    def before_save(self, last_m: int) -> None:
        """slow-save: the first save after m."""
        if self.kind == "slow-save" and last_m >= self.m:
            self.kind = None
            time.sleep(1.5 * self.timeout_s)


# ======================================================================================================================
# 8. Transport. In: captured layers on a target rank. Out: the same rows in a slot of a drafter rank.
# ======================================================================================================================
# For every micro-batch: the target announces it with a header, the drafter answers with a credit once it has a free
# slot, then both post the payload. So no NCCL kernel waits on the device for the other side. A micro-batch that is not
# finite is announced with BAD, and nothing follows. A pair's stream ends with END (from the target: no more to come) or
# STOP (from the drafter, in place of a credit). Both sides go through their micro-batches in ascending order, the end
# included, so no cycle of waits can close.
#
# Every message ends with a mark of its micro-batch, since neither backend reports one that is too short: gloo leaves the
# rest as it was; over NCCL a run with half a payload went on as if nothing were (two H200s), other finite numbers in its
# place.

MAGIC, PROTOCOL = 0x44464C415348, 3
ANNOUNCE, END, BAD = 1, 2, 5
GRANT, STOP = 3, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MARK_BYTES = 8  # the end mark of a message, an int64


@dataclass
class Header:
    """What a target says before a payload: int64 on the wire, in this order. Times in microseconds, for the monitor."""

    magic: int = MAGIC
    protocol: int = PROTOCOL
    token: int = 0  # of the run, see `Fabric.introduce`
    status: int = ANNOUNCE
    m: int = 0
    tokens: int = 0
    width: int = 0  # K * H
    dtype: int = 0  # index into DTYPES
    split: int = 0
    last: int = 0  # 1: verifier_last follows
    checksum: int = 0
    stop_requested: int = 0  # a signal reached the target
    forward_us: int = 0
    pack_us: int = 0
    wait_us: int = 0

    def to_tensor(self) -> Tensor:
        return torch.tensor(dataclasses.astuple(self), dtype=torch.int64)

    @classmethod
    def empty_tensor(cls) -> Tensor:
        return torch.zeros(len(dataclasses.fields(cls)), dtype=torch.int64)

    @classmethod
    def parse(cls, words: Tensor, token: int, sender: str) -> "Header":
        """The header that int64 words hold. Raises TransportError where they hold none, or one of another run."""
        if words.shape != cls.empty_tensor().shape:
            raise TransportError(f"{sender} sent no valid header ({words.numel()} words)")
        header = cls(*words.tolist())
        if (header.magic, header.protocol) != (MAGIC, PROTOCOL):
            raise TransportError(f"{sender} sent no valid header (magic {header.magic:#x}, expected {MAGIC:#x})")
        if header.token != token:
            raise TransportError(f"{sender} sent a header without this run's token")
        allowed = {"status": (ANNOUNCE, END, BAD), "dtype": range(len(DTYPES))}
        allowed |= dict.fromkeys(("split", "last", "stop_requested"), range(2))
        for name, value in vars(header).items():
            if value not in allowed.get(name, range(2**62)):
                raise TransportError(f"{sender} sent no valid header ({name} {value})")
        return header


def checksum(parts: Iterable[Tensor]) -> int:
    """Position-dependent sum over the 16- or 32-bit words of tensors, in chunks: 32 bytes a word. Waits for the device."""
    total = 0
    for part in parts:
        for words in part.flatten().view(torch.int16 if part.itemsize == 2 else torch.int32).split(1 << 22):
            places = torch.arange(1, len(words) + 1, device=words.device) % 65521
            total = (total * 31 + int((words.to(torch.int64) * places).sum())) % 2**62
    return total


def message_bytes(payload_bytes: int) -> int:
    """The length of a message: the payload, filled up to whole marks, and the end mark."""
    return (-(-payload_bytes // MARK_BYTES) + 1) * MARK_BYTES


class Slot:
    """Memory for the hidden states of one micro-batch. It has one owner at a time.

    `hidden` holds the captured layers, `last` the target's last one or None; each in memory with room for an end mark.
    `staged`: the payload travels through pinned host memory, for ranks that share a GPU.
    """

    def __init__(self, number: int, tokens: int, num_layers: int, hidden_size: int, with_last: bool, dtype, device,
                 staged: bool = False):  # fmt: skip
        self.number, self.tokens, self.num_layers, self.hidden_size = number, tokens, num_layers, hidden_size
        self.owner = "free"
        sizes = [dtype.itemsize * tokens * hidden_size * layers for layers in ([num_layers, 1] if with_last else [num_layers])]
        self.memory = [torch.zeros(message_bytes(size), dtype=torch.uint8, device=device) for size in sizes]
        parts = [memory[:size].view(dtype) for memory, size in zip(self.memory, sizes)]
        self.hidden, self.last = parts if with_last else (*parts, None)
        self.in_use = torch.cuda.Event() if torch.device(device).type == "cuda" else None  # the owner's last kernel
        whole = self.messages(tokens) if staged else []
        self.host = [torch.empty_like(part, device="cpu", pin_memory=self.in_use is not None) for part in whole]

    def payload(self, n: int) -> list[Tensor]:
        """The memory that n tokens fill: the captured layers' and, where wanted, verifier_last's."""
        parts = [self.hidden[: n * self.num_layers * self.hidden_size]]
        return parts if self.last is None else [*parts, self.last[: n * self.hidden_size]]

    def joined(self, n: int) -> Tensor:
        """The packed form: [n, K*H]."""
        return self.payload(n)[0].view(n, -1)

    def layers(self, n: int, split: bool) -> list[Tensor]:
        """K views [n, H]: tensors laid end to end if split, else columns of the packed form."""
        if split:
            return list(self.payload(n)[0].view(self.num_layers, n, -1))
        return list(self.joined(n).split(self.hidden_size, dim=1))

    def verifier_last(self, n: int) -> Optional[Tensor]:
        return None if self.last is None else self.payload(n)[1].view(n, -1)

    def poison(self) -> None:
        """Fill everything with NaN."""
        for memory in self.payload(self.tokens):
            memory.fill_(math.nan)

    def header(self, m: int, tokens: int, split: bool, **more: int) -> Header:
        """What announces micro-batch m in a slot like this one. more: the fields that do not follow from the plan."""
        return Header(
            m=m, tokens=tokens, width=self.num_layers * self.hidden_size, dtype=DTYPES.index(self.hidden.dtype),
            split=int(split), last=int(self.last is not None), **more,
        )  # fmt: skip

    def messages(self, n: int) -> list[Tensor]:
        """The payload for n tokens and an end mark, as bytes: one message, two with verifier_last."""
        return [memory[: message_bytes(part.nbytes)] for memory, part in zip(self.memory, self.payload(n))]

    def end_marks(self, n: int) -> list[Tensor]:
        """The end mark of each message: int64 [1]."""
        return [message[-MARK_BYTES:].view(torch.int64) for message in self.messages(n)]

    def wire(self, n: int) -> list[Tensor]:
        """What is sent or received for n tokens: the payload itself, or its host copy."""
        return [host[: len(part)] for host, part in zip(self.host, self.messages(n))] or self.messages(n)

    def stage_out(self, n: int) -> None:
        """Fill the host copy, if there is one, before sending."""
        for host, part in zip(self.host, self.messages(n)):
            host[: len(part)].copy_(part)

    def stage_in(self, n: int) -> None:
        """Take over the host copy, if there is one, after receiving."""
        for host, part in zip(self.host, self.messages(n)):
            part.copy_(host[: len(part)], non_blocking=True)

    def checksum(self, n: int) -> int:
        return checksum(self.payload(n))


class SlotRing:
    """A fixed set of slots and who owns them. A slot goes free only after its owner's kernels are done."""

    def __init__(self, count: int, poison: bool = False, **slot_shape):
        self.slots = [Slot(i, **slot_shape) for i in range(count)]
        self.poison = poison  # free slots hold NaN
        for slot in self.slots if poison else ():
            slot.poison()
        self.changed = threading.Condition()
        self.error: Optional[BaseException] = None
        self.closing = False

    def acquire(self, owner: str) -> Optional[Slot]:
        """The next free slot for `owner`, waiting for one; None once the ring is closing.

        Raises the error that stopped the other thread.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._free() or self.error or self.closing)
            if self.error:
                raise self.error
            if self.closing:
                return None
            slot = self._free()
            slot.owner = owner
        if slot.in_use is not None:
            slot.in_use.synchronize()
        return slot

    def hand_over(self, slot: Slot, giver: str, taker: str) -> None:
        """Change the owner. On CUDA the giver's work on the current stream is recorded as what the taker waits for."""
        if slot.owner != giver:
            raise RuntimeError(f"slot {slot.number} belongs to {slot.owner}, not to {giver}")
        if self.poison and taker == "free":
            slot.poison()
        if slot.in_use is not None:
            slot.in_use.record()
        with self.changed:
            slot.owner = taker
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake and fail whoever waits for a slot."""
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits for a slot: none will be needed."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def _free(self) -> Optional[Slot]:
        return next((slot for slot in self.slots if slot.owner == "free"), None)


def post(transfer, message: Tensor, link: Link, m: int, what: str) -> None:
    """One send or receive on a link, to its end. Raises TransportError naming the peer, m and what was awaited."""
    what = f"{what} for micro-batch {m}, peer {link.peer_name}"
    try:
        with link.board.doing(what, [link.peer_rank]):
            transfer([message], link.peer, 0).wait()
    except RuntimeError as error:
        raise TransportError(f"{what}: {first_line(error)}") from None


def side_stream(device: torch.device):
    """A stream for transfers beside the compute stream; on the CPU, nothing."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


@dataclass
class SendJob:
    """One micro-batch on its way: the captured layers stay alive here until the pack kernels are done."""

    plan: BatchPlan
    shots: list[tuple[HookCapture, slice]]  # one per forward pass, with the documents it covered
    slot: Slot
    forward: Span
    wait_ms: float  # how long the target waited for the slot


class HiddenStateSender:
    """Target side: packs captured layers into a slot and sends it, in line or on a thread and stream of its own."""

    def __init__(self, fabric: Fabric, ring: SlotRing, args: PipelineArguments, stop_requested: threading.Event,
                 guard: Guard, faults: FaultInjector):  # fmt: skip
        self.fabric, self.ring, self.args, self.stop_requested = fabric, ring, args, stop_requested
        self.device, self.guard, self.faults = fabric.device, guard, faults
        self.ended: set[int] = set()  # drafters whose stream is over
        self.stopping = False  # a drafter said STOP: the run ends early
        self.jobs: queue.Queue = queue.Queue()
        self.thread = None
        if args.async_postprocess:
            self.thread = threading.Thread(target=self._run, name="postprocess", daemon=True)
            self.thread.start()

    def submit(self, action, argument) -> None:
        """`send` a micro-batch or `end_stream`, in order of m. Raises what went wrong with an earlier one."""
        if self.ring.error:
            raise self.ring.error
        if self.thread is None:
            action(argument)
        else:
            self.jobs.put((action, argument))

    def finish(self) -> None:
        """Wait until everything submitted is sent."""
        if self.thread is not None:
            self.jobs.put(None)
            self.thread.join()
        if self.ring.error:
            raise self.ring.error

    def _run(self) -> None:
        try:
            with side_stream(self.device):
                while (job := self.jobs.get()) is not None:
                    action, argument = job
                    action(argument)
        except BaseException as error:  # re-raised on the main thread by submit() or finish()
            self.ring.fail(error)

    def send(self, job: SendJob) -> None:
        """Pack and announce a micro-batch; send it once the drafter grants it. After a STOP, only end its stream."""
        m, n, slot = job.plan.m, job.plan.num_tokens, job.slot
        if self.stopping:
            self.end_stream(m)
            self.ring.hand_over(slot, "filling", "free")
            return
        link = self.fabric.links[self.fabric.topology.drafter_of(m)]
        header = self._pack(job)
        self._send_header(link, header)
        if header.status != BAD and self._await_credit(link, m):
            slot = self.faults.release_early(self.ring, slot, m)
            for mark in slot.end_marks(n):
                mark.fill_(self.fabric.token ^ m)
            slot.stage_out(n)
            for message in slot.wire(n):
                message = message[: len(message) // 2] if self.faults.due("short-payload", m) else message
                post(link.payload.send, message, link, m, "sending the payload")
        self.ring.hand_over(slot, "sending", "free")

    def end_stream(self, m: int) -> None:
        """Tell the drafter that awaits m that nothing more comes, unless it knows."""
        drafter = self.fabric.topology.drafter_of(m)
        if drafter not in self.ended:
            self._send_header(self.fabric.links[drafter], Header(status=END, m=m))
            self.ended.add(drafter)

    def _pack(self, job: SendJob) -> Header:
        """Fill the slot from the captured layers and let those go; returns the header that announces it.

        Where a number is not finite, the guard raises NonFiniteError or has it skipped: the header then says BAD.
        """
        plan, slot, split = job.plan, job.slot, self.args.split_fc_layers
        n = plan.num_tokens
        job.forward.wait()
        span = Span(self.device)
        layers, last = slot.layers(n, split), slot.verifier_last(n)
        pack_shots(plan, job.shots, layers, last)
        if not split:
            add_noise_(slot.joined(n), plan.noise_std, plan.noise_seed)
        norm = largest(*slot.payload(n))
        pack_ms = span.end().ms()  # also: the pack kernels are done, so the captured layers may go
        if not (finite := math.isfinite(norm)):
            finding = self.guard.find_on_target(plan, job.shots, layers, last)
            self.guard.report(finding, plan, self.guard.named(layers, last))
        job.shots.clear()
        self.ring.hand_over(slot, "filling", "sending")
        return slot.header(
            plan.m, n, split, status=ANNOUNCE if finite else BAD, stop_requested=int(self.stop_requested.is_set()),
            checksum=slot.checksum(n) if self.args.verify_transfers else 0,
            forward_us=int(job.forward.ms() * 1e3), pack_us=int(pack_ms * 1e3), wait_us=int(job.wait_ms * 1e3),
        )  # fmt: skip

    def _send_header(self, link: Link, header: Header) -> None:
        header.token = self.fabric.token
        post(link.control.send, header.to_tensor(), link, header.m, "sending the header")

    def _await_credit(self, link: Link, m: int) -> bool:
        """Whether the drafter grants m; where it does not, the run ends early."""
        credit = torch.zeros(3, dtype=torch.int64)
        post(link.control.recv, credit, link, m, "waiting for the credit")
        token, answer, granted_m = credit.tolist()
        if token != self.fabric.token:
            raise TransportError(f"{link.peer_name} answered micro-batch {m} without this run's token")
        if granted_m != m or answer not in (GRANT, STOP):
            raise TransportError(f"{link.peer_name} answered {answer} for micro-batch {granted_m}, expected {m}")
        if answer == STOP:
            self.ended.add(self.fabric.topology.drafter_of(m))
            self.stopping = True
        return answer == GRANT


class HiddenStateReceiver:
    """Drafter side: receives this rank's micro-batches in order of m, in line or on a thread ahead of the training."""

    def __init__(self, fabric: Fabric, ring: SlotRing, planner: Planner, first_m: int, args: PipelineArguments,
                 guard: Guard):  # fmt: skip
        self.fabric, self.ring, self.planner, self.args, self.guard = fabric, ring, planner, args, guard
        topology = fabric.topology
        self.numbers = itertools.count(first_m + topology.role_rank, topology.num_drafters)
        self.ended: set[int] = set()  # targets whose stream is over
        self.stopping = threading.Event()
        self.target_asked_stop = threading.Event()
        # what the targets needed for the micro-batches that were taken from here: sums of ms, and how many they are
        self.target_times: dict[str, float] = defaultdict(float)
        self.ready: queue.Queue = queue.Queue()
        self.stream = side_stream(fabric.device)
        self.thread = None
        if args.async_postprocess:
            self.thread = threading.Thread(target=self._run, name="receiver", daemon=True)
            self.thread.start()

    def get(self, m: int) -> Optional[Slot]:
        """The slot that holds micro-batch m, complete and finite; None where m was not finite and is to be skipped.

        Raises the error that stopped the receiver.
        """
        if self.thread is None:
            with self.stream:
                self._exchange()
        with self.fabric.board.doing(f"waiting for micro-batch {m}", HELPER):
            received_m, slot, times = self.ready.get()
        if isinstance(received_m, BaseException):
            raise received_m
        for name, value in times.items():
            self.target_times[name] += value
        if received_m != m:
            raise RuntimeError(f"micro-batch {received_m} came in place of {m}")
        if slot is not None:
            self.ring.hand_over(slot, "receiving", "training")
        return slot

    def empty_states(self) -> tuple[Tensor, Optional[Tensor]]:
        """(features, verifier_last) full of zeros, in place of a micro-batch for which `get` gave no slot."""
        slot = self.ring.slots[0]
        last = slot.verifier_last(slot.tokens)
        return torch.zeros_like(slot.joined(slot.tokens)), None if last is None else torch.zeros_like(last)

    def release(self, slot: Slot) -> None:
        """Give back a slot; its memory is reused only after the kernels enqueued so far are done."""
        self.ring.hand_over(slot, "training", "free")

    def finish(self) -> None:
        """Answer what targets still announce with STOP, until all their streams are over."""
        self.stopping.set()
        self.ring.close()
        self._run() if self.thread is None else self.thread.join()
        if self.ring.error:
            raise self.ring.error

    def _run(self) -> None:
        try:
            with self.stream:
                while len(self.ended) < len(self.fabric.links):
                    self._exchange()
        except BaseException as error:  # re-raised on the main thread by get() or finish()
            self.ring.error = error
            self.ready.put((error, None, {}))

    def _exchange(self) -> None:
        """One header, and the payload it announces."""
        m = next(self.numbers)
        target = self.fabric.topology.target_of(m)
        if target in self.ended:
            return
        link = self.fabric.links[target]
        header = self._receive_header(link, m)
        if header.status == END:
            self.ended.add(target)
            return
        if header.status == BAD:
            self.ready.put((m, None, {}))
            return
        slot = None
        if m < self.planner.end_m and not self.stopping.is_set():
            slot = self.ring.acquire("receiving")
        answer = torch.tensor([self.fabric.token, STOP if slot is None else GRANT, m], dtype=torch.int64)
        post(link.control.send, answer, link, m, "sending the credit")
        if slot is None:
            self.ended.add(target)
            return
        finite = self._receive_payload(link, m, header, slot)
        if not finite:
            self.ring.hand_over(slot, "receiving", "free")
        times = {name: getattr(header, f"{name}_us") / 1e3 for name in ("forward", "pack", "wait")} | {"micro_batches": 1}
        self.ready.put((m, slot if finite else None, times))

    def _receive_payload(self, link: Link, m: int, header: Header, slot: Slot) -> bool:
        """Fill the slot; True when all of it is finite, as it was when the target sent it."""
        n = header.tokens
        for message in slot.wire(n):
            post(link.payload.recv, message, link, m, "receiving the payload")
        slot.stage_in(n)
        norm = largest(*slot.payload(n))
        if slot.in_use is not None:
            slot.in_use.record()
            with link.board.doing(f"receiving the payload for micro-batch {m}, peer {link.peer_name}", [link.peer_rank]):
                slot.in_use.synchronize()
        if any(int(mark) != self.fabric.token ^ m for mark in slot.end_marks(n)):
            raise TransportError(
                f"micro-batch {m} from {link.peer_name}: the payload does not end with this micro-batch's mark: "
                "shorter than announced, or another's"
            )
        if self.args.verify_transfers and slot.checksum(n) != header.checksum:
            raise TransportError(f"micro-batch {m} from {link.peer_name}: checksum differs, the payload was changed")
        if not (finite := math.isfinite(norm)):
            plan, split = self.planner.plan(m), self.args.split_fc_layers
            states = self.guard.named(slot.layers(n, split), slot.verifier_last(n))
            self.guard.report(self.guard.must_find("received", plan, states), plan, states)
        return finite

    def _receive_header(self, link: Link, m: int) -> Header:
        """The next header, checked against the plan."""
        words = Header.empty_tensor()
        post(link.control.recv, words, link, m, "waiting for the header")
        header = Header.parse(words, self.fabric.token, link.peer_name)
        if header.stop_requested:
            self.target_asked_stop.set()
        if header.status == END:
            return header
        expected = self.ring.slots[0].header(m, self.planner.plan(m).num_tokens, self.args.split_fc_layers)
        for name in ("m", "tokens", "width", "dtype", "split", "last"):
            got, want = getattr(header, name), getattr(expected, name)
            if got != want:
                raise TransportError(f"header of micro-batch {m} from {link.peer_name}: {name} is {got}, expected {want}")
        return header


# ======================================================================================================================
# 9. Target rank. In: the plan of every m that is this rank's. Out: hidden states on their way to the drafters.
# ======================================================================================================================


def length_buckets(lengths: np.ndarray, pass_cost: float) -> list[slice]:
    """Cut documents, longest first, into the cheapest forward passes: each costs its padded tokens and `pass_cost` more."""
    costs, begins = np.zeros(len(lengths) + 1), [0]
    for end in range(1, len(lengths) + 1):  # costs[end]: the cheapest way to lay out the first `end` documents
        options = costs[:end] + (end - np.arange(end)) * lengths[:end] + pass_cost
        begins.append(int(options.argmin()))
        costs[end] = options[begins[end]]
    buckets, end = [], len(lengths)
    while end > 0:
        buckets.insert(0, slice(begins[end], end))
        end = begins[end]
    return buckets


def forward_pass_cost(layers: nn.ModuleList, device: torch.device, compiled: bool) -> float:
    """What starting one forward pass costs, in tokens of arithmetic. A function of the model and the settings alone, so
    that all target ranks cut alike.

    On a GPU: 4 ms to launch a layer (139 ms for 36 layers, transformers on an H200's host), 1 ms a compiled one (32 ms for
    28 layers of SmolLM2-135M, other jobs beside it), against 2 FLOP a weight and token at 500 TFLOP/s.
    """
    if device.type == "cpu":
        return 64
    weights = sum(p.numel() for p in layers.parameters())
    return len(layers) * (1e-3 if compiled else 4e-3) * 500e12 / (2 * weights)


FAST_DTYPES = {("cuda", torch.bfloat16), ("cuda", torch.float16)}  # of variable-length attention
PACKED_ATTENTION = "packed_documents"  # our function among transformers' attention implementations
# What models hand to an attention function beside the numbers it computes with.
NO_ARITHMETIC = {"position_ids", "cache", "past_key_values", "cache_position", "use_cache", "output_attentions",
                 "output_hidden_states", "return_dict", "document_positions"}  # fmt: skip


def packed_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, dropout=0.0,
                     sliding_window=None, is_causal=None, bounds=None, extent=None, windows=None, **rest):  # fmt: skip
    """Causal attention within each of the documents laid end to end, as transformers' AttentionInterface calls it.

    query [1, heads, N, D], key and value [1, kv_heads, N, D] -> ([1, N, heads, D], None). bounds, extent: see
    `document_bounds` and `_packed_pass`. windows: a list that collects the windows of the layers. Raises ValueError
    where a model wants something else.
    """
    more = [name for name, x in rest.items() if name not in NO_ARITHMETIC and x is not None and x is not False]
    more += ["a mask"] if attention_mask is not None else []
    more += ["bounds that do not reach it"] if bounds is None else []
    more += ["dropout"] if dropout else []
    more += ["values of another width than keys"] if value.shape[-1] != key.shape[-1] else []
    more += ["heads wider than 256"] if query.shape[-1] > 256 else []
    if more or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"its attention is not the plain causal one ({', '.join(more) or 'not causal'})")
    if windows is not None:
        windows.append(sliding_window)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.dflash.attend_documents(q, k, v, bounds, extent, scale, sliding_window)[None], None


@functools.cache
def register_packed_attention() -> None:
    """Make `packed_attention` known to transformers, and what it calls to torch.

    An operator of our own keeps the number and length of documents out of sight of the compiler, which would compile
    for each anew.
    """
    from transformers import AttentionInterface

    @library.custom_op("dflash::attend_documents", mutates_args=())
    def attend_documents(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, extent: Tensor, scale: float,
                         window: Optional[int]) -> Tensor:  # fmt: skip
        attend = attend_by_kernel if q.is_cuda and q.element_size() == 2 else attend_by_document
        return attend(q, k, v, bounds, extent, scale, window)

    attend_documents.register_fake(lambda q, k, v, bounds, extent, scale, window: q.new_empty(q.shape))
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def attend_by_kernel(q, k, v, bounds, extent, scale: float, window: Optional[int]) -> Tensor:
    """q [N, heads, D], k and v [N, kv_heads, D], fp16 or bf16 on CUDA -> [N, heads, D], by torch's variable-length
    kernel."""
    from torch.nn.attention.varlen import varlen_attn

    count, longest = extent.tolist()
    groups, options = q.shape[1] // k.shape[1], {}
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options = {"enable_gqa": True}
    elif groups > 1:  # torch 2.11
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    left = -1 if window is None or window >= longest else window - 1  # keys before the query's own
    bounds = bounds[: count + 1]
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **options)
    return out.contiguous()


def attend_by_document(q, k, v, bounds, extent, scale: float, window: Optional[int]) -> Tensor:
    """The same on any device and in any dtype, a document at a time."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for start, end in itertools.pairwise(bounds[: int(extent[0]) + 1].tolist()):
        mask = None
        if window is not None and window < end - start:
            rows = torch.arange(end - start, device=q.device)
            back = rows[:, None] - rows
            mask = (back >= 0) & (back < window)
        document = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        states = F.scaled_dot_product_attention(
            *document, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[start:end] = states[0].transpose(0, 1)
    return out


def document_bounds(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Where documents laid end to end in a row of so many tokens begin, and where the last one ends: int32.

    The padding after them is cut into documents of its own, none longer than the longest real one or than 64 tokens, for
    each of which linear attention keeps a state.
    """
    used, longest = int(lengths.sum()), max(int(lengths.max()), 64)
    return np.concatenate([np.cumsum(lengths) - lengths, np.arange(used, tokens, longest), [tokens]]).astype(np.int32)


def expected_windows(config, count: int) -> list[Optional[int]]:
    """The sliding window of those of the first `count` decoder layers that attend, by the text model's config; None: all
    is seen."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    return [window if kind == "sliding_attention" else None for kind in kinds[:count] if kind != "linear_attention"]


def has_state(layer: nn.Module) -> bool:
    """Whether a decoder layer carries something from token to token beside attention: those have a convolution."""
    return count_convolutions(layer) > 0


def count_convolutions(layer: nn.Module) -> int:
    return sum(isinstance(module, nn.Conv1d) for module in layer.modules())


@functools.cache
def linear_attention_kernels() -> Optional[str]:
    """The version of flash-linear-attention that transformers uses, or None: its own PyTorch code."""
    try:
        import fla.ops.gated_delta_rule

        return fla.__version__
    except (ImportError, RuntimeError):
        return None


DELTA_RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"  # what transformers' modeling files call


def delta_rule_code(layer: nn.Module):
    """The modeling file of a layer whose state follows the gated delta rule, as Qwen3-Next's and Qwen3.5's; else None."""
    code = sys.modules[type(layer).__module__]
    known = count_convolutions(layer) == 1 and hasattr(code, DELTA_RULE) and hasattr(code, CONVOLUTION)
    return code if known else None


@functools.cache
def serve_delta_rule(code) -> None:
    """Exchange what a modeling file calls for functions that know of documents laid end to end, and compile in one piece.

    transformers' convolution runs on from one document to the next. Its rule is flash-linear-attention's, which knows
    better; but the compiler would be stopped by it (and with torch 2.11 not meet it: there Dynamo takes itself for an
    export, which gets the slow code). An operator of our own hides it, as `attend_documents` does.
    """
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # kernels that may split a document by what else lies in the row
    rule = getattr(code, DELTA_RULE)
    # The kernels wait for the device to read these bounds, and keep by identity what they made of them: once a pass, then.
    pass_seen = [None, None]  # the last pass's bounds as given, and those of its documents

    @library.custom_op(f"dflash::{code.__name__.replace('.', '_')}", mutates_args=())
    def recur(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normed: bool,
              bounds: Optional[Tensor], extent: Optional[Tensor]) -> Tensor:  # fmt: skip
        inputs, run = (query, key, value, g, beta), functools.partial(rule, use_qk_l2norm_in_kernel=normed)
        if bounds is None:
            return run(*inputs)[0]
        if pass_seen[0] is not bounds:
            pass_seen[:] = bounds, bounds[: int(extent[0]) + 1].long()
        if linear_attention_kernels() is not None:
            return run(*inputs, cu_seqlens=pass_seen[1])[0]
        documents = itertools.pairwise(pass_seen[1].tolist())
        return torch.cat([run(*(x[:, start:end] for x in inputs))[0] for start, end in documents], dim=1)

    recur.register_fake(lambda query, key, value, *_: torch.empty_like(value, memory_format=torch.contiguous_format))

    def gated_delta_rule(query, key, value, g, beta, bounds=None, extent=None, **options):
        cached = options.get("initial_state") is not None or options.get("output_final_state")
        if cached or options.get("cu_seqlens") is not None:  # decoding, or somebody's own way of packing
            return rule(query, key, value, g=g, beta=beta, **options)
        normed = options.get("use_qk_l2norm_in_kernel", False)
        # Laid out by the convolution that computes them; the kernels would copy them.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        return recur(query, key, value, g, beta, normed, bounds, extent), None

    setattr(code, DELTA_RULE, gated_delta_rule)
    setattr(code, CONVOLUTION, convolve_documents)


def convolve_documents(states: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None,
                       document_positions: Optional[Tensor] = None, **_) -> Tensor:  # fmt: skip
    """A causal convolution of each channel by itself: states [rows, channels, N], weight [channels, taps] -> as states.

    document_positions [N]: where each token stands in its document, before which nothing is seen; None: one document a
    row. Sums of shifted products, which compile into what stands around them. (The reference's kernel took 5 % of a
    forward pass of Qwen3.6-27B's shape on an H200.)
    """
    from transformers.activations import ACT2FN

    states = states.transpose(1, 2)  # as the projection before it wrote them, a token's channels side by side
    n, taps = states.shape[1], weight.shape[-1]
    before, total = F.pad(states, (0, 0, taps - 1, 0)), 0.0 if bias is None else bias.float()
    for back in range(taps):
        seen = before[:, taps - 1 - back : taps - 1 - back + n].float()
        if document_positions is not None:
            seen = seen.where(document_positions[:, None] >= back, 0.0)
        total = total + seen * weight[:, taps - 1 - back].float()
    out = total.to(weight.dtype)
    return (out if activation is None else ACT2FN[activation](out)).to(states.dtype).transpose(1, 2)


def turn_convolution(layer: nn.Module) -> None:
    """Lay a convolution's weights [channels, 1, taps] in memory tap by tap, since the kernel that Inductor makes of
    `convolve_documents` works on many channels at once. (0.32 in place of 0.85 ms a layer of Qwen3.6-27B's shape, 8,192
    tokens, an H200.)
    """
    for module in layer.modules():
        if isinstance(module, nn.Conv1d):
            module.weight.data = module.weight.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def relative_error(rows: Tensor, reference: Tensor) -> float:
    """The mean over rows of |row - reference| / |reference|."""
    rows, reference = rows.float(), reference.float()
    return float(((rows - reference).norm(dim=-1) / reference.norm(dim=-1)).mean())


class TargetRunner:
    """The frozen target with its hooks: plan -> captured layers.

    layout, compiled, fp8: see `--target-layout`, `--compile` and `--target-fp8`. Raises UserError where a packed target
    is asked for that cannot be, or fp8 where there is none.
    """

    def __init__(self, model: nn.Module, fc_layer_ids: tuple[int, ...], with_last: bool, device: torch.device,
                 layout: str = "auto", compiled: bool = False, fp8: bool = False):  # fmt: skip
        self.layers = decoder_layers(model)
        last = len(self.layers) - 1 if with_last else None
        self.capture = HookCapture(model, fc_layer_ids, last)
        if not with_last:
            del self.layers[fc_layer_ids[-1] + 1 :]  # nobody reads what the later layers compute
        self.decoder, self.device = model.get_decoder(), device
        self.decoder.norm = nn.Identity()  # hidden states are captured before it
        self.obstacle = "as asked for" if layout == "padded" else self._pack(layout == "packed")
        self.packed = self.obstacle is None
        self.compiled = compiled and device.type == "cuda"
        self.pass_cost = forward_pass_cost(self.layers, device, self.compiled)
        self.fp8_layers, self.fp8_error = self._to_fp8() if fp8 else (0, 0.0)
        if self.compiled:
            self.compile_layers()

    def describe(self) -> str:
        """One line: how documents lie, and what computes them."""
        parts = [f"{len(self.layers)} layers{', compiled' if self.compiled else ''}"]
        parts.append("documents end to end" if self.packed else f"documents padded ({self.obstacle})")
        parts += [f"{self.fp8_layers} linear layers in fp8"] if self.fp8_layers else []
        if any(map(has_state, self.layers)):
            kernels = linear_attention_kernels()
            slow = "linear attention by transformers' PyTorch code: slow, install flash-linear-attention"
            parts.append(slow if kernels is None else f"linear attention by flash-linear-attention {kernels}")
        return "; ".join(parts)

    def compile_layers(self, **options) -> None:
        """Compile every layer's forward: once for all layers alike, and without the hooks, which run outside.

        A packed row always has N tokens. Padded batches vary, so their sizes are left open.
        """
        for layer in self.layers:
            if code := delta_rule_code(layer):
                serve_delta_rule(code)
                turn_convolution(layer)
            if code or not has_state(layer):  # others may loop over the tokens
                layer.forward = compile_repeatably(layer.forward, dynamic=not self.packed, **options)

    def _pack(self, required: bool) -> Optional[str]:
        """Switch the model to packed rows; returns why not, where it stays as it was. Raises UserError if required."""
        obstacle, dtype = self._state_obstacle(required), self.decoder.dtype
        if not required and (self.device.type, dtype) not in FAST_DTYPES:
            name = str(dtype).removeprefix("torch.")
            obstacle = obstacle or f"no fast variable-length attention in {name} on {self.device.type}"
        if obstacle is None:
            before = self.decoder.config._attn_implementation
            register_packed_attention()
            reference = self._trial(packed=False)
            for code in filter(None, map(delta_rule_code, self.layers)):
                serve_delta_rule(code)
            self.decoder.set_attn_implementation(PACKED_ATTENTION)
            if obstacle := self._trial_obstacle(reference):
                self.decoder.set_attn_implementation(before)
        if obstacle is not None and required:
            raise UserError(f"--target-layout packed: not with this target: {obstacle}")
        return obstacle

    def _to_fp8(self) -> tuple[int, float]:
        """Put Float8Linear in the place of linear layers, but for gates, which are small and sensitive. Returns (how many,
        the `relative_error` that it makes in the captured states of random tokens). Raises UserError where it cannot be."""
        before, count = self._trial(self.packed), 0
        for layer in self.layers:
            for parent in list(layer.modules()):
                for name, child in list(parent.named_children()):
                    if type(child) is nn.Linear and Float8Linear.fits(child):
                        setattr(parent, name, Float8Linear(child))
                        count += 1
        if count == 0:
            raise UserError("--target-fp8: this target has no linear layer of its own whose sizes are multiples of 16")
        return count, relative_error(self._trial(self.packed), before)

    def _state_obstacle(self, required: bool) -> Optional[str]:
        kinds = set(getattr(self.decoder.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        states = [layer for layer in self.layers if has_state(layer)]
        if states and all(map(delta_rule_code, states)):
            kinds, states = kinds - {"linear_attention"}, []
            if not required and linear_attention_kernels() is None:
                return "linear attention without flash-linear-attention"  # a document at a time
        if kinds:
            return f"layers of {' and '.join(sorted(kinds))}"
        return "layers with a convolution" if states else None

    def _trial_obstacle(self, reference: Tensor) -> Optional[str]:
        """What goes wrong on two documents packed: that the model wants another attention than there is, that
        some layer goes its own way, that a document changes with its neighbour, or is not what it is when padded."""
        if self.decoder.config._attn_implementation != PACKED_ATTENTION:
            return "its attention cannot be exchanged"
        windows, half = [], self.decoder.dtype.itemsize == 2
        try:
            rows, beside_another = (self._trial(True, first_token, windows=windows) for first_token in (0, 1))
        except (ValueError, TypeError) as error:  # TypeError: a decoder that takes no further arguments
            self.capture.captured = {}  # of the layers before
            return str(error)
        if windows != 2 * expected_windows(self.decoder.config, len(self.layers)):
            return "some layers have attention of their own"
        second = slice(self.trial_lengths[0], None)
        if not relative_error(beside_another[second], rows[second]) <= (1e-2 if half else 1e-4):  # 0 but for experts' batches
            return "documents would not be kept apart"
        if not relative_error(rows, reference) <= (0.1 if half else 1e-3):
            return "it computes something else then"
        return None

    @property
    def trial_lengths(self) -> tuple[int, int]:
        """Tokens of the two documents of a trial. flash-linear-attention chooses its kernels by timing their first call: on
        a row as long as those to come, then."""
        return (3072, 1024) if any(map(delta_rule_code, self.layers)) and linear_attention_kernels() else (24, 8)

    def _trial(self, packed: bool, first_token: int = 0, **keywords) -> Tensor:
        """What is captured of two documents of `trial_lengths`, [their sum, K*H]. keywords: of a packed pass."""
        lengths = np.array(self.trial_lengths)
        token_ids = random_stream(0).integers(0, self.decoder.config.vocab_size - 1, lengths.sum())
        token_ids[: lengths[0]] += first_token
        shot = self._packed_pass(token_ids, lengths, **keywords) if packed else self._padded_pass(token_ids, lengths)
        return shot.get_hidden_states_packed(lengths)[0][0]

    def warm_up(self, planner: Planner, first_m: int, summed: bool = False) -> Optional[int]:
        """Compute the run's first micro-batch and forget it: what compiles or is tuned then does so at start, where the
        others wait for this rank without limit. Returns the checksum of the captured layers if `summed`."""
        if self.compiled and not self.packed:  # compiled by themselves: one row or several, within a window or beyond
            n = planner.tokens
            window = min(filter(None, expected_windows(self.decoder.config, len(self.layers))), default=n)
            lengths = [max(3, min(n // 4, window)), *([window + 1] if window < n else [])]
            for rows, length in itertools.product((2, 1), lengths):
                self._padded_pass(np.zeros(rows * length, np.int64), np.full(rows, length))
        if first_m >= planner.end_m:
            return None
        plan = planner.plan(first_m)
        shots = [(shot, shot.real_rows(plan.lengths[documents])) for shot, documents in self.forward(plan)]
        kept = ((shot.captured[i], rows) for shot, rows in shots for i in shot.fc_layer_ids)
        return checksum(states.flatten(0, 1).index_select(0, rows) for states, rows in kept) if summed else None

    def forward(self, plan: BatchPlan) -> list[tuple[HookCapture, slice]]:
        """Run the documents of a plan: all in one row, or padded within buckets of similar length."""
        if self.packed:
            return [(self._packed_pass(plan.token_ids, plan.lengths), slice(0, len(plan.lengths)))]
        shots, row = [], 0
        for documents in length_buckets(plan.lengths, self.pass_cost):
            lengths = plan.lengths[documents]
            rows = slice(row, row + int(lengths.sum()))
            shots.append((self._padded_pass(plan.token_ids[rows], lengths), documents))
            row = rows.stop
        return shots

    @torch.no_grad()
    def _packed_pass(self, token_ids: np.ndarray, lengths: np.ndarray, **keywords) -> HookCapture:
        """One row [1, N] that begins with documents of these lengths; positions restart in each."""
        tokens, bounds = len(token_ids), document_bounds(lengths, len(token_ids))
        spans = np.diff(bounds)
        positions = np.arange(tokens) - np.repeat(bounds[:-1], spans)
        inputs = torch.from_numpy(np.stack([token_ids, positions]))
        all_bounds = torch.full((tokens + 1,), tokens, dtype=torch.int32)  # of a fixed size, as is everything here
        all_bounds[: len(bounds)] = torch.from_numpy(bounds)
        ids, positions = to_device(inputs, self.device)[:, None]
        self.decoder(
            input_ids=ids, position_ids=positions, use_cache=False, bounds=to_device(all_bounds, self.device),
            extent=torch.tensor([len(spans), spans.max()]),  # on the host: how many, how long
            document_positions=positions[0], **keywords,
        )  # fmt: skip
        shot = self.capture.take()
        shot.end_to_end = True
        return shot

    @torch.no_grad()
    def _padded_pass(self, token_ids: np.ndarray, lengths: np.ndarray) -> HookCapture:
        """One document a row, longest first, padded on the right. Causal layers never let a real token see the padding
        after it, so no mask is needed. (At least 2 columns: a single one would be compiled by itself.)"""
        longest = max(2, int(lengths[0]))
        padded = torch.zeros(len(lengths) * longest, dtype=torch.int64)
        padded[packed_index(lengths, longest)] = torch.from_numpy(token_ids)
        self.decoder(input_ids=to_device(padded.view(len(lengths), -1), self.device), use_cache=False)
        return self.capture.take()


def check_targets_alike(fabric, runner: TargetRunner) -> None:
    """Print how the first target computes. Raises UserError where this one does otherwise: the bits of a micro-batch would
    depend on who computes it."""
    topology, own = fabric.topology, runner.describe()
    first = topology.of(topology.ranks_of["target"][0])
    if topology.rank == first.rank:
        effect = f"; fp8 moves its captured states by {runner.fp8_error:.1%} (of random tokens)" if runner.fp8_layers else ""
        print(f"target: {own}{effect}", flush=True)
        fabric.store.set("target", own)
    wait_for_key(fabric.store, "target", f"[{topology}] waiting for {first} to load the target")
    if (reference := fabric.store.get("target").decode()) != own:
        raise UserError(f"targets would compute differently: {own} here, {reference} on {first}")


def check_targets_round_alike(fabric, captured: Optional[int]) -> None:
    """Warn where this target did not capture what the first one did, bit for bit, of the same micro-batch. (Kernels that
    are chosen by timing them, as those of linear attention are, or other GPUs.)"""
    topology, own = fabric.topology, str(captured)
    first = topology.of(topology.ranks_of["target"][0])
    if topology.rank == first.rank:
        fabric.store.set("target/captured", own)
    wait_for_key(fabric.store, "target/captured", f"[{topology}] waiting for {first} to warm up")
    if fabric.store.get("target/captured").decode() != own:
        print(f"warning: {topology} rounds otherwise than {first}: results depend on the number of targets", flush=True)


def load_runner(args: Arguments, target_config, config, fabric, planner: Planner, first_m: int) -> TargetRunner:
    """This rank's target with its hooks, or its share of one, warmed up; all targets are seen to compute alike."""
    topology, device = fabric.topology, fabric.device
    first = topology.rank == topology.ranks_of["target"][0]
    model = load_target(args.target, target_config, device, topology.target_tp)
    if (warning := check_unproven_target(model, target_config)) and first:
        print(f"warning: {warning}", flush=True)
    if first and any(map(has_state, decoder_layers(model))) and linear_attention_kernels() is not None:
        print("target: flash-linear-attention tunes its kernels, which takes minutes on a new machine", flush=True)
    layout, with_last = args.target.target_layout, args.data.loss == "kl"
    compiled, fp8 = args.pipeline.compile, args.target.target_fp8
    runner = TargetRunner(model, config.target_layer_ids, with_last, device, layout, compiled, fp8)
    check_targets_alike(fabric, runner)
    del model  # the LM head and unread layers go
    compared = topology.role == "target" and topology.num_targets > 1
    captured = runner.warm_up(planner, first_m, compared)
    if compared:
        check_targets_round_alike(fabric, captured)
    return runner


def go_on_together(fabric, m: int, go_on: bool = True) -> bool:
    """What the leader of a sharded target says of micro-batch m, on all its ranks: compute it, or stop before it."""
    if fabric.topology.target_tp == 1:
        return go_on
    word = torch.tensor([int(go_on), m, -m])
    with fabric.board.doing(f"micro-batch {m}, with the other ranks of this target", fabric.topology.shard_peers):
        fabric.role_control.allreduce([word], dist.ReduceOp.MIN).wait()
    if word[1] != -word[2]:
        raise RuntimeError(f"the ranks of a target are at micro-batches {int(word[1])} to {-int(word[2])}")
    return bool(word[0])


def run_target_shard(fabric, planner, runner, first_m) -> None:
    """Compute what this rank's target computes, for the leader, which alone keeps and sends what is captured."""
    for m in fabric.topology.micro_batches_of(fabric.topology.target, first_m):
        if not go_on_together(fabric, m):
            break
        fabric.board.now(f"forward pass of micro-batch {m}")
        runner.forward(planner.plan(m))


def run_target_rank(args, fabric, planner, runner, ring, first_m, stop_requested, guard, faults) -> None:
    """Compute every micro-batch of this rank in order, then end each drafter's stream."""
    topology, device = fabric.topology, fabric.device
    sender = HiddenStateSender(fabric, ring, args.pipeline, stop_requested, guard, faults)
    for m in topology.micro_batches_of(topology.role_rank, first_m):
        if not go_on_together(fabric, m, m < planner.end_m and not sender.stopping):
            break
        fabric.board.now(f"forward pass of micro-batch {m}")
        plan = planner.plan(m)
        faults.before_forward(m, device)
        forward = Span(device)
        shots = runner.forward(plan)
        faults.after_capture(shots, plan)
        forward.end()
        started = time.perf_counter()
        with fabric.board.doing(f"waiting for a free slot for micro-batch {m}", HELPER):
            slot = ring.acquire("filling")
        sender.submit(sender.send, SendJob(plan, shots, slot, forward, (time.perf_counter() - started) * 1e3))
    for end in range(m, m + len(topology.target_table)):  # every drafter, in the order in which they await it
        if topology.target_of(end) == topology.role_rank:
            sender.submit(sender.end_stream, end)
    fabric.board.now("sending what is left", HELPER)
    sender.finish()


# ======================================================================================================================
# 10. Drafter. In: packed hidden states, anchors, mask tokens. Out: a hidden state for every slot of every block.
# ======================================================================================================================
# The architecture and tensor names of z-lab's DFlashDraftModel: Qwen3-style layers in which the slots of a block attend
# to the target's features before the anchor and to their own block. Here a micro-batch has no batch dimension: N rows of
# context from all documents, Q = A * B slots, and a mask that says who sees whom.


@dataclass(frozen=True)
class DrafterConfig:
    """Geometry of a drafter. `to_json` is the `config.json` that z-lab's code, SGLang and vLLM read."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: Optional[int]  # None: read from a format that does not say
    layer_types: tuple[str, ...]
    sliding_window: int

    @classmethod
    def for_target(cls, text_config, args: DrafterArguments, layer_ids: tuple[int, ...], mask_token_id: int):
        """A drafter with the target's width and heads, plain RoPE over the whole head, and the flags' depth."""
        depth = args.num_draft_layers
        full = depth if args.num_full_attention_layers is None else args.num_full_attention_layers
        heads = text_config.num_attention_heads
        rope = getattr(text_config, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)  # Gemma 3 keeps one set per kind of layer
        return cls(
            hidden_size=text_config.hidden_size,
            # some mixtures of experts have no width of a dense layer: that of their dense siblings
            intermediate_size=getattr(text_config, "intermediate_size", None) or 3 * text_config.hidden_size,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
            rms_norm_eps=getattr(text_config, "rms_norm_eps", None) or 1e-6,
            rope_theta=float(rope.get("rope_theta") or getattr(text_config, "rope_theta", None) or 1e4),
            max_position_embeddings=text_config.max_position_embeddings,
            vocab_size=text_config.vocab_size,
            block_size=args.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=layer_ids,
            num_target_layers=text_config.num_hidden_layers,
            layer_types=("sliding_attention",) * (depth - full) + ("full_attention",) * full,
            sliding_window=args.sliding_window,
        )

    def describe_layers(self) -> str:
        """'5 layers', or '5 layers, 4 of them sliding (window 2048)'."""
        sliding = self.layer_types.count("sliding_attention")
        window = f", {sliding} of them sliding (window {self.sliding_window})" if sliding else ""
        return f"{self.num_hidden_layers} layers{window}"

    def to_json(self) -> dict:
        values = dataclasses.asdict(self)
        mask, ids = values.pop("mask_token_id"), list(values.pop("target_layer_ids"))
        slides = "sliding_attention" in self.layer_types
        return values | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids, "block_size": self.block_size},
            "layer_types": list(self.layer_types),
            "use_sliding_window": slides,
            "sliding_window": self.sliding_window if slides else None,
            "max_window_layers": 0 if slides else self.num_hidden_layers,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "sample_from_anchor": False,  # slot 0 is the known token; only the mask slots propose
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
        }

    @classmethod
    def from_json(cls, values: dict, num_target_layers: Optional[int] = None) -> "DrafterConfig":
        """From the `config.json` of a z-lab or a speculators drafter.

        num_target_layers: the target's depth, if the caller knows it. speculators does not write it down: None without.
        Raises UserError naming the key that is missing, contradicts another one, or asks for what this drafter does not
        compute. Nothing is guessed.
        """
        if "speculators_model_type" in values:
            values = speculators_to_zlab(values)
        refuse_variants(values)
        nested = values.get("dflash_config") or {}
        layer_types, window = drafter_layer_types(values, nested)
        depth = only_value("num_target_layers", values, nested)
        if num_target_layers is not None and depth not in (None, num_target_layers):
            raise UserError(f"the drafter is for a target of {depth} layers, this one has {num_target_layers}")
        depth = depth or num_target_layers
        if depth is None and "speculators_model_type" not in values:
            raise UserError("the drafter's config.json has no 'num_target_layers'")
        known = {"rope_theta": drafter_rope_theta(values), "layer_types": layer_types, "sliding_window": window}
        known |= {key: only_value(key, values, nested) for key in ("block_size", "mask_token_id", "target_layer_ids")}
        known = {f.name: known.get(f.name, values.get(f.name)) for f in dataclasses.fields(cls)}
        known["num_target_layers"] = depth
        if missing := [key for key, value in known.items() if value is None and key != "num_target_layers"]:
            raise UserError(f"the drafter's config.json has no '{missing[0]}'")
        check_drafter_numbers(known)
        known |= {key: float(known[key]) for key in ("rope_theta", "rms_norm_eps")}
        return cls(**known | {key: tuple(known[key]) for key in ("target_layer_ids", "layer_types")})


DFLASH_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator")
# Keys by which other drafters differ from this one, with the values (besides null) under which they do not.
NEUTRAL_KEYS = {
    "attention_bias": [False], "mlp_bias": [False], "hidden_act": ["silu"], "partial_rotary_factor": [1],
    "sample_from_anchor": [False], "is_neox_style": [True], "use_aux_hidden_state": [True],
    "projector_type": ["dflash"], "shift_label": [False], "pure_draft_prefix_len": [0], "attention_sink_bias": [False],
    "add_swa_attention_sink_bias": [False], "logit_scale": [1], "output_multiplier": [1], "attention_value_scale": [1],
    "input_embedding_scale": [1], "final_logit_softcapping": [], "quantization_config": [], "gru_hidden_dim": [],
    "emb_dim": [], "norm_before_fc": [False], "norm_before_residual": [False], "attention_mode": ["gqa", "mha"],
}  # fmt: skip
VARIANT_PREFIXES = ("conv_", "selector_", "markov_")  # of keys that are refused whatever their value
NESTED_KEYS = {"mask_token_id", "mask_token", "target_layer_ids", "block_size", "num_target_layers", "use_swa",
               "swa_window_size", "causal"}  # fmt: skip


def speculators_to_zlab(values: dict) -> dict:
    """A speculators `config.json` in z-lab's form. Its layer ids count the embedding as 0, so they are one higher."""
    if values["speculators_model_type"] != "dflash":
        raise UserError(f"speculators_model_type {values['speculators_model_type']}: only dflash drafters are read")
    layer, ids = values.get("transformer_layer_config"), values.get("aux_hidden_state_layer_ids")
    for key, value in (("transformer_layer_config", layer), ("aux_hidden_state_layer_ids", ids)):
        if value is None:
            raise UserError(f"the drafter's config.json has no '{key}'")
    if any(type(i) is not int for i in ids):
        raise UserError(f"aux_hidden_state_layer_ids {ids} of the drafter: ids must be whole")
    if 0 in ids:
        raise UserError("aux_hidden_state_layer_ids holds 0, the embedding's output: only decoder layers are captured")
    if values.get("sliding_window_non_causal") and "sliding_attention" in (layer.get("layer_types") or ()):
        raise UserError("sliding_window_non_causal true: sliding layers see only earlier slots of their block here")
    nested = {"mask_token_id": values.get("mask_token_id"), "target_layer_ids": [i - 1 for i in ids]}
    return layer | {k: v for k, v in values.items() if k != "transformer_layer_config"} | {"dflash_config": nested}


def only_value(key: str, *places: dict):
    """The value of a key that may stand in several places; None if it is in none, UserError if they differ."""
    found = [place[key] for place in places if place.get(key) is not None]
    if any(value != found[0] for value in found):
        raise UserError(f"{key} of the drafter contradicts itself: {' and '.join(map(str, found))}")
    return found[0] if found else None


def refuse_variants(values: dict) -> None:
    """UserError for a drafter that is no DFlash one, or one that computes something else."""
    names, nested = values.get("architectures") or ["none"], values.get("dflash_config") or {}
    if len(names) != 1 or names[0] not in DFLASH_ARCHITECTURES:
        raise UserError(f"architectures {names} is no DFlash drafter; known: {', '.join(DFLASH_ARCHITECTURES)}")
    for where, place in (("", values), ("dflash_config.", nested)):
        for key, value in place.items():
            variant = key in NEUTRAL_KEYS or key.startswith(VARIANT_PREFIXES) or (where and key not in NESTED_KEYS)
            if variant and value is not None and value not in NEUTRAL_KEYS.get(key, []):
                raise UserError(f"{where}{key} {value} in the drafter's config.json: not what this drafter computes")
    for key, whole in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(key) not in (None, values.get(whole)):
            raise UserError(f"{key} {values[key]} of the drafter differs from {whole} {values.get(whole)}")


def drafter_rope_theta(values: dict) -> Optional[float]:
    """RoPE's base, from the top level, `rope_parameters` or `rope_scaling`; UserError unless it is plain RoPE."""
    places = {name: values.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    plain = {"rope_type": ["default"], "type": ["default"], "partial_rotary_factor": [1]}
    for name, place in places.items():
        for key, value in place.items():
            if key != "rope_theta" and value is not None and value not in plain.get(key, []):
                raise UserError(f"{name}.{key} {value} of the drafter: only plain RoPE over whole heads is computed")
    return only_value("rope_theta", values, *places.values())


def drafter_layer_types(values: dict, nested: dict) -> tuple[Optional[list[str]], Optional[int]]:
    """(kind of every layer, window) as servers read them; UserError if a layer's causality is not that of its kind.

    A full layer sees its whole block, a sliding one the slots up to itself. The window is 2048, unread, without any.
    """
    kinds = values.get("layer_types")
    window = only_value("window", {"window": nested.get("swa_window_size")}, {"window": values.get("sliding_window")})
    if kinds is None:
        return None, window
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UserError(f"layer_types of the drafter holds {unknown[0]}, not full_attention or sliding_attention")
    by_kind = [kind == "sliding_attention" for kind in kinds]  # what decides causality when nothing else does
    if nested.get("use_swa") and not any(by_kind):
        kinds = ["sliding_attention"] * len(kinds)
    key, causal = "is_causal", values.get("is_causal")
    if causal is None:
        key, causal = "dflash_config.causal", nested.get("causal")
    for kind, default in zip(kinds, by_kind):
        if (kind == "sliding_attention") != (default if causal is None else causal):
            raise UserError(
                f"{key} {causal} of the drafter with a layer of {kind}: full layers see their whole block here, "
                "sliding ones only the slots before"
            )
    if "sliding_attention" not in kinds:
        return kinds, window or 2048
    if values.get("use_sliding_window") is False and not nested.get("use_swa"):
        raise UserError("use_sliding_window of the drafter is false, but its layer_types slide")
    if window is None:
        raise UserError("the drafter's config.json has no 'sliding_window'")
    return kinds, window


def check_drafter_numbers(known: dict) -> None:
    """UserError for values that no drafter can have."""
    whole = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "max_position_embeddings", "vocab_size", "block_size", "sliding_window")  # fmt: skip
    for key in whole:
        if type(known[key]) is not int or known[key] < (2 if key == "block_size" else 1):
            raise UserError(f"{key} {known[key]} of the drafter: not a usable number")
    ids, depth, mask = known["target_layer_ids"], known["num_target_layers"], known["mask_token_id"]
    if not ids or any(type(i) is not int for i in ids) or list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise UserError(f"target_layer_ids {ids} of the drafter: ids must be whole, from 0 on, and rise")
    if depth is not None and ids[-1] >= depth:
        raise UserError(f"target_layer_ids {ids} of the drafter: the target has layers 0 to {depth - 1}")
    if type(mask) is not int or not 0 <= mask < known["vocab_size"]:
        raise UserError(f"mask_token_id {mask} of the drafter lies outside its vocabulary of {known['vocab_size']}")
    if len(known["layer_types"]) != known["num_hidden_layers"]:
        raise UserError(f"layer_types of the drafter is not of length num_hidden_layers, {known['num_hidden_layers']}")
    if known["num_attention_heads"] % known["num_key_value_heads"]:
        raise UserError(f"num_key_value_heads {known['num_key_value_heads']} of the drafter does not divide its heads")


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of [T, heads, head_dim], halves rotated against each other."""
    cos, sin = rope
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """Attention of q [Q, heads, D] over k, v [T, kv_heads, D] -> [Q, heads * D].

    mask: bool [Q, T] for SDPA, a flex BlockMask, or None when every query sees every key.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if mask is None or isinstance(mask, Tensor):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    else:
        flex = flex_attention if torch.compiler.is_compiling() else compiled_once(flex_attention)
        out = flex(q, k, v, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


class Matrix(nn.Linear):
    """A linear layer without bias. Its values are loaded, or drawn by the drafter: torch's own would only cost time."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class DraftAttention(nn.Module):
    """Slots query the context and the slots; the context only gives keys and values."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Matrix(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Matrix(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Matrix(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Matrix(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def keys_values(self, x: Tensor, rope) -> tuple[Tensor, Tensor]:
        """Rows [T, H] -> rotated keys and values, [T, kv_heads, D] each."""
        return rotate(self.k_norm(self.heads(self.k_proj(x))), rope), self.heads(self.v_proj(x))

    def forward(self, slots: Tensor, slot_rope, context_kv: tuple[Tensor, Tensor], mask) -> Tensor:
        q = rotate(self.q_norm(self.heads(self.q_proj(slots))), slot_rope)
        k, v = (torch.cat(pair) for pair in zip(context_kv, self.keys_values(slots, slot_rope)))
        return self.o_proj(attend(q, k, v, mask))


class DraftMLP(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = Matrix(c.hidden_size, c.intermediate_size)
        self.up_proj = Matrix(c.hidden_size, c.intermediate_size)
        self.down_proj = Matrix(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.self_attn, self.mlp = DraftAttention(c), DraftMLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, slots: Tensor, slot_rope, context: Tensor, context_rope, mask) -> Tensor:
        return self.block(slots, slot_rope, self.self_attn.keys_values(context, context_rope), mask)

    def block(self, slots: Tensor, slot_rope, context_kv: tuple[Tensor, Tensor], mask) -> Tensor:
        """The layer with the context's keys and values given: all that decoding with a cache needs."""
        slots = slots + self.self_attn(self.input_layernorm(slots), slot_rope, context_kv, mask)
        return slots + self.mlp(self.post_attention_layernorm(slots))


class DFlashDrafter(nn.Module):
    """The trained module. It holds no frozen weight: embedding and head are the target's (`FrozenEnds`).

    Its matrices are drawn from normal(0, 0.02) by the seed; without one they are still to be loaded.
    """

    def __init__(self, config: DrafterConfig, seed: Optional[int] = None):
        super().__init__()
        self.config = config
        self.fc = Matrix(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for module in self.modules():
                if isinstance(module, Matrix):
                    nn.init.normal_(module.weight, 0.0, 0.02, generator=generator)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, 1, head_dim] each, of positions [T]; angles in fp32."""
        c, dtype = self.config, self.hidden_norm.weight.dtype
        exponents = -torch.arange(0, c.head_dim, 2, device=positions.device, dtype=torch.float32) / c.head_dim
        angles = positions.float()[:, None] * c.rope_theta**exponents
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def context(self, features: Tensor) -> Tensor:
        """Captured states [N, K*H] -> context rows [N, H]."""
        return self.hidden_norm(self.fc(features.to(self.hidden_norm.weight.dtype)))

    def forward(self, features: Tensor, context_positions: Tensor, slots: Tensor, slot_positions: Tensor, masks: dict):
        """Hidden states of all slots, before the LM head.

        features [N, K*H] · context_positions [N] · slots [Q, H], embeddings · slot_positions [Q]
        masks: layer type -> mask [Q, N + Q], dense or block, see `visibility`
        """
        context, context_rope = self.context(features), self.rope(context_positions)
        slots, slot_rope = slots.to(context.dtype), self.rope(slot_positions)
        for layer, kind in zip(self.layers, self.config.layer_types):
            slots = layer(slots, slot_rope, context, context_rope, masks[kind])
        return self.norm(slots)


@torch.no_grad()
def init_from_target_layer(drafter: DFlashDrafter, layer_id: int, args: TargetArguments) -> None:
    """Copy a target layer into every draft layer, and start the context as what that layer read.

    fc selects the captured layer nearest below `layer_id` and hidden_norm is the layer's input norm, so keys and values
    of the context start as the target's own (when layer_id - 1 is captured and the target scales no RoPE). The final norm
    is not copied but starts small: the mask token's own embedding would otherwise dominate the first logits. (Demo target,
    150 steps, one run each: estimated acceptance on the training text 1.11 in place of 1.08.)
    Raises UserError when the target's layer has other tensors than a draft layer, or other shapes.
    """
    ids, hidden_size = drafter.config.target_layer_ids, drafter.config.hidden_size
    below = [j for j, captured in enumerate(ids) if captured < layer_id]
    if args.target in RANDOM_TARGETS or not below or layer_id >= drafter.config.num_target_layers:
        raise UserError(
            f"--init-from-target-layer {layer_id}: needs a target with weights on disk and a layer above the first "
            f"captured one ({ids[0]}) and below {drafter.config.num_target_layers}"
        )
    files = safetensors_index(args.target)
    prefix = only_key(files, rf"(^|\.)layers\.{layer_id}\.input_layernorm\.weight$", args.target)
    prefix = prefix.removesuffix("input_layernorm.weight")
    source = {key.removeprefix(prefix): read_tensor(files, key, args.target) for key in files if key.startswith(prefix)}
    optional = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}  # Llama has none: they stay 1
    for layer in drafter.layers:
        own = layer.state_dict()
        differing = {k for k in own.keys() ^ source.keys() if k not in optional}
        differing |= {k for k in own.keys() & source.keys() if own[k].shape != source[k].shape}
        if differing:
            raise UserError(f"--init-from-target-layer: the target's layer differs in {sorted(differing)[0]}")
        layer.load_state_dict(own | source)
    drafter.hidden_norm.weight.copy_(source["input_layernorm.weight"])
    drafter.norm.weight.fill_(0.2)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, below[-1] * hidden_size :][:, :hidden_size].fill_diagonal_(1.0)


def choose_drafter_config(args: Arguments, text_config, tokenizer) -> DrafterConfig:
    """The drafter's geometry: the target's and the flags', with `--init-from` the given drafter's own widths and RoPE.

    Raises UserError when that drafter was made for another target, or when a flag contradicts its weights.
    """
    layer_ids = choose_fc_layer_ids(text_config.num_hidden_layers, args.target)
    mask_token_id = choose_mask_token(tokenizer, text_config.vocab_size, args.drafter.mask_token_id, text_config)
    config = DrafterConfig.for_target(text_config, args.drafter, layer_ids, mask_token_id)
    if args.drafter.init_from is None:
        return config
    given = read_drafter_config(find_drafter_folder(args.drafter.init_from))
    for name in ("hidden_size", "vocab_size", "num_target_layers", "num_hidden_layers", "target_layer_ids", "layer_types"):
        if getattr(given, name) not in (None, getattr(config, name)):
            raise UserError(
                f"--init-from {args.drafter.init_from}: its {name} is {getattr(given, name)}, "
                f"the target and the flags ask for {getattr(config, name)}"
            )
    own = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
    return dataclasses.replace(config, **{name: getattr(given, name) for name in own})


def build_drafter(config: DrafterConfig, args: Arguments) -> DFlashDrafter:
    """The drafter as a run starts it, in fp32 on the CPU: a function of its configuration, the seed and what it starts from."""
    drafter = DFlashDrafter(config, args.data.seed if args.drafter.init_from is None else None)
    if args.drafter.init_from is not None:
        folder = find_drafter_folder(args.drafter.init_from)
        drafter.load_state_dict(load_drafter(folder, torch.device("cpu"), torch.float32).state_dict())
    if args.drafter.init_from_target_layer is not None:
        init_from_target_layer(drafter, args.drafter.init_from_target_layer, args.target)
    return drafter


def visibility(plan: BatchPlan, block_size: int, window: Optional[int]) -> np.ndarray:
    """Who sees whom: for slot q the keys [lo, hi) of the context and [own_lo, own_hi) of the slots; int32 [4, Q].

    Keys are N context rows, then Q slots. A full-attention layer (window None) shows a slot the context of its own
    document strictly before the anchor, and its whole block. A sliding layer keeps of these what lies less than `window`
    before the slot's own position, and slots up to itself. Unused anchors see their own block only: no row is empty.
    """
    n, a = len(plan.token_ids), len(plan.anchor_rows)
    slot = np.tile(np.arange(block_size), a)
    anchor = np.repeat(plan.anchor_rows, block_size)
    used = np.repeat(np.arange(a) < plan.num_anchors, block_size)
    document_start = anchor - plan.position_ids[anchor]
    lo, hi = document_start, np.where(used, anchor, 0)
    own_lo = n + np.repeat(np.arange(a) * block_size, block_size)
    own_hi = own_lo + block_size
    if window is not None:
        lo = np.maximum(lo, anchor + slot - window + 1)
        own_lo = np.maximum(own_lo, own_lo + slot - window + 1)
        own_hi = n + np.arange(a * block_size) + 1
    return np.stack([np.minimum(lo, hi), hi, own_lo, own_hi]).astype(np.int32)


def dense_mask(ranges: np.ndarray, num_keys: int) -> Tensor:
    """Bool [Q, num_keys] of the ranges that `visibility` gives."""
    lo, hi, own_lo, own_hi = (torch.from_numpy(r)[:, None] for r in ranges)
    key = torch.arange(num_keys, dtype=torch.int32)
    return ((key >= lo) & (key < hi)) | ((key >= own_lo) & (key < own_hi))


TILE = 128  # queries and keys per tile of a block mask


def check_tiles(args: Arguments, device: torch.device) -> None:
    """Raise UserError where block masks would not divide into whole tiles."""
    for flag, size in (
        ("--tokens-per-micro-batch", args.data.tokens_per_micro_batch),
        ("anchors times block size", args.data.anchors_per_micro_batch * args.drafter.block_size),
    ):
        if device.type == "cuda" and size % TILE:
            raise UserError(f"{flag} is {size}: on CUDA it must be a multiple of {TILE}")


def tile_kinds(ranges: np.ndarray, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """(partial, full), bool [query tiles, key tiles] each: tiles with some and with all entries visible.

    From the ranges alone, on the CPU: no Q x keys table is ever made.
    """
    starts = np.arange(0, num_keys, TILE)
    ends = np.minimum(starts + TILE, num_keys)
    some = np.zeros((ranges.shape[1], len(starts)), bool)
    every = some.copy()
    for lo, hi in (ranges[:2, :, None], ranges[2:, :, None]):
        some |= (lo < ends) & (hi > starts) & (lo < hi)
        every |= (lo <= starts) & (hi >= ends)
    first_query = np.arange(0, ranges.shape[1], TILE)
    some, every = np.logical_or.reduceat(some, first_query), np.logical_and.reduceat(every, first_query)
    return some & ~every, every


def block_mask(ranges: np.ndarray, num_keys: int, device: torch.device) -> BlockMask:
    """The flex-attention BlockMask of the same ranges."""
    def tiles(kind: np.ndarray) -> tuple[Tensor, Tensor]:
        counts = kind.sum(1, dtype=np.int32)
        indices = np.argsort(~kind, axis=1, kind="stable").astype(np.int32)
        return tuple(to_device(torch.from_numpy(x)[None, None], device) for x in (counts, indices))

    lo, hi, own_lo, own_hi = to_device(torch.from_numpy(ranges), device)

    def visible(batch, head, q, key):
        return ((key >= lo[q]) & (key < hi[q])) | ((key >= own_lo[q]) & (key < own_hi[q]))

    partial, full = tile_kinds(ranges, num_keys)
    return BlockMask.from_kv_blocks(
        *tiles(partial), *tiles(full), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(ranges.shape[1], num_keys)
    )


# ======================================================================================================================
# 11. Loss. In: slot states, labels, weights. Out: the weighted sum of the losses, its gradient, and what was right.
# ======================================================================================================================


def dpace_weights(probability: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights [blocks, B-1] from the drafter's probability of each label: what reaching slot k is worth.

    With s_k = (1 - alpha) p_k + alpha and r_k = s_1 ... s_k, slot k weighs r_k + r_(k+1) + ... up to the block's last
    supervised slot. `supervised` is 1 or 0. No gradient passes.
    """
    smooth = torch.where(supervised > 0, (1 - alpha) * probability + alpha, 1.0)
    reach = smooth.cumprod(1) * supervised
    return reach.flip(1).cumsum(1).flip(1) * supervised


def head_rows(logits: Tensor, target_logits: Optional[Tensor], labels: Tensor, weights: Tensor,
              softcap: Optional[float], dpace_alpha: Optional[float]):  # fmt: skip
    """(weighted loss sum fp32 [], argmax int64 [R], gradient by the logits [R, V]) of the rows of whole blocks.

    logits, target_logits [R, V], not yet soft-capped; labels, weights [blocks, B-1]. Cross-entropy with the labels, or
    the KL divergence from the target's distribution where that is given. What is [R, V] is overwritten where it can be;
    compiled, the logits are read twice and the gradient written once.
    """
    capped = soft_cap(logits.float(), softcap)
    best, log_q, label = capped.argmax(-1), capped.log_softmax(-1), labels.flatten()[:, None]
    if target_logits is None:
        loss = -log_q.gather(1, label).squeeze(1)
    else:
        log_p = soft_cap(target_logits.float(), softcap).log_softmax(-1)
        p = log_p.exp()
        loss = (p * (log_p - log_q)).sum(-1)
    if dpace_alpha is not None:
        weights = dpace_weights(torch.exp(-loss).view_as(weights), weights, dpace_alpha)
    weight = weights.flatten()
    grad = log_q.exp_() if target_logits is None else log_q.exp_().sub_(p)
    at_label = torch.expm1(-loss)  # probability - 1: set last, so that it is not rounded to the logits' dtype in between
    if softcap is not None:
        slope = 1 - (capped / softcap) ** 2
        grad, at_label = grad.mul_(slope), at_label * slope.gather(1, label).squeeze(1)
    grad = grad.mul_(weight[:, None]).to(logits.dtype)
    if target_logits is None:
        grad.scatter_(1, label, (at_label * weight).to(grad.dtype)[:, None])
    return (loss * weight).sum(), best, grad


LOSS_CHUNK = 2048  # rows of logits alive at a time: 0.6 GB in bf16 at a vocabulary of 152k


class FrozenHeadLoss(torch.autograd.Function):
    """Weighted sum of per-row losses against a frozen head, whose gradient is computed in the forward pass by chunks of
    whole blocks: no [R, V] tensor outlives a chunk, and the backward pass is one multiplication. See `head_rows`."""

    @staticmethod
    def forward(ctx, hidden: Tensor, ends: FrozenEnds, labels: Tensor, weights: Tensor, target_states, dpace_alpha):
        """hidden [blocks * (B-1), H], labels int64 and weights fp32 [blocks, B-1], target_states [blocks * (B-1), H] as
        the head reads them, or None -> (loss sum fp32 [], argmax int64 [blocks, B-1])."""
        head, rows_loss = ends.head_weight, compiled_once(head_rows) if ends.compiled else head_rows
        grad, total, best = torch.empty_like(hidden), torch.zeros((), device=hidden.device), torch.empty_like(labels)
        blocks, slots = labels.shape
        chunk = math.ceil(blocks / math.ceil(blocks * slots / LOSS_CHUNK))  # blocks; all chunks of one size, or nearly
        for start in range(0, blocks, chunk):
            part = slice(start, min(start + chunk, blocks))
            rows = slice(part.start * slots, part.stop * slots)
            logits = F.linear(hidden[rows].to(head.dtype), head)
            target_logits = None if target_states is None else F.linear(target_states[rows].to(head.dtype), head)
            loss, right, by_logits = rows_loss(
                logits, target_logits, labels[part], weights[part], ends.softcap, dpace_alpha
            )
            del logits, target_logits
            total += loss
            best[part] = right.view(-1, slots)
            grad[rows] = (by_logits @ head).to(grad.dtype)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx, grad_total, grad_best):
        (grad,) = ctx.saved_tensors
        return grad * grad_total.to(grad.dtype), None, None, None, None, None


def block_statistics(best: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sums over the blocks [A, B-1] of a micro-batch, fp64 [2 + 2 * (B-1)]: accepted slots, blocks, then per slot the
    right ones and the trained ones.

    A block's accepted slots are its leading right ones, the trained slots alone counted: sums over blocks, so that the
    mean over ranks and micro-batches is a mean over blocks.
    """
    trained = weights > 0
    right = (best == labels) & trained
    accepted = right.long().cumprod(1).sum()
    return torch.cat([torch.stack([accepted, trained[:, 0].sum()]), right.sum(0), trained.sum(0)]).double()


@dataclass
class DrafterBatch:
    """What a plan gives the drafter, on its device: see `DFlashDrafter.forward` and `FrozenHeadLoss`."""

    context_positions: Tensor
    slot_ids: Tensor  # [Q]: the anchor's token, then mask tokens
    slot_positions: Tensor  # [Q]
    masks: dict
    labels: Tensor  # [A, B-1]
    weights: Tensor  # [A, B-1]
    verifier_rows: Tensor  # [A * (B-1)]: the context row whose target distribution is slot k's own

    @classmethod
    def from_plan(cls, plan: BatchPlan, config: DrafterConfig, device: torch.device) -> "DrafterBatch":
        block, n = config.block_size, len(plan.token_ids)
        slot = np.arange(block)
        slot_ids = np.full((len(plan.anchor_rows), block), config.mask_token_id)
        slot_ids[:, 0] = plan.token_ids[plan.anchor_rows]
        positions = plan.position_ids[plan.anchor_rows][:, None] + slot
        verifier_rows = np.minimum(plan.anchor_rows[:, None] + slot[1:] - 1, n - 1)
        masks = {}
        for kind in set(config.layer_types):
            window = config.sliding_window if kind == "sliding_attention" else None
            ranges, num_keys = visibility(plan, block, window), n + slot_ids.size
            on_gpu = device.type == "cuda"
            masks[kind] = block_mask(ranges, num_keys, device) if on_gpu else dense_mask(ranges, num_keys)
        arrays = (plan.position_ids, slot_ids.ravel(), positions.ravel(), plan.labels[:, 1:].copy(),
                  plan.weights[:, 1:].copy(), verifier_rows.ravel())  # fmt: skip
        context, ids, positions, labels, weights, rows = (to_device(torch.from_numpy(x), device) for x in arrays)
        return cls(context, ids, positions, masks, labels, weights, rows)


def drafter_features(slot: Slot, plan: BatchPlan, split: bool) -> Tensor:
    """The drafter's input [N, K*H] from a received slot: joined, with noise, zeros in the padded tail."""
    n = plan.num_tokens
    features = slot.hidden.view(slot.tokens, -1)
    if split:
        features = torch.zeros_like(features)
        torch.cat(slot.layers(n, split=True), dim=1, out=features[:n])
        add_noise_(features[:n], plan.noise_std, plan.noise_seed)
    else:
        features[n:].zero_()
    return features


def micro_batch_loss(model, ends: FrozenEnds, features: Tensor, batch: DrafterBatch, verifier_last: Optional[Tensor],
                     dpace_alpha: Optional[float] = None, watch=None):  # fmt: skip
    """(weighted loss sum [], statistics fp64 [2 * B]) of one micro-batch; `model` is the drafter or its engine.

    verifier_last [n, H]: the target's last layer, for the KL loss; None: cross-entropy on the text.
    dpace_alpha: weigh by D-PACE in place of the plan's decay. watch: `StageFlags.watch`, told of the drafter's output.
    """
    slots = ends.embed(batch.slot_ids)
    out = model(features, batch.context_positions, slots, batch.slot_positions, batch.masks)
    if watch is not None:
        watch("drafter output", out)
    trained = out.view(len(batch.weights), -1, out.shape[-1])[:, 1:].flatten(0, 1)  # slot 0 is never trained
    target_states = None
    if verifier_last is not None:
        rows = batch.verifier_rows.clamp(max=len(verifier_last) - 1)
        target_states = ends.norm(verifier_last.to(ends.head_weight.dtype))[rows]
    loss, best = FrozenHeadLoss.apply(trained, ends, batch.labels, batch.weights, target_states, dpace_alpha)
    return loss, block_statistics(best, batch.labels, batch.weights)


# ======================================================================================================================
# 12. Checkpoints. In: a trained step. Out: a folder that a run goes on from, and the drafter in z-lab's format.
# ======================================================================================================================


def load_plain(path: Path) -> dict:
    """A DeepSpeed file, in fp32 on the CPU and mapped into memory: tensors, plain values and the three classes that
    DeepSpeed itself puts there. Anything else could run code, and is refused with UserError."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {foreign[1]}" if foreign else first_line(error)
        raise UserError(f"{path} holds more than tensors and plain values, and is not loaded: {what}") from None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, EOFError) as error:
        raise UserError(f"cannot load {path}: {first_line(error)}") from None


def run_identity(args: Arguments, documents: Documents, config: DrafterConfig, num_drafters: int) -> dict:
    """What must be the same for a run to go on as if it had never stopped, and on every rank of one run.

    The target is known by its files, not by where they lie. Of drafter ranks and accumulation only the product counts.
    """
    names = ("seed", "tokens_per_micro_batch", "anchors_per_micro_batch", "anchor_draw", "loss", "loss_gamma", "noise_std",
             "noise_schedule", "loss_weights", "dpace_alpha", "target_dtype")  # fmt: skip
    flat, target = args.flat(), args.target.target
    identity = {"data": documents.fingerprint, "target": target if target in RANDOM_TARGETS else target_hashes(target)}
    identity |= {"micro_batches_per_step": num_drafters * args.optimization.gradient_accumulation_steps}
    identity |= {name: flat[name] for name in names}
    if args.target.target_fp8:  # no name of its own: checkpoints from before the flag go on
        identity["target_dtype"] += " with linear layers in fp8"
    return identity | {f"drafter {k}": v for k, v in json.loads(json.dumps(dataclasses.asdict(config))).items()}


def drafter_weights(engine) -> Optional[dict[str, Tensor]]:
    """All weights of the drafter on its rank 0 (None elsewhere), gathered under ZeRO 3; called by every drafter."""
    import deepspeed

    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            if dist.get_rank() == 0:
                weights[name] = parameter.detach().cpu().clone()
    return weights if dist.get_rank() == 0 else None


# A checkpoint is a folder step-N: DeepSpeed's files, state.json, the drafter, and manifest.json with the size and hash of
# every file. It is written as step-N.partial and gets its name when all of it is on the disk; then `latest` names it;
# then older ones go. So whatever the moment of a kill, what `latest` names is whole, and what still ends in .partial is
# rubbish. A start verifies every byte before it loads one, and falls back to the one before.

MANIFEST, STATE = "manifest.json", "state.json"
STEP_FOLDER = re.compile(r"step-(\d{6,12})")
START_ANEW = "another --output-dir starts anew"


@dataclass(frozen=True)
class ResumePoint:
    """A whole checkpoint and what state.json says of it."""

    folder: str
    step: int
    drafter_ranks: int
    zero_stage: int
    counters: dict[str, int]  # what the metrics count since the first step


def save_checkpoint(engine, step: int, args: Arguments, identity: dict, config: DrafterConfig, fabric: Fabric,
                    counters: dict[str, int]) -> Path:  # fmt: skip
    """Write the checkpoint of a step, move it into place, then the pointer `latest`; prune old ones.

    Called by every drafter, which all return once it is in place. Raises UserError, on every drafter, where one could
    not write its part: then nothing of it is left, and the checkpoints before it stay as they were.
    """
    root = Path(args.run.output_dir) / "checkpoints"
    final, partial = root / f"step-{step:06d}", root / f"step-{step:06d}.partial"
    state = {
        "step": step, "identity": identity, "counters": counters, "arguments": args.flat(),
        "layout": {"drafter_ranks": dist.get_world_size(), "zero_stage": int(engine.zero_optimization_stage())},
        "versions": {"torch": torch.__version__, "deepspeed": sys.modules["deepspeed"].__version__},
    }  # fmt: skip
    with fabric.board.doing(f"saving {final}", may_last=True):
        try:
            if dist.get_rank() == 0:
                remove_leftovers(root)
                (partial / "drafter").mkdir(parents=True)
            dist.barrier()
            engine.save_checkpoint(str(root), tag=partial.name, save_latest=False)  # fills `pending`
            files = write_files(engine, partial, state, config, fabric)
            if dist.get_rank() == 0:
                write_json(partial / MANIFEST, {"files": files})
                publish(partial, final, args.run.keep_checkpoints)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"cannot write checkpoint {final}: {error}; nothing of it is left, those before it stay"
            ) from None
        dist.barrier()
    return final


def write_files(engine, partial: Path, state: dict, config: DrafterConfig, fabric: Fabric) -> dict[str, dict]:
    """Write this rank's files of a checkpoint to the disk; returns the `file_records` of all drafters' files.

    Raises OSError on every drafter where one failed, with its reason.
    """
    pending, weights = engine.checkpoint_engine.pending, drafter_weights(engine)
    mine, records, fault = [path.relative_to(partial).as_posix() for path, _ in pending], {}, ""
    try:
        for path, contents in pending:
            with open(path, "wb") as file:
                torch.save(contents, file)
        if weights is not None:
            write_tensors(partial / "drafter" / "model.safetensors", weights, {"format": "pt"})
            dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
            write_json(partial / "drafter" / "config.json", config.to_json() | {"dtype": dtype})
            write_json(partial / STATE, state)
            mine += ["drafter/model.safetensors", "drafter/config.json", STATE]
        for name in mine:
            sync_to_disk(partial / name)
        records = file_records(partial, mine)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch's own error hides that of the file it writes to
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        fault = f"{fabric.topology}: {first_line(cause)}"
    finally:
        pending.clear()
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (fault, records))
    if faults := [fault for fault, _ in reports if fault]:
        raise OSError(faults[0])
    return dict(sorted(item for _, records in reports for item in records.items()))


def file_records(folder: Path, names: list[str], bar: Optional[str] = None) -> dict[str, dict]:
    """{file: {"bytes": size, "sha256": hash}}, several files at a time. `bar`: the text of a progress bar."""
    def record(name: str) -> dict:
        with open(folder / name, "rb") as file:
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        found = tqdm(pool.map(record, names), bar, len(names), leave=False, unit="file", disable=bar is None)
        return dict(zip(names, found))


def publish(partial: Path, final: Path, keep: int) -> None:
    """Give a complete checkpoint its name, let `latest` name it, and keep the last `keep` of those up to it."""
    root = final.parent
    for path in (partial / MANIFEST, partial / "drafter", partial):
        sync_to_disk(path)
    if final.exists():  # damaged, or of a run that went on from an earlier step
        final.rename(root / f"{final.name}.old.partial")
    partial.rename(final)
    sync_to_disk(root)
    pointer = root / "latest.partial"
    pointer.write_text(final.name)
    sync_to_disk(pointer)
    pointer.replace(root / "latest")
    sync_to_disk(root)
    for old in [path for path in step_folders(root) if step_of(path) <= step_of(final)][keep:]:
        old.rename(root / f"{old.name}.partial")  # a kill from here on leaves rubbish, not a damaged checkpoint
    remove_leftovers(root)


def remove_leftovers(root: Path) -> list[str]:
    """Remove what a killed save or removal left behind; returns its names."""
    left = sorted(root.glob("*.partial"))
    for path in left:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()  # the next save tries again
    return [path.name for path in left]


def step_of(folder: Path) -> int:
    """N of a folder step-N; -1 of any other."""
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def step_folders(root: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, whole or not."""
    folders = [path for path in root.glob("step-*") if step_of(path) >= 0 and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def read_pointer(root: Path) -> Optional[Path]:
    """The checkpoint that `latest` names; None where there is no such file. Raises DamagedFile."""
    try:
        text = (root / "latest").read_text(errors="replace")[:100].strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedFile(f"`latest` cannot be read ({first_line(error)})") from None
    if not STEP_FOLDER.fullmatch(text):
        raise DamagedFile(f"`latest` names no checkpoint but {text!r}" if text else "`latest` is empty")
    if not (root / text).is_dir():
        raise DamagedFile(f"`latest` names {text}, which is not there")
    return root / text


def find_checkpoint(name: str) -> Path:
    """The checkpoint that a user names: a step-N folder, or a run's output folder. Raises UserError where it is none."""
    path = Path(name) / "checkpoints" if (Path(name) / "checkpoints").is_dir() else Path(name)
    try:
        path = read_pointer(path) or path
    except DamagedFile as damage:
        raise UserError(f"{name}: {damage} in {path}") from None
    if not (path / STATE).is_file():
        raise UserError(f"{name}: no checkpoint there (a step-N folder, or a run's output folder)")
    return path


def resume_candidates(run: RunArguments) -> list[Path]:
    """The checkpoints that a run may go on from, the one to try first in front; says where `latest` is of no use."""
    if run.resume == "never":
        return []
    if run.resume != "auto":
        return [find_checkpoint(run.resume)]
    root = Path(run.output_dir) / "checkpoints"
    folders, named = step_folders(root), None
    try:
        named = read_pointer(root)
    except DamagedFile as damage:
        if not folders:
            raise UserError(f"{root}: {damage}, and no other checkpoint is there; {START_ANEW}") from None
        print(f"{root}: {damage}; looking for the newest whole checkpoint", flush=True)
    return [path for path in folders if named is None or step_of(path) <= step_of(named)]


def verify_files(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest. Raises DamagedFile naming the first that differs."""
    saved = read_json_object(folder / MANIFEST).get("files")
    if not isinstance(saved, dict) or STATE not in saved:
        raise DamagedFile(f"{MANIFEST} does not list the files")
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if missing := sorted(saved.keys() - there):  # also what lies outside of the folder
        raise DamagedFile(f"{ascii(missing[0])[1:-1]} is missing")
    try:
        found = file_records(folder, sorted(saved), f"verifying {folder.name}")
    except OSError as error:
        raise DamagedFile(f"a file cannot be read ({first_line(error)})") from None
    for name, record in found.items():
        if record != saved[name]:
            raise DamagedFile(f"{name} was changed: {record}, saved as {ascii(saved[name])[:200]}")


def read_state(folder: Path) -> tuple[ResumePoint, dict]:
    """(where to go on, the identity of the saved run) of state.json. Raises DamagedFile."""
    state = read_json_object(folder / STATE)
    layout, counters, identity = (state.get(key) for key in ("layout", "counters", "identity"))
    if not all(isinstance(part, dict) for part in (layout, counters, identity)):
        raise DamagedFile(f"{STATE} has no layout, counters or identity")
    step, ranks, stage = state.get("step"), layout.get("drafter_ranks"), layout.get("zero_stage")
    if not all(type(number) is int and 0 <= number < 2**63 for number in (step, ranks, stage, *counters.values())):
        raise DamagedFile(f"{STATE} holds numbers that count nothing")
    if step != step_of(folder) or ranks < 1 or stage > 3:
        raise DamagedFile(f"{STATE} is not that of {folder.name}")
    return ResumePoint(str(folder), step, ranks, stage, counters), identity


def check_identity(point: ResumePoint, saved: dict, identity: dict, num_drafters: int) -> None:
    """Raise UserError naming what differs between the saved run and this one, and the way out."""
    batch, now = saved.get("micro_batches_per_step"), identity["micro_batches_per_step"]
    if isinstance(batch, int) and batch != now:
        change = f"gradient_accumulation_steps was {batch // num_drafters} and is {now // num_drafters}"
        if point.drafter_ranks != num_drafters:
            change = f"drafter_ranks was {point.drafter_ranks} and is {num_drafters}"
        way = f"with --gradient-accumulation-steps {batch // num_drafters} they still are"
        if batch % num_drafters:
            way = f"they need a number of drafter ranks that divides {batch}"
        raise UserError(
            f"cannot resume {point.folder}: {change}, so a step would not be {batch} micro-batches any more; {way} "
            f"({START_ANEW})"
        )
    for key, value in identity.items():
        was = saved.get(key)
        if isinstance(was, dict) and isinstance(value, dict):  # the target's hashes, as far as that version made them
            value = {name: value.get(name) for name in was}
            if differing := [name for name in was if was[name] != value[name]]:
                key, was, value = f"{key} {differing[0]}", was[differing[0]], value[differing[0]]
        if was != value:
            was, now = json.dumps(was)[:100], json.dumps(value)[:100]
            raise UserError(f"cannot resume {point.folder}: {key} was {was} and is {now} now ({START_ANEW})")


def choose_checkpoint(args: Arguments, identity: dict, fabric: Fabric) -> Optional[ResumePoint]:
    """Where the run goes on, the same on every rank; None at the beginning. Called by every rank.

    Drafter 0 finds it and tells the others: targets need not see the folder.
    """
    topology, store = fabric.topology, fabric.store
    if (topology.role, topology.role_rank) == ("drafter", 0):
        point = find_whole_checkpoint(args.run, identity, topology.num_drafters)
        store.set("resume point", json.dumps(point and dataclasses.asdict(point)))
    wait_for_key(store, "resume point", f"[{topology}] waiting for drafter 0 to verify the checkpoint")
    point = json.loads(store.get("resume point"))
    return None if point is None else ResumePoint(**point)


def find_whole_checkpoint(run: RunArguments, identity: dict, num_drafters: int) -> Optional[ResumePoint]:
    """The first candidate that is whole. Raises UserError where it is not of this run; where `--resume` names it and it
    is damaged; where none is whole."""
    for name in remove_leftovers(Path(run.output_dir) / "checkpoints"):
        print(f"removed {name}: left by a save that was interrupted", flush=True)
    damages = []
    for folder in resume_candidates(run):
        try:
            verify_files(folder)
            point, saved = read_state(folder)
        except DamagedFile as damage:
            damages.append(f"{folder} is damaged: {damage}")
            if run.resume != "auto":
                raise UserError(f"--resume {run.resume}: {damages[0]}") from None
            print(f"{damages[-1]}; trying the one before", flush=True)
            continue
        check_identity(point, saved, identity, num_drafters)
        return point
    if damages:
        raise UserError(f"{damages[0]}; none of {len(damages)} checkpoints is whole; {START_ANEW}")
    return None


def load_checkpoint(engine, point: ResumePoint) -> None:
    """Load weights, masters, optimizer state and the count of skipped steps into a new engine; called by every drafter.

    DeepSpeed does it, bit for bit, where the run has as many drafter ranks and the ZeRO stage that it was saved with;
    else each parameter's state is put together from its parts. Raises UserError where the files do not hold it.
    """
    folder = Path(point.folder)
    try:
        if (point.drafter_ranks, point.zero_stage) == (dist.get_world_size(), engine.zero_optimization_stage()):
            loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
            if loaded is None:
                raise UserError(f"cannot resume {folder}: DeepSpeed found no state in it")
        else:
            load_by_name(engine, point)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, StopIteration) as error:
        raise UserError(f"cannot resume {folder}: {first_line(error)}") from error


def saved_parameters(point: ResumePoint) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(name, {"fp32": master, "exp_avg", "exp_avg_sq": flat fp32, "step": []}) of every parameter of a checkpoint.

    (DeepSpeed's own way, the universal checkpoint, makes a second copy of everything by a program of its own first, and
    reads both with a loader that runs code.)
    """
    folder = Path(point.folder)
    if point.zero_stage == 0:
        saved = load_plain(folder / "mp_rank_00_model_states.pt")
        for number, name in enumerate(name for name in saved["module"] if name not in saved["buffer_names"]):
            state = {"fp32": saved["module"][name], **saved["optimizer"]["state"].get(number, {})}
            yield name, {key: value.flatten() if value.dim() else value for key, value in state.items()}
        return
    names = (f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(point.drafter_ranks))
    shards = [load_plain(next(folder.glob(name)))["optimizer_state_dict"] for name in names]
    zero3 = point.zero_stage == 3
    masters = "fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups"
    optimizer = "optimizer_state_dict" if zero3 else "base_optimizer_state"

    def flat(shard: dict, number: int) -> dict[str, Tensor]:  # Adam's are there once it made a step
        return {"fp32": shard[masters][number], **shard[optimizer]["state"].get(number, {})}

    parts = defaultdict(list)  # by name: (flat tensors of a rank and group, which part of them)
    if zero3:  # each rank has its equal part of every parameter, in order, the last one padded
        shapes = load_plain(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
        for number, group in enumerate(shapes):
            offset = 0
            for name, shape in group.items():
                end = offset + -(-shape.numel() // len(shards))
                parts[name] = [(flat(shard, number), slice(offset, end)) for shard in shards]
                offset = end
    else:  # each rank has a stretch of all parameters laid end to end
        for shard in shards:
            for number, mapping in enumerate(shard["param_slice_mappings"]):
                for name, place in mapping.items():
                    parts[name].append((flat(shard, number), slice(place.start, place.start + place.numel)))
    for name, places in parts.items():
        yield name, {key: torch.cat([state[key][part] for state, part in places]) if value.dim() else value
                     for key, value in places[0][0].items()}  # fmt: skip


def load_by_name(engine, point: ResumePoint) -> None:
    """Load a checkpoint of another number of drafter ranks or another ZeRO stage into a new engine."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    for name, state in saved_parameters(point):
        parameter = parameters.pop(name)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            size = parameter.numel()
            parameter.data.copy_(state["fp32"][:size].view_as(parameter))
        if (place := own_part(engine, parameter)) is None:
            continue
        flat, here, part = place
        adam = engine.optimizer.state[flat]  # a ZeRO optimizer passes on that of the one it wraps
        for key, value in state.items():
            if value.dim() == 0:
                adam[key] = value.to(flat.device, copy=True)
                continue
            if key != "fp32" and key not in adam:
                adam[key] = torch.zeros_like(flat)
            whole = F.pad(value[:size], (0, max(0, part.stop - size)))
            (flat.data if key == "fp32" else adam[key]).view(-1)[here].copy_(whole[part])
    if parameters:
        raise UserError(f"cannot resume {point.folder}: {next(iter(parameters))} is missing in it")
    engine.global_steps, engine.global_samples = point.step, point.step * engine.train_batch_size()


def own_part(engine, parameter: nn.Parameter) -> Optional[tuple[Tensor, slice, slice]]:
    """(the tensor with this rank's part of a parameter's fp32 master, where in it, which part of the parameter it is);
    None where other ranks hold all of it."""
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        return parameter, slice(0, parameter.numel()), slice(0, parameter.numel())
    if stage == 3:
        group, start, size = zero.grad_position[zero.get_param_id(parameter)]
        first = dist.get_rank() * size
        return zero.fp32_partitioned_groups_flat[group], slice(start, start + size), slice(first, first + size)
    if (mapping := parameter._hp_mapping) is None:
        return None
    masters = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition  # bf16, ZeRO 1
    here, part = mapping.hp_fragment_address, mapping.lp_fragment_address
    return (
        masters[mapping.param_group_index],
        slice(here.start, here.start + here.numel), slice(part.start, part.start + part.numel),
    )  # fmt: skip


def find_drafter_folder(name: str) -> Path:
    """The drafter's folder in a run's newest checkpoint, in a checkpoint, `name` itself, or a copy of that hub id."""
    path = Path(name)
    if (path / "config.json").is_file():
        return path
    if path.exists():
        return find_checkpoint(name) / "drafter"
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: neither a folder here nor a drafter on the hub ({first_line(error)})") from None


def read_drafter_config(folder: Path, num_target_layers: Optional[int] = None) -> DrafterConfig:
    """The configuration in a drafter's folder, see `DrafterConfig.from_json`. Raises UserError."""
    try:
        return DrafterConfig.from_json(read_json_object(folder / "config.json"), num_target_layers)
    except DamagedFile as damage:
        raise UserError(f"{folder}: not a drafter folder ({damage})") from None
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def load_drafter(
    folder: Path, device: torch.device, dtype: torch.dtype, num_target_layers: Optional[int] = None
) -> DFlashDrafter:
    """A trained drafter from a folder with config.json and safetensors, in z-lab's form or that of speculators.

    num_target_layers: see `DrafterConfig.from_json`. The copies of the target's embedding and head in a speculators
    folder are left out; every other tensor must be there, and no further one, in the shape the configuration gives.
    Raises UserError.
    """
    config = read_drafter_config(folder, num_target_layers)
    try:
        files = safetensors_index(str(folder))
        weights = {name: read_tensor(files, name, str(folder)) for name in files}
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: not a drafter folder ({first_line(error)})") from None
    if "speculators_model_type" in read_json_object(folder / "config.json"):
        for name in ("embed_tokens.weight", "lm_head.weight"):
            copy = weights.pop(name, None)
            if copy is not None and copy.shape != (config.vocab_size, config.hidden_size):
                raise UserError(f"{folder}: {name} has shape {tuple(copy.shape)}")
    drafter = DFlashDrafter(config)
    own = drafter.state_dict()
    if differing := sorted(own.keys() ^ weights.keys()):
        what = "missing" if differing[0] in own else "not one of a DFlash drafter"
        raise UserError(f"{folder}: tensor {differing[0]} is {what}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape or not tensor.is_floating_point():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise UserError(f"{folder}: {name} is {found}, expected {list(own[name].shape)}")
    drafter.load_state_dict(weights)
    return drafter.to(device, dtype)


# ======================================================================================================================
# 13. Monitor. In: the sums and spans of a step. Out: console, metrics.jsonl and TensorBoard, written by drafter 0.
# ======================================================================================================================


def trained_figures(stats: Tensor, weights: list[float]) -> tuple[dict, list[bool]]:
    """(loss, acceptance length with the bonus token and slot accuracy of what was not skipped, which were skipped).

    stats fp64 [1 + 2 * B + len(weights)], on the host, summed over micro-batches and ranks: loss and `block_statistics`
    of those that were not skipped, then 1 for each that was. weights: the plan's, by micro-batch. The loss is 0 where
    nothing was supervised, None where all that weighs was left out.
    """
    sums, flags = stats.split([len(stats) - len(weights), len(weights)])
    skipped = (flags > 0).tolist()
    weight = sum(w for w, skip in zip(weights, skipped) if not skip)
    loss_sum, accepted, blocks = sums[:3].tolist()
    right, trained = sums[3:].chunk(2)
    no_loss = None if any(skipped) else 0.0
    return {
        "loss": loss_sum / weight if weight > 0 else no_loss,
        "acceptance_length": 1 + accepted / max(1.0, blocks),
        "slot_accuracy": (right / trained.clamp(min=1)).tolist(),
    }, skipped


@dataclass
class StepRecord:
    """One optimizer step as it was enqueued; its numbers are read a step later, when the device is done with them.

    Its loss is that of the micro-batches which were not skipped, over their own weights (the gradient was scaled by the
    weight of all, known beforehand); None when none of them weighs. A step that was not taken has one all the same.
    """

    step: int
    learning_rate: float
    noise_std: float
    weights: list[float]  # of the global batch: the plan's sum of loss weights, by micro-batch
    tokens: int  # of the global batch
    my_tokens: int  # of this drafter
    stats: Tensor  # see `trained_figures`; host, summed over the global batch
    ready: object  # CUDA event: `stats` has arrived
    grad_norm: object
    taken: bool  # False: the gradient was not finite, so the weights were left as they were
    spans: dict[str, list[Span]]
    receive_wait_ms: float
    wall_s: float
    queue_depth: int
    target_times: dict[str, float]  # ms, sums over this drafter's micro-batches of the step
    extras: dict[str, float]

    @functools.cached_property
    def results(self) -> tuple[dict, list[bool]]:
        """`trained_figures` of the whole global batch."""
        if self.ready is not None:
            self.ready.synchronize()
        return trained_figures(self.stats, self.weights)

    def figures(self) -> dict:
        """Everything as plain numbers, under the names of metrics.jsonl and TensorBoard; None: there is none."""
        ms = {name: sum(span.ms() for span in spans) for name, spans in self.spans.items()}
        forward_ms, pack_ms, wait_ms = (self.target_times.get(name, 0.0) for name in ("forward", "pack", "wait"))
        return {
            "step": self.step + 1,
            **self.results[0],
            "learning_rate": self.learning_rate,
            "grad_norm": float(self.grad_norm) if self.taken and self.grad_norm is not None else None,
            "noise_std": self.noise_std,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.wall_s,
            "target_tokens_per_s": self.my_tokens / max(1e-9, forward_ms / 1e3),  # one target rank, computing
            "drafter_tokens_per_s": self.my_tokens / max(1e-9, sum(ms.values()) / 1e3),  # one drafter rank, computing
            "target_wait_share": wait_ms / max(1e-9, forward_ms + wait_ms),
            "drafter_wait_share": self.receive_wait_ms / 1e3 / self.wall_s,
            "queue_depth": self.queue_depth,
            "ms": {
                "target_forward": forward_ms,
                "pack": pack_ms,
                "send_wait": wait_ms,
                "receive_wait": self.receive_wait_ms,
                **ms,
            },
            **self.extras,
        }


def shown(value: Optional[float], spec: str) -> str:
    return "-" if value is None else format(value, spec)


def metrics_until(path: Path, step: int) -> list[str]:
    """The lines of metrics.jsonl up to a step: not what an interrupted run wrote after its checkpoint, of which a kill
    may have torn the last line."""
    kept = []
    for line in path.read_text(errors="replace").splitlines() if step > 0 and path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    return kept


class Monitor:
    """Console, metrics.jsonl and TensorBoard. A resumed run appends after the step it resumes from."""

    def __init__(self, args: Arguments, first_step: int, total_steps: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(args.run.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.log_every = args.run.log_every
        path = folder / "metrics.jsonl"
        partial = folder / "metrics.jsonl.partial"  # a kill meanwhile must not cost the history
        partial.write_text("".join(line + "\n" for line in metrics_until(path, first_step)))
        partial.replace(path)
        self.file = path.open("a")
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self.writer.add_text("configuration", "\n".join(f"    {key}: {value}" for key, value in args.flat().items()))
        self.bar = tqdm(total=total_steps, initial=first_step, desc="training", unit="step", dynamic_ncols=True)

    def write(self, record: StepRecord) -> None:
        figures = record.figures()
        step = figures["step"]
        self.file.write(json.dumps(figures) + "\n")
        self.file.flush()
        for key, value in figures.items():
            if isinstance(value, list):  # slot_accuracy, held_out_slot_accuracy
                value = {f"slot_{slot:02d}": accuracy for slot, accuracy in enumerate(value, 1)}
            group, numbers = (key, value) if isinstance(value, dict) else ("train", {key: value})
            for name, number in numbers.items():
                if key != "step" and number is not None:
                    self.writer.add_scalar(f"{group}/{name}", number, step)
        self.bar.update(1)
        self.bar.set_postfix(loss=shown(figures["loss"], ".3f"), accept=f"{figures['acceptance_length']:.2f}")
        if step % self.log_every == 0:
            micro_batches, steps = figures["skipped_micro_batches"], figures["skipped_steps"]
            skips = f" skipped {micro_batches} micro-batches, {steps} steps" if micro_batches or steps else ""
            self.bar.write(
                f"step {step} loss {shown(figures['loss'], '.4f')} "
                f"acceptance_length {figures['acceptance_length']:.3f} "
                f"grad_norm {shown(figures['grad_norm'], '.3f')} lr {figures['learning_rate']:.2e} "
                f"tokens/s {figures['tokens_per_s']:.0f} waits target {figures['target_wait_share']:.0%} "
                f"drafter {figures['drafter_wait_share']:.0%}{skips}"
            )
        if "held_out_loss" in figures:
            self.bar.write(
                f"held out after step {step}: loss {shown(figures['held_out_loss'], '.4f')} "
                f"acceptance_length {figures['held_out_acceptance_length']:.3f}"
            )

    def to_disk(self) -> None:
        """Before a checkpoint is written: a run that goes on from it finds the metrics of all its steps."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.bar.close()
        self.file.close()
        self.writer.close()


@dataclass(frozen=True)
class Split:
    """A number of ranks divided into roles, and what each role alone would manage, in micro-batches a second."""

    num_targets: int
    num_drafters: int
    accumulation: int
    target_rate: float
    drafter_rate: float

    @property
    def rate(self) -> float:
        """Of the whole: the slower role's, as long as the slots even out what is not steady."""
        return min(self.target_rate, self.drafter_rate)


def rank_splits(num_ranks: int, micro_batches_per_step: int, target_ms: float, micro_ms: float, step_ms: float,
                target_tp: int = 1) -> list[Split]:  # fmt: skip
    """Every split of `num_ranks` into targets of `target_tp` ranks and drafters, the fastest first.

    target_ms: of one target and micro-batch. micro_ms: of one drafter and micro-batch, forward and backward.
    step_ms: of an optimizer step. Every split takes the accumulation nearest to `micro_batches_per_step`, at least 1.
    """
    splits = []
    for targets in range(1, (num_ranks - 1) // target_tp + 1):
        drafters = num_ranks - targets * target_tp
        accumulation = max(1, round(micro_batches_per_step / drafters))
        drafter_rate = 1e3 * drafters * accumulation / (accumulation * micro_ms + step_ms)
        splits.append(Split(targets, drafters, accumulation, 1e3 * targets / target_ms, drafter_rate))
    return sorted(splits, key=lambda split: -split.rate)


class SplitAdvisor:
    """--num-target-ranks measure: what both roles need in the run's first steps, and the split that this asks for."""

    WARM_UP, MEASURED = 2, 8  # steps

    def __init__(self, topology: Topology, control, args: Arguments):
        self.topology, self.control = topology, control
        self.accumulation = args.optimization.gradient_accumulation_steps
        self.in_line = not args.pipeline.async_postprocess
        self.steps = 0
        self.times: list[list[float]] = []  # by measured step, see `step_times`

    def add(self, record: StepRecord) -> Optional[str]:
        """Take in a step, on every drafter alike; after the last one measured, the advice."""
        self.steps += 1
        if self.WARM_UP < self.steps <= self.WARM_UP + self.MEASURED:
            self.times.append(self.step_times(record))
            if len(self.times) == self.MEASURED:
                return self.advice(*np.median(self.times, axis=0).tolist())
        return None

    def step_times(self, record: StepRecord) -> list[float]:
        """Milliseconds of one step: a target's for a micro-batch, a drafter's for one, and a drafter's once a step.

        Drafters wait for each other within the backward pass and the step; whoever comes last does not wait, so the
        shortest time of each stage over the drafters is what it takes.
        """
        spans = [span.ms() for name in ("forward", "backward", "step") for span in record.spans[name]]
        rest = max(0.0, record.wall_s * 1e3 - record.receive_wait_ms - sum(spans))
        shortest = torch.tensor([*spans, rest], dtype=torch.float64)
        self.control.allreduce([shortest], dist.ReduceOp.MIN).wait()
        busy = record.target_times["forward"] + (record.target_times["pack"] if self.in_line else 0.0)
        sums = torch.tensor([busy, record.target_times["micro_batches"]], dtype=torch.float64)
        self.control.allreduce([sums], dist.ReduceOp.SUM).wait()
        micro_ms = shortest[: 2 * self.accumulation].sum() / self.accumulation
        step_ms = shortest[2 * self.accumulation :].sum()
        return [float(sums[0] / sums[1].clamp(min=1)), float(micro_ms), float(step_ms)]

    def advice(self, target_ms: float, micro_ms: float, step_ms: float) -> str:
        """The one line that the user reads."""
        targets, drafters = self.topology.num_targets, self.topology.num_drafters
        batch = drafters * self.accumulation
        tp = self.topology.target_tp
        splits = rank_splits(self.topology.world_size, batch, target_ms, micro_ms, step_ms, tp)
        best, gain = splits[0], splits[0].rate / next(s.rate for s in splits if s.num_targets == targets)
        start = (
            f"ranks: a target needs {target_ms:.1f} ms for a micro-batch, a drafter {micro_ms:.1f} ms and "
            f"{step_ms:.1f} ms once a step (medians of {self.MEASURED} steps):"
        )
        if gain < 1.03:
            return f"{start} targets {targets} : drafters {drafters} is balanced within 3 %: keep"
        flags = f"--num-target-ranks {best.num_targets * tp} --gradient-accumulation-steps {best.accumulation}"
        if best.num_drafters * best.accumulation == batch:
            batch_note = f"the global batch stays at {batch} micro-batches, so the run may go on from its checkpoint"
        else:
            batch_note = (
                f"no accumulation keeps the global batch of {batch} micro-batches with {best.num_drafters} drafters: "
                f"it would be {best.num_drafters * best.accumulation}, so start anew in another --output-dir"
            )
        return (
            f"{start} {best.num_targets} : {best.num_drafters} would give about {gain:.2f}x of "
            f"{targets} : {drafters}: start again with {flags} ({batch_note})"
        )


# ======================================================================================================================
# 14. Drafter rank. In: hidden states in slots. Out: optimizer steps, metrics, checkpoints.
# ======================================================================================================================


def load_deepspeed_config(args: Arguments, device: torch.device) -> dict:
    """The DeepSpeed JSON with its 'auto' values filled from the flags. Raises UserError where the two disagree, or
    where DeepSpeed would train something else than asked for."""
    path = args.optimization.deepspeed
    try:
        config = read_json_object(Path(path))
    except DamagedFile as error:
        raise UserError(f"--deepspeed {path}: {error}") from None
    bf16 = device.type == "cuda"
    values = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.optimization.gradient_accumulation_steps,
        "gradient_clipping": args.optimization.max_grad_norm,
        "bf16": {"enabled": bf16},
    }
    for key, value in values.items():
        if key in config and config[key] not in ("auto", {"enabled": "auto"}, value):
            raise UserError(f"--deepspeed {path}: {key} is {config[key]}, the flags say {value}; write \"auto\" there")
        config[key] = value
    if "optimizer" in config or "scheduler" in config:
        raise UserError(f"--deepspeed {path}: optimizer and scheduler come from the flags; remove them there")
    config = without_auto(config)  # what else is "auto" keeps DeepSpeed's default
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    if stage not in (0, 1, 2, 3):
        raise UserError(f"--deepspeed {path}: zero_optimization needs a stage of 0, 1, 2 or 3")
    if bf16 and stage == 0:
        raise UserError("ZeRO 0 in bf16 keeps no exact fp32 masters in DeepSpeed: use stage 1, 2 or 3 on a GPU")
    if bf16:
        config["bf16"]["check_grad_overflow"] = True  # a step whose gradient is not finite is left out, by all drafters
    else:  # everything is fp32 on the CPU; naming a dtype here would only switch other code paths on
        config = {key: value for key, value in config.items() if key not in ("data_types", "communication_data_type")}
    return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False} | config


def inexact_sums(config: dict) -> Optional[str]:
    """How to have gradients summed in fp32, where a configuration of bf16 training does not say so."""
    wanted = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    types = config.get("data_types")
    accumulated = types.get("grad_accum_dtype") if isinstance(types, dict) else None
    if accumulated == config.get("communication_data_type") == "fp32":
        return None
    return f"gradients are accumulated or sent in bf16; for sums in fp32 add {json.dumps(wanted)[1:-1]}"


def without_auto(config: dict) -> dict:
    """The same without the keys, at any depth, whose value is "auto"."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value for key, value in config.items() if value != "auto"
    }


def drafter_group() -> SimpleNamespace:
    """What DeepSpeed asks of an `mpu`: the drafters as one data-parallel group that has our time-out, not its own."""
    together = dist.new_group(timeout=GROUP_TIMEOUT)
    alone = [dist.new_group([rank], timeout=GROUP_TIMEOUT) for rank in range(dist.get_world_size())][dist.get_rank()]
    return SimpleNamespace(
        get_data_parallel_group=lambda: together,
        get_data_parallel_rank=dist.get_rank,
        get_data_parallel_world_size=dist.get_world_size,
        get_model_parallel_group=lambda: alone,
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
    )


def compile_drafter(drafter: DFlashDrafter, ends: FrozenEnds) -> None:
    """Compile what a micro-batch runs: the drafter in its parts, and the loss over the head."""
    for module in (drafter.hidden_norm, *drafter.layers, drafter.norm):
        module.compile(dynamic=False, options=UNTIMED_KERNELS)
    ends.compiled = True


def build_engine(drafter: DFlashDrafter, ends: FrozenEnds, args: Arguments, fabric: Fabric):
    """The DeepSpeed engine over the drafter, with torch's AdamW, which needs no compiler."""
    # DeepSpeed 0.19 reads "9.0a" as a number and dies; the plain architecture serves as well.
    if "TORCH_CUDA_ARCH_LIST" in os.environ:
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d\.\d)[a-z]", r"\1", os.environ["TORCH_CUDA_ARCH_LIST"])
    if fabric.device.type == "cpu":  # else DeepSpeed takes a GPU wherever there is one
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.utils.logging.logger.setLevel("WARNING")
    # A shared-memory all-reduce that DeepSpeed would compile with g++ at the first start; gloo does as well here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optim, device = args.optimization, fabric.device
    config = load_deepspeed_config(args, device)
    if dist.get_world_size() == 1:  # nothing to overlap, and DeepSpeed would wait for the device after every backward pass
        config["zero_optimization"] = config.get("zero_optimization", {}) | {"overlap_comm": False}
    drafter.to(device, torch.bfloat16 if config["bf16"]["enabled"] else torch.float32)
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=optim.learning_rate, betas=(optim.adam_beta1, optim.adam_beta2),
        weight_decay=optim.weight_decay, fused=True,
    )  # fmt: skip
    if args.pipeline.compile and device.type == "cuda" and config["zero_optimization"]["stage"] < 3:
        compile_drafter(drafter, ends)  # under ZeRO 3 the gather hooks would break every graph
    try:
        engine, *_ = deepspeed.initialize(
            model=drafter, optimizer=optimizer, config=config, dist_init_required=False, mpu=drafter_group()
        )
    except (AssertionError, ValueError, TypeError) as error:  # pydantic's is a ValueError
        raise UserError(f"--deepspeed {optim.deepspeed}: {' '.join(str(error).split())[:300]}") from None
    # DeepSpeed ends a save with a barrier. `write_files` writes the files after it, so that a rank whose disk is full
    # reaches it, too. The tensors in `pending` are the live ones.
    files = engine.checkpoint_engine
    files.pending = []
    files.save = lambda state_dict, path: files.pending.append((Path(path), state_dict))
    files.load = lambda path, map_location=None: load_plain(Path(path))
    return engine


@dataclass
class MicroBatch:
    """One micro-batch after the drafter's forward pass."""

    plan: BatchPlan
    slot: Optional[Slot]  # None: it was not finite when it came
    loss: Tensor  # weighted sum
    blocks: Tensor  # `block_statistics`
    flags: Optional[StageFlags]  # None once they are read: they keep large tensors alive
    waited_s: float
    found: bool = False  # a stage on this rank was not finite


def warm_up_drafter(engine, ends, plan: BatchPlan, slot: Slot, config: DrafterConfig, args: Arguments) -> None:
    """Train on one micro-batch of zeros and forget it, and evaluate it where the run will: what compiles then does so at
    start, where the others wait for this rank without limit. No gradient reaches DeepSpeed. Under ZeRO 3, which gathers
    weights in real steps only and compiles attention alone, a drafter with one layer of each kind stands in."""
    model = engine.module
    if engine.zero_optimization_stage() == 3:
        kinds = tuple(sorted(set(config.layer_types)))
        shallow = dataclasses.replace(config, num_hidden_layers=len(kinds), layer_types=kinds)
        model = DFlashDrafter(shallow).to(slot.hidden.device, next(model.parameters()).dtype)
    batch = DrafterBatch.from_plan(plan, config, slot.hidden.device)
    features = torch.zeros_like(slot.hidden).view(slot.tokens, -1)
    dpace_alpha = args.data.dpace_alpha if args.data.loss_weights == "dpace" else None
    last = slot.verifier_last(plan.num_tokens)
    loss, _ = micro_batch_loss(model, ends, features, batch, last, dpace_alpha)
    torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    if args.data.eval_data:
        with torch.no_grad():
            micro_batch_loss(model, ends, features, batch, last, dpace_alpha)


class DrafterTrainer:
    """One drafter rank: receives its micro-batches in order and trains on them under DeepSpeed.

    What is not finite, with --on-nonfinite skip: a micro-batch that is bad before the drafter's forward pass goes
    through it as one of weight 0, so that every drafter makes the same number of micro-steps. One that is bad from then
    on makes the gradient bad, and a step with a bad gradient is taken by no drafter and does not move the learning
    rate's schedule.
    """

    def __init__(self, args, fabric, planner, engine, ends, receiver, config, stop_requested, guard, faults):
        self.args, self.fabric, self.planner = args, fabric, planner
        self.engine, self.ends, self.receiver, self.config = engine, ends, receiver, config
        self.stop_requested, self.guard, self.faults = stop_requested, guard, faults
        self.ahead: dict[int, DrafterBatch] = {}  # by m: of the next micro-batch
        # from the first step on, on any rank (unsupervised: without any trained slot), and skipped ones up to now
        self.counts = {"unsupervised_micro_batches": 0, "skipped_micro_batches": 0, "micro-batches in a row": 0,
                       "steps in a row": 0}  # fmt: skip
        if engine.zero_optimization_stage() < 3:
            guard.drafter_weights = self.own_weights

    def counters(self) -> dict[str, int]:
        """What is counted from the first step on, as a checkpoint keeps it: the same on every drafter."""
        return self.counts | {"skipped_steps": int(self.engine.skipped_steps)}

    def count_from(self, counters: dict[str, int]) -> None:
        """Go on counting from a checkpoint's `counters`."""
        self.engine.skipped_steps = counters.get("skipped_steps", 0)
        self.counts = {what: counters.get(what, 0) for what in self.counts}

    def own_weights(self) -> dict[str, Tensor]:
        """The drafter's weights as this rank holds them, on the host."""
        return {name: p.detach().cpu().clone() for name, p in self.engine.module.named_parameters()}

    def micro_batch(self, plan: BatchPlan, spans: list[Span]) -> MicroBatch:
        """Receive a micro-batch and run the drafter on it. `spans` receives the time of the forward pass."""
        device, data, flags = self.fabric.device, self.args.data, StageFlags()
        self.fabric.board.now(f"drafter forward pass of micro-batch {plan.m}")
        batch = self.ahead.pop(plan.m, None) or DrafterBatch.from_plan(plan, self.config, device)
        self.faults.before_forward(plan.m, device)
        waiting = time.perf_counter()
        slot = self.receiver.get(plan.m)
        waited_s = time.perf_counter() - waiting
        span = Span(device)
        if slot is None:
            batch = DrafterBatch.from_plan(plan.unsupervised(), self.config, device)
            features, last = self.receiver.empty_states()
        else:
            slot = self.faults.release_early(self.receiver.ring, slot, plan.m)
            features = drafter_features(slot, plan, self.args.pipeline.split_fc_layers)
            last = slot.verifier_last(plan.num_tokens)
        bad = flags.watch("drafter input", features, last)
        if self.guard.skips:  # 0 * NaN is NaN: the bad numbers themselves must go, not only their weights
            features, batch.weights = torch.where(bad, 0, features), torch.where(bad, 0, batch.weights)
            last = None if last is None else torch.where(bad, 0, last)
        self.faults.before_drafter(self.engine.module, plan.m)
        alpha = data.dpace_alpha if data.loss_weights == "dpace" else None
        loss, blocks = micro_batch_loss(self.engine, self.ends, features, batch, last, alpha, flags.watch)
        flags.watch("loss", loss)
        flags.send()
        spans.append(span.end())
        following = plan.m + self.fabric.topology.num_drafters  # made while the device is at work on this one
        if following < self.planner.end_m:
            self.ahead[following] = DrafterBatch.from_plan(self.planner.plan(following), self.config, device)
        return MicroBatch(plan, slot, loss, blocks, flags, waited_s)

    def settle(self, batch: MicroBatch) -> bool:
        """Whether all its stages were finite; its slot is free afterwards. Raises NonFiniteError unless bad ones are
        skipped.

        Waits for the forward pass, while the backward pass is already enqueued behind it.
        """
        bad, slot = batch.flags.first_bad(), batch.slot
        batch.flags, batch.found = None, bad is not None
        if bad is not None:
            stage, tensors = bad
            finding = self.guard.find_on_drafter(stage, batch.plan, tensors)
            layers = [] if slot is None else slot.layers(batch.plan.num_tokens, self.args.pipeline.split_fc_layers)
            states = [] if slot is None else self.guard.named(layers, slot.verifier_last(batch.plan.num_tokens))
            self.guard.report(finding, batch.plan, states, tensors[0] if stage == "drafter input" else None)
        if slot is not None:
            self.receiver.release(slot)
        return bad is None and slot is not None

    def mine(self, numbers: range) -> list[BatchPlan]:
        """The plans among `numbers` that this rank works on."""
        topology = self.fabric.topology
        return [self.planner.plan(m) for m in numbers if topology.drafter_of(m) == topology.role_rank]

    @torch.no_grad()
    def evaluate(self, numbers: range) -> dict:
        """Loss and acceptance estimate on the held-out documents: fixed micro-batches, fixed anchors, no noise."""
        self.engine.eval()
        stats = self.empty_stats(numbers)
        for plan in self.mine(numbers):
            batch = self.micro_batch(plan, [])
            self.add_to(stats, numbers, batch, self.settle(batch))
        self.fabric.board.now("evaluation, with the other drafters", self.fabric.topology.role_peers())
        dist.all_reduce(stats)
        self.engine.train()
        self.receiver.target_times = defaultdict(float)  # the next step's shares are its own
        figures, skipped = trained_figures(stats.cpu(), [self.planner.plan(m).weight_sum for m in numbers])
        self.count_in_a_row("micro-batches", skipped, start=0)
        figures["skipped_micro_batches"] = sum(skipped)
        return {f"held_out_{name}": value for name, value in figures.items()}

    def empty_stats(self, numbers: range) -> Tensor:
        """Zeros for what `trained_figures` reads."""
        size = 1 + 2 * self.config.block_size + len(numbers)
        return torch.zeros(size, dtype=torch.float64, device=self.fabric.device)

    def add_to(self, stats: Tensor, numbers: range, batch: MicroBatch, finite: bool) -> None:
        """Add a micro-batch of `numbers` to their statistics; one that is not finite, only to the skipped ones."""
        if finite:
            stats[: -len(numbers)] += torch.cat([batch.loss.detach().double()[None], batch.blocks])
        else:
            stats[batch.plan.m - numbers.stop] = 1

    def count_in_a_row(self, what: str, skipped: list[bool], start: int) -> int:
        """How many of `what` were skipped in a row up to the end of a stretch, with `start` before it.

        Raises NonFiniteError at --max-skips.
        """
        for skip in skipped:
            start = start + 1 if skip else 0
            if start == self.args.run.max_skips:
                raise NonFiniteError(f"{start} {what} in a row were not finite and skipped (--max-skips {start})")
        return start

    def train_step(self, step: int) -> StepRecord:
        """Consume this rank's micro-batches of a step and update the weights.

        The loss of a micro-batch is divided by the plan's weight of the whole global batch and multiplied by the number
        of drafters, because DeepSpeed averages gradients over ranks; it is told not to divide by the accumulation.
        """
        args, device, board, peers = self.args, self.fabric.device, self.fabric.board, self.fabric.topology.role_peers()
        started, waited_s = time.perf_counter(), 0.0
        skipped_before = self.engine.skipped_steps
        learning_rate = learning_rate_at(step - skipped_before, self.planner.total_steps, args.optimization)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        numbers = self.planner.micro_batches(step)
        plans, mine = [self.planner.plan(m) for m in numbers], self.mine(numbers)
        weights = [plan.weight_sum for plan in plans]  # their sum, the loss's divisor, is known in advance
        scale = self.fabric.topology.num_drafters / sum(weights) if sum(weights) > 0 else 0.0
        self.counts["unsupervised_micro_batches"] += sum(plan.num_anchors == 0 for plan in plans)
        stats, found = self.empty_stats(numbers), False
        spans, queue_depth = defaultdict(list), self.receiver.ready.qsize()
        for plan in mine:
            batch = self.micro_batch(plan, spans["forward"])
            waited_s += batch.waited_s
            board.now(f"backward pass of micro-batch {plan.m} in step {step + 1}, with the other drafters", peers)
            span = Span(device)
            self.engine.backward(batch.loss * scale, scale_wrt_gas=False)
            spans["backward"].append(span.end())
            self.add_to(stats, numbers, batch, self.settle(batch))
            found |= batch.found
            span = Span(device)
            grad_norm = self.apply_step(last=plan is mine[-1])
            spans["step"].append(span.end())
        if not (taken := self.engine.skipped_steps == skipped_before):
            self.explain_skipped_step(mine, found, grad_norm)
        dist.all_reduce(stats)
        host, ready = to_host(stats)
        times, self.receiver.target_times = self.receiver.target_times, defaultdict(float)
        extras = {
            "skipped_steps": int(self.engine.skipped_steps),
            "skipped_micro_batches": self.counts["skipped_micro_batches"],  # `count_skips` adds this step's
            "unsupervised_micro_batches": self.counts["unsupervised_micro_batches"],
            "dropped_rows": sum(self.planner.documents.dropped.values()),
            "epoch": self.planner.locate_pack((step + 1) * len(plans) - 1)[0],
        }
        on_gpu = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        extras["memory_gb"] = peak / 1e9  # of this rank: peak on its GPU, or of its process
        return StepRecord(
            step, learning_rate, plans[0].noise_std, weights, sum(p.num_tokens for p in plans),
            sum(p.num_tokens for p in mine), host, ready, grad_norm, taken, spans, waited_s * 1e3,
            time.perf_counter() - started, queue_depth, times, extras,
        )  # fmt: skip

    def apply_step(self, last: bool):
        """One micro-step of DeepSpeed; with the `last` of a step the weights move, and the gradient's norm is returned.

        Where that is not finite, no drafter's weights move and each counts one more in `engine.skipped_steps`.
        """
        engine, grad_norm = self.engine, None
        if last and engine.zero_optimization_stage() == 0:  # DeepSpeed keeps no norm there, and takes every step
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters()])
            if not math.isfinite(grad_norm):
                engine.optimizer.step = lambda: None  # hides the method of its class, this once
                engine.skipped_steps += 1
        engine.step()
        vars(engine.optimizer).pop("step", None)
        if last and engine.zero_optimization_stage() > 0:
            grad_norm = engine.get_global_grad_norm()
        return grad_norm

    def explain_skipped_step(self, mine: list[BatchPlan], found: bool, grad_norm) -> None:
        """Report the gradient of a step that was not taken, unless any drafter `found` an earlier stage to be bad.

        Without --on-nonfinite skip such a drafter has ended the run, and its line is the first cause: others wait here.
        """
        if not self.any_drafter(found):
            for plan in mine:
                self.guard.report(self.guard.finding("gradient", plan, f"norm {float(grad_norm)}"), plan)

    def any_drafter(self, says_so: bool) -> bool:
        """Whether any drafter says so; agreed by all, so that they go on alike."""
        flag = torch.tensor([int(says_so)])
        self.fabric.role_control.allreduce([flag], dist.ReduceOp.MAX).wait()
        return bool(flag.item())

    def count_skips(self, record: StepRecord) -> None:
        """Count what a step left out, alike on every drafter. Raises NonFiniteError at --max-skips in a row."""
        skipped = record.results[1]
        self.counts["skipped_micro_batches"] += sum(skipped)
        record.extras["skipped_micro_batches"] = self.counts["skipped_micro_batches"]
        for what, skips in (("micro-batches", skipped), ("steps", [not record.taken])):
            self.counts[f"{what} in a row"] = self.count_in_a_row(what, skips, self.counts[f"{what} in a row"])

    def check_weights(self) -> None:
        """Raise NonFiniteError, naming the first, where a weight is not finite: nothing of the kind is ever saved."""
        import deepspeed

        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
                if not math.isfinite(largest(parameter)):
                    raise NonFiniteError(f"drafter weight {name} is not finite: not saved")

    def train(self, first_step: int, identity: dict) -> None:
        """Steps up to the last, or up to where a signal ends the run; the step reached is always saved."""
        args, board, total = self.args, self.fabric.board, self.planner.total_steps
        monitor = Monitor(args, first_step, total) if self.fabric.topology.role_rank == 0 else None
        pending, step = None, first_step
        measures = args.pipeline.num_target_ranks == "measure"
        advisor = SplitAdvisor(self.fabric.topology, self.fabric.role_control, args) if measures else None

        def settle(record: Optional[StepRecord]) -> None:
            if record is not None:
                self.count_skips(record)
                advice = advisor.add(record) if measures else None
                if monitor is not None:
                    monitor.write(record)
                    if advice is not None:
                        monitor.bar.write(advice)

        while step < total:
            record = self.train_step(step)
            board.now(f"end of step {step + 1}, with the other drafters", self.fabric.topology.role_peers())
            settle(pending)
            pending, step = record, step + 1
            if numbers := self.planner.evaluation_after(step):
                record.extras |= self.evaluate(numbers)
            # a signal of its own, or one that a target saw
            stop = self.any_drafter(self.stop_requested.is_set() or self.receiver.target_asked_stop.is_set())
            due = args.run.save_every and step % args.run.save_every == 0
            if due or stop or step == total:
                settle(pending)
                pending = None
                board.now(f"saving step {step}", may_last=True)
                self.check_weights()
                self.faults.before_save(self.planner.micro_batches(step - 1).stop - 1)
                if monitor is not None:
                    monitor.to_disk()
                counters = self.counters()
                path = save_checkpoint(self.engine, step, args, identity, self.config, self.fabric, counters)
                if monitor is not None and (stop or step == total):
                    monitor.bar.write(f"checkpoint: {path}")
            if stop:
                break
        board.now("ending the streams", HELPER)
        self.receiver.finish()
        if monitor is not None:
            if measures and len(advisor.times) < advisor.MEASURED:
                needed = advisor.WARM_UP + advisor.MEASURED
                monitor.bar.write(f"ranks: {advisor.steps} steps are too few to measure a split: {needed} are needed")
            if step < total:
                monitor.bar.write(f"stopped by a signal after step {step} of {total}; the same command goes on from it")
            monitor.close()


# ======================================================================================================================
# 15. Main. In: a command line. Out: this rank in its role, until the end of the run or of its first failure.
# ======================================================================================================================


def announce(args: Arguments, topology, device, planner, config, first_step: int) -> None:
    """Print the resolved configuration once, and write it to the output folder as YAML that --config reads."""
    folder = Path(args.run.output_dir)
    (folder / "config.yaml").write_text(yaml.safe_dump(args.flat(), sort_keys=False))
    print("settings: " + " ".join(f"{key}={value}" for key, value in args.flat().items()))
    of_ranks = f" (of {topology.target_tp} ranks each)" if topology.target_tp > 1 else ""
    print(f"ranks: {topology.num_targets} target{of_ranks} + {topology.num_drafters} drafter on {device.type}")
    if len(set(topology.nodes)) > 1:
        print(describe_traffic(args, topology, planner, config))
    print(f"data: {planner.documents.summary()}")
    if planner.held_out is not None:
        print(f"held out: {planner.held_out.summary()}")
    print(
        f"drafter: {config.describe_layers()}, block {config.block_size}, reads target layers "
        f"{list(config.target_layer_ids)} of {config.num_target_layers}, mask token {config.mask_token_id}"
    )
    if first_step >= planner.total_steps:
        more = "--max-steps" if args.optimization.num_epochs is None else "--num-epochs"
        ways = f"a larger {more} goes on, another --output-dir starts anew"
        print(f"nothing to do: {folder} holds step {first_step}; {ways}")
    start = f" from step {first_step}" if first_step else ""
    steps, size = planner.total_steps, planner.micro_batches_per_step
    passes = f"{steps * size / len(planner.epoch(0)):.3g} passes over the data"
    print(f"run: {steps} steps{start} of {size} micro-batches, {passes}", flush=True)
    if not args.run.save_every:
        print("checkpoints: after the last step alone, so a crash would lose the run (--save-every)", flush=True)


def describe_traffic(args: Arguments, topology: Topology, planner: Planner, config: DrafterConfig) -> str:
    """Two lines: which roles live on which node, and what crosses between nodes in a step."""
    places = defaultdict(Counter)
    for rank, node in enumerate(topology.nodes):
        places[node, topology.hosts[rank]][topology.of(rank).role] += 1
    layout = [f"{host} {n['target']} target + {n['drafter']} drafter" for (_, host), n in sorted(places.items())]
    layers = len(config.target_layer_ids) + (args.data.loss == "kl")
    row_bytes = layers * config.hidden_size * getattr(torch, args.target.target_dtype).itemsize
    step_mb, share = planner.micro_batches_per_step * planner.tokens * row_bytes / 1e6, topology.crossings().mean()
    gradients = "cross nodes" if len({topology.nodes[r] for r in topology.ranks_of["drafter"]}) > 1 else "stay on one"
    return (
        f"nodes ({args.pipeline.placement}): {', '.join(layout)}\n"
        f"traffic: up to {step_mb:.1f} MB of hidden states a step, of which {step_mb * share:.1f} MB ({share:.0%}) "
        f"cross nodes; gradients {gradients}"
    )


def run_role(args: Arguments, topology: Topology, fabric: Fabric, stop_requested: threading.Event) -> None:
    """Everything after the flags: shared start, then this rank's role to its end."""
    device, faults = fabric.device, FaultInjector(args.pipeline, topology)
    fabric.board.now("reading settings, tokenizer and data", may_last=True)
    fabric.check_same_everywhere("set-up", set_up_of(args, device))
    shared = shared_folder(Path(args.run.output_dir), topology, fabric.store)
    check_shared_by_drafters(Path(args.run.output_dir), shared, topology)
    target_config = load_target_config(args.target)
    settle_target_dtype(args.target, target_config, device)
    text_config = target_config.get_text_config()
    check_target_tp(target_config, topology.target_tp)
    tokenizer = load_tokenizer(args.target)
    config = choose_drafter_config(args, text_config, tokenizer)
    check_tiles(args, device)
    deepspeed_config = load_deepspeed_config(args, device)
    if topology.rank == 0 and device.type == "cuda" and (warning := inexact_sums(deepspeed_config)):
        print(f"warning: --deepspeed {args.optimization.deepspeed}: {warning}", flush=True)
    documents = load_documents(
        args.data.train_data or [str(DEMO_DATA)], args, tokenizer, topology, fabric.store, "train", shared
    )
    held_out = None
    if args.data.eval_data:
        held_out = load_documents(args.data.eval_data, args, tokenizer, topology, fabric.store, "eval", shared)
    if topology.rank == 0:
        check_data(documents, held_out, config.mask_token_id)
        check_rope(text_config, max(part.lengths.max() for part in (documents, held_out) if part is not None))
    planner = Planner(documents, args, topology.num_drafters, held_out)
    identity = run_identity(args, documents, config, topology.num_drafters)
    resumed = choose_checkpoint(args, identity, fabric)
    first_step = resumed.step if resumed else 0
    course = {"first step": first_step, "steps": planner.total_steps, "shared GPUs": fabric.shares_gpus,
              "held-out data": held_out and held_out.fingerprint, "eval_every": args.data.eval_every}  # fmt: skip
    fabric.check_same_everywhere("run", identity | course)
    fabric.connect()
    fabric.board.now("loading and warming up the model", may_last=True)

    ring = SlotRing(
        0 if topology.role == "target shard" else args.pipeline.prefetch_depth, tokens=planner.tokens,
        num_layers=len(config.target_layer_ids), hidden_size=text_config.hidden_size, with_last=args.data.loss == "kl",
        dtype=target_config.dtype, device=device, staged=fabric.shares_gpus, poison=args.pipeline.poison_slots,
    )  # fmt: skip
    guard = Guard(args, topology, planner, config)
    faults.check_end(planner.end_m)
    first_m = planner.first_m(first_step)
    if topology.role != "drafter":
        runner = load_runner(args, target_config, config, fabric, planner, first_m)
        fabric.start()
        if topology.role == "target shard":
            run_target_shard(fabric, planner, runner, first_m)
        else:
            run_target_rank(args, fabric, planner, runner, ring, first_m, stop_requested, guard, faults)
        return
    if topology.role_rank == 0:
        announce(args, topology, device, planner, config, first_step)
    ends = load_frozen_ends(args.target, target_config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    engine = build_engine(build_drafter(config, args), ends, args, fabric)
    if resumed is not None:
        load_checkpoint(engine, resumed)
    if first_m < planner.end_m:
        warm_up_drafter(engine, ends, planner.plan(first_m), ring.slots[0], config, args)
    fabric.start()
    receiver = HiddenStateReceiver(fabric, ring, planner, first_m, args.pipeline, guard)
    trainer = DrafterTrainer(args, fabric, planner, engine, ends, receiver, config, stop_requested, guard, faults)
    if resumed is not None:
        trainer.count_from(resumed.counters)
    trainer.train(first_step, identity)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def request_stop_on_signals() -> threading.Event:
    """An event that SIGTERM, SIGUSR1 and the first Ctrl-C set: finish the step, save, exit 0."""
    requested, seen = threading.Event(), []

    def handler(number, frame):
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not seen:
            seen.append(number)  # first: a signal that comes while the event is being set must not wait for its lock
            requested.set()

    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    return requested


def main() -> int:
    topology = board = None
    try:
        faulthandler.enable()  # a crash in native code shows where it was
        args = parse_arguments()
        on_one_node = read_topology(args.pipeline.num_target_ranks, args.pipeline.target_tp)
        limit_s = max(args.pipeline.transport_timeout, SILENT_S)
        store, board_store = open_store(on_one_node, timedelta(seconds=limit_s))
        topology = lay_over_nodes(on_one_node, store, args.pipeline.placement, limit_s)
        board = FailureBoard(topology, board_store, args.pipeline.transport_timeout)
        stop_requested = request_stop_on_signals()
        device, shares_gpus = choose_device(args.pipeline.device, topology)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        choose_target(args.target)
        fabric = Fabric(topology, device, shares_gpus, store, board)
        run_role(args, topology, fabric, stop_requested)
        fabric.close()
        for number in STOP_SIGNALS:  # may come more than once, and the interpreter's end takes the handler away
            signal.signal(number, signal.SIG_IGN)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, (UserError, TransportError, NonFiniteError)) and not PEER_GONE.search(str(error)):
            traceback.print_exc()
        who = f"[{topology}] " if topology else ""
        cause = board.report(error) if board else f"{who}{first_line(error)}"
        if board is None:
            tell_other_nodes(f"[rank {os.environ.get('RANK')} on {socket.gethostname()}] {cause}")
        own = cause.startswith(who)
        line = f"{who}error: {cause.removeprefix(who)}" if own else f"{who}stopping: {cause}"
        print(f"\n{line}" if board else line, file=sys.stderr, flush=True)  # a progress bar may stand in the last line
        os._exit(1)  # no destructor may wait for a peer that is gone


if __name__ == "__main__":
    sys.exit(main())
