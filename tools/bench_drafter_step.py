"""Time one drafter step with random weights in real shapes, against what the machine's matrix products allow.

    # Qwen3-8B's shape: 5 layers, 4,096 context tokens of one document, 512 anchors x 16, cross-entropy
    python tools/bench_drafter_step.py --target qwen3-8b-shape --tokens-per-micro-batch 4096 --anchors-per-micro-batch 512

    # an optimizer step under DeepSpeed over 4 micro-batches, with the steps of SpecForge and TorchSpec beside it
    pip install --no-deps specforge && git clone https://github.com/lightseekorg/TorchSpec
    PYTHONPATH=TorchSpec python tools/bench_drafter_step.py --target qwen3-8b-shape --tokens-per-micro-batch 4096 \\
        --anchors-per-micro-batch 512 --gradient-accumulation-steps 4 --specforge --torchspec --json step.json

    # a toy on the CPU
    python tools/bench_drafter_step.py --device cpu

Every flag of the pipeline is understood. The ceiling is a matrix product measured in the same run; the floor is the
operations that a step needs, counted from the plan (visible pairs of tokens alone for attention; no gradient for frozen
weights and inputs; nothing for slots that nothing reads), at that rate. Times are medians over --repeats after --warm-up
repetitions that compile.

`forward_backward` is the bare model, gradients and no optimizer: what is timed of the peers, too. `micro_batch` is the same
under DeepSpeed, `optimizer_step` all micro-batches and the update. Memory of forward and backward, ours and the peers':
weights, the target's ends, the input, and the most that a step adds to them. Peers draw their anchors per document; with
the default --documents 1 all have the same work.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import statistics
import sys
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import train_dflash_pipeline as pipeline
from check_pipeline_equiv import flag_given
from train_dflash_pipeline import UserError


def matrix_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product: 8192^3 on a GPU, long enough for its clocks to settle; 1024^3 on a CPU."""
    n, repeats = (8192, 300) if device.type == "cuda" else (1024, 10)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / (1e-3 * median_ms(lambda: a @ b, device, repeats, warm_up=repeats // 3))


def median_ms(work, device: torch.device, repeats: int, warm_up: int) -> float:
    for _ in range(warm_up):
        work()
    spans = []
    for _ in range(repeats):
        span = pipeline.Span(device)
        work()
        spans.append(span.end())
    return statistics.median(span.ms() for span in spans)


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def visible_pairs(plan: pipeline.BatchPlan, config: pipeline.DrafterConfig) -> int:
    """(slot, key) pairs that attention must compute, over all layers: the used blocks, of the last layer trained slots."""
    used, pairs = plan.num_anchors * config.block_size, 0
    trained = plan.weights.ravel()[:used] > 0
    for number, kind in enumerate(config.layer_types, 1):
        window = config.sliding_window if kind == "sliding_attention" else None
        lo, hi, own_lo, own_hi = pipeline.visibility(plan, config.block_size, window)[:, :used].astype(np.int64)
        seen = hi - lo + own_hi - own_lo
        pairs += int(seen[trained].sum() if number == config.num_hidden_layers else seen.sum())
    return pairs


def step_flops(plan: pipeline.BatchPlan, config: pipeline.DrafterConfig) -> float:
    """Operations of a forward and backward pass that no implementation can leave out.

    A trained matrix costs 2 FLOP a weight and row in the forward pass, as much again for its own gradient, and again for
    its input's gradient, which the captured states do not need; the frozen head has no gradient of its own. In the last
    layer slots that are not trained are keys and values only, and the head does not see them.
    """
    c, n, slots = config, plan.num_tokens, plan.num_anchors * config.block_size
    trained = int((plan.weights > 0).sum())
    q, kv = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    queries = c.hidden_size * (2 * q + 3 * c.intermediate_size)  # weights: q, o and the MLP
    rows = slots * (c.num_hidden_layers - 1) + trained
    fc = 2 * n * len(c.target_layer_ids) * c.hidden_size**2
    keys = 2 * (n + slots) * c.hidden_size * kv * c.num_hidden_layers
    attention = 4 * visible_pairs(plan, c) * q
    head = 2 * trained * c.hidden_size * c.vocab_size
    return 2 * fc + 3 * (keys + 2 * rows * queries + attention) + 2 * head


def make_plan(args: pipeline.Arguments, num_documents: int) -> pipeline.BatchPlan:
    """A full micro-batch of supervised documents of mixed lengths."""
    n, rng = args.data.tokens_per_micro_batch, np.random.default_rng(0)
    if not 1 <= num_documents <= n // 2:
        raise UserError(f"--documents {num_documents}: 1 to {n // 2} fit {n} tokens")
    cuts = 2 * np.sort(rng.choice(np.arange(1, n // 2), size=num_documents - 1, replace=False))
    offsets = np.array([0, *cuts, n])
    ids = rng.integers(0, 256, n).astype(np.int32)
    documents = pipeline.Documents(ids, np.ones(n, bool), offsets, np.arange(num_documents), {})
    return pipeline.Planner(documents, args, num_drafters=1).plan(0)


class Bench:
    """The pieces of a drafter rank, without a target and without transport."""

    def __init__(self, args: pipeline.Arguments, device: torch.device, num_documents: int = 1):
        self.args, self.device = args, device
        target_config = pipeline.load_target_config(args.target)
        pipeline.settle_target_dtype(args.target, target_config, device)
        text = target_config.get_text_config()
        self.config = pipeline.choose_drafter_config(args, text, pipeline.load_tokenizer(args.target))
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.plan = make_plan(args, num_documents)
        self.ends = pipeline.load_frozen_ends(args.target, target_config, device, self.dtype)
        shape = (len(self.plan.token_ids), len(self.config.target_layer_ids) * self.config.hidden_size)
        self.features = torch.randn(shape, device=device, dtype=self.dtype)
        self.alpha = args.data.dpace_alpha if args.data.loss_weights == "dpace" else None
        self.spans: dict[str, list[pipeline.Span]] = defaultdict(list)
        self.engine = self.ahead = None

    def build_engine(self) -> None:
        fabric = SimpleNamespace(device=self.device)
        self.engine = pipeline.build_engine(pipeline.build_drafter(self.config, self.args), self.ends, self.args, fabric)

    @contextlib.contextmanager
    def span(self, stage: str):
        span = pipeline.Span(self.device)
        yield
        self.spans[stage].append(span.end())

    def loss(self, model: nn.Module) -> Tensor:
        """The forward pass, and behind it, as a drafter rank does, what the next one needs."""
        batch = self.ahead or pipeline.DrafterBatch.from_plan(self.plan, self.config, self.device)
        with self.span("forward_and_loss"):
            loss, _ = pipeline.micro_batch_loss(model, self.ends, self.features, batch, None, self.alpha)
        with self.span("next_mask_and_copies"):
            self.ahead = pipeline.DrafterBatch.from_plan(self.plan, self.config, self.device)
        return loss / self.plan.weight_sum

    def forward_backward(self) -> None:
        """Gradients of the bare model: DeepSpeed sees nothing of it."""
        model = self.engine.module
        loss = self.loss(model)
        with self.span("backward"):
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    def micro_batch(self) -> None:
        """Mask, forward, loss, backward and DeepSpeed's part: what a drafter rank does with received states."""
        loss = self.loss(self.engine)
        with self.span("backward"):
            self.engine.backward(loss, scale_wrt_gas=False)
        last = self.engine.is_gradient_accumulation_boundary()
        with self.span("update" if last else "micro_step"):
            self.engine.step()

    def step(self) -> None:
        """A whole optimizer step: every micro-batch, then the update."""
        for _ in range(self.args.optimization.gradient_accumulation_steps):
            self.micro_batch()

    def take_stages(self) -> dict[str, float]:
        """Median milliseconds by stage since the last call."""
        stages = {name: statistics.median(s.ms() for s in spans) for name, spans in self.spans.items()}
        self.spans.clear()
        return stages

    def held_bytes(self, parameters) -> int:
        """Bytes of a model's weights, the target's ends and the input."""
        tensors = [*parameters, self.ends.embedding, self.ends.head_weight, self.features]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def specforge_peer(bench: Bench):
    """(loss of SpecForge's model on the bench's micro-batch, its draft model). Raises ImportError."""
    from compare_specforge import Reference

    reference = Reference(bench.args, bench.config, bench.ends, bench.device, bench.dtype, total_steps=1000)
    del reference.optimizer  # its fp32 masters
    reference.model.num_anchors = max(1, round(bench.plan.num_anchors / len(bench.plan.lengths)))
    return lambda: reference.loss(bench.plan, bench.features), reference.drafter


def stub_missing(*names: str) -> None:
    """Modules that hold nothing of use, in place of packages that a peer imports and a step does not need."""
    anything = {"__init__": lambda self, *_, **__: None, "__call__": lambda self, *_, **__: self}
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__getattr__ = lambda attribute: type(attribute, (), anything)


def torchspec_peer(bench: Bench):
    """(loss of TorchSpec's model on the bench's micro-batch, its draft model). Raises ImportError."""
    stub_missing("wandb", "openai", "datasets", "numba")
    from torchspec.models.dflash import DFlashModel
    from torchspec.models.draft.dflash import DFlashConfig, DFlashDraftModel

    c, plan = bench.config, bench.plan
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "mask_token_id")  # fmt: skip
    config = DFlashConfig(
        **{name: getattr(c, name) for name in same}, target_hidden_size=c.hidden_size, tie_word_embeddings=False,
        num_target_layers=len(c.target_layer_ids), target_layer_ids=list(c.target_layer_ids),
        max_position_embeddings=2 * plan.num_tokens + plan.num_anchors * c.block_size,
    )  # fmt: skip
    drafter = DFlashDraftModel(config).to(bench.device, bench.dtype)
    drafter.embed_tokens.weight = nn.Parameter(bench.ends.embedding, requires_grad=False)
    anchors = max(1, round(plan.num_anchors / len(plan.lengths)))
    gamma = bench.args.data.loss_gamma or pipeline.loss_gamma(c.block_size)
    model = DFlashModel(drafter, c.block_size, anchors, gamma)

    def rows(packed: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence(packed[: plan.num_tokens].split(plan.lengths.tolist()), batch_first=True)

    def loss() -> Tensor:
        ids, mask = (rows(pipeline.to_device(torch.from_numpy(x), bench.device)) for x in (plan.token_ids, plan.loss_mask))
        states = list(rows(bench.features).split(c.hidden_size, dim=2))
        return model(ids, states, mask.float(), bench.ends.head_weight)[0]

    return loss, drafter


PEERS = {"specforge": (specforge_peer, "pip install --no-deps specforge"),
         "torchspec": (torchspec_peer, "put a clone of github.com/lightseekorg/TorchSpec on PYTHONPATH")}  # fmt: skip


def peak_gb(bench: Bench, work, parameters) -> float | None:
    """GB of weights, ends and input, and the most that `work` adds to what is allocated; None on the CPU."""
    if bench.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before + bench.held_bytes(parameters)) / 1e9


def measure_peer(bench: Bench, name: str, times: dict) -> dict:
    """Forward and backward of a peer as it is, and with its draft model compiled; the peak of the faster."""
    build, hint = PEERS[name]
    try:
        loss, drafter = build(bench)
    except ImportError as error:
        raise UserError(f"{name} is missing ({pipeline.first_line(error)}): {hint}") from None

    def work():
        loss().backward()
        drafter.zero_grad()

    parameters, result = list(drafter.parameters()), {}

    def time_it(how: str) -> tuple[float, float | None]:
        result[f"{name}_{how}_ms"] = median_ms(work, **times)
        return result[f"{name}_{how}_ms"], peak_gb(bench, work, parameters)

    best = time_it("eager")
    if bench.args.pipeline.compile and bench.device.type == "cuda":
        drafter.compile()
        try:
            best = min(best, time_it("compiled"))
        except RuntimeError as error:
            result[f"{name}_compiled"] = f"failed: {pipeline.first_line(error)}"
    result[f"{name}_ms"], result[f"{name}_peak_gb"] = best
    return result


def measure_ours(bench: Bench, options: argparse.Namespace, ceiling: float) -> dict:
    device, accumulation = bench.device, bench.args.optimization.gradient_accumulation_steps
    repeats, warm_up = options.repeats, options.warm_up
    flops = step_flops(bench.plan, bench.config)
    bench.build_engine()
    if bench.engine.zero_optimization_stage() == 3:
        raise UserError("--deepspeed: ZeRO 3 keeps no whole weights for the bare model; use stage 1 or 2")

    def timed(work) -> tuple[float, dict]:
        median_ms(work, device, warm_up, warm_up=0)
        bench.take_stages()
        return median_ms(work, device, repeats, warm_up=0), bench.take_stages()

    bare_ms, bare_stages = timed(bench.forward_backward)
    bare_gb = peak_gb(bench, bench.forward_backward, bench.engine.module.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    graphs = compiled_graphs()
    whole_ms, stages = timed(bench.step)
    return {
        "forward_backward_ms": bare_ms,
        "share_of_ceiling": flops / ceiling / (bare_ms / 1e3),
        "forward_backward_peak_gb": bare_gb,
        "forward_backward_stages_ms": bare_stages,
        "micro_batch_ms": sum(ms for name, ms in stages.items() if name not in ("update", "micro_step")),
        "optimizer_step_ms": whole_ms,
        "optimizer_and_zero_share": 1 - accumulation * bare_ms / whole_ms,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        "stages_ms": stages,
        "graphs_compiled_in_steps": compiled_graphs() - graphs,
    }


def measure(bench: Bench, options: argparse.Namespace, peers: list[str]) -> dict:
    """All figures, one after the other; the peers first, so that each has the device for itself."""
    times = dict(device=bench.device, repeats=options.repeats, warm_up=options.warm_up)
    bar = tqdm(total=2 + len(peers), unit="measurement", disable=None)

    def announce(what: str) -> None:
        bar.set_description(what)
        bar.refresh()

    announce("matrix products")
    ceiling, flops = matrix_ceiling(bench.device, bench.dtype), step_flops(bench.plan, bench.config)
    cuda = bench.device.type == "cuda"
    result = {
        "device": torch.cuda.get_device_name(bench.device) if cuda else "CPU",
        "context_tokens": bench.plan.num_tokens,
        "documents": len(bench.plan.lengths),
        "blocks": bench.plan.num_anchors,
        "ceiling_tflops": ceiling / 1e12,
        "useful_tflop": flops / 1e12,
        "floor_ms": 1e3 * flops / ceiling,
    }
    for peer in peers:
        bar.update()
        announce(peer)
        result |= measure_peer(bench, peer, times)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    bar.update()
    announce("this drafter")
    result |= measure_ours(bench, options, ceiling)
    for peer in peers:
        result[f"times_as_fast_as_{peer}"] = result[f"{peer}_ms"] / result["forward_backward_ms"]
    bar.update()
    bar.close()
    return result


def show(figures: dict, indent: str = "") -> None:
    """Print figures, one a line."""
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{indent}{name}", flush=True)
            show(value, indent + "    ")
        else:
            print(f"{indent}{name:{36 - len(indent)}} {value:.4g}" if isinstance(value, float)
                  else f"{indent}{name:{36 - len(indent)}} {value}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--documents", type=int, default=1, help="documents of the micro-batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="timed repetitions (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="repetitions before them (default: %(default)s)")
    parser.add_argument("--specforge", action="store_true", help="time SpecForge's model on the same micro-batch, too")
    parser.add_argument("--torchspec", action="store_true", help="time TorchSpec's model on the same micro-batch, too")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options, flags = parser.parse_known_args()
    if min(options.repeats, options.warm_up) < 1:
        raise UserError("--repeats and --warm-up must be at least 1")
    args = pipeline.parse_arguments([*([] if flag_given(flags, "--target") else ["--target=toy"]), *flags])
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: no such folder")
    if args.data.loss != "ce":
        raise UserError("--loss kl needs the target's last layer: only the cross-entropy step can be timed alone")
    device = torch.device("cuda" if args.pipeline.device != "cpu" and torch.cuda.is_available() else "cpu")
    if args.pipeline.device == "cuda" and device.type != "cuda":
        raise UserError("--device cuda: no GPU was found")
    pipeline.choose_target(args.target)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    pipeline.check_tiles(args, device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    bench = Bench(args, device, options.documents)
    result = measure(bench, options, [name for name in PEERS if getattr(options, name)])
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
