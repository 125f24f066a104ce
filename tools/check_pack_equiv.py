"""Check that every way of packing captured hidden states gives the same bits. No model, no job, no download.

    # lengths 17 9 13 4 16, then 200 random cases, in fp32, bf16 and fp16
    python tools/check_pack_equiv.py

    # lengths and a seed of your own, on a GPU
    python tools/check_pack_equiv.py --lengths 3 1 8 --cases 1000 --seed 7 --device cuda

    # see it fail
    python tools/check_pack_equiv.py --inject-fault off-by-one

A `HookCapture` is made with `HookCapture.__new__` and given random "captured layers" by hand; their padding is NaN, so
that a row taken from it cannot pass unseen. Against a plain Python loop over documents and tokens are compared

    packed         get_hidden_states_packed
    layer packs    get_hidden_state_layer_packs, layer by layer
    slot           what the sender writes into its slot, joined on the target or split, from one or several forward
                   passes, and copied as bytes into a dirty slot of the receiver
    features       what the drafter reads out of that slot: noise added on the target or on the drafter, tail zeroed

verifier_last included, bit for bit. Ends with PASS, or with FAIL and the first (layer, document, token) that differs;
exit code 0 or 1.
"""

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator, Optional

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import HookCapture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAULTS = {
    "off-by-one": "layer packs gather every row one too far",
    "noise-seed": "the drafter's side draws its noise from another seed",
    "swap-layers": "the sender swaps the first two layers when it splits",
}


class Different(Exception):
    """Two paths differ; the text says where first."""


class Case:
    """Random captured layers for documents of the given lengths, and the answer by a plain loop."""

    def __init__(self, lengths: list[int], rng: np.random.Generator, dtype: torch.dtype, device: str, layers=None):
        self.lengths, self.device, self.n = lengths, device, sum(lengths)
        self.hidden_size = int(rng.integers(1, 33))
        count = layers or int(rng.integers(1, 7))
        self.layer_ids = tuple(sorted(rng.choice(40, count, replace=False).tolist()))
        # the last layer may be among the captured ones, or not wanted at all
        self.last_layer = [None, self.layer_ids[-1], 40][int(rng.integers(3))] if layers is None else 40
        self.tail = int(rng.integers(0, 9))  # padded rows of the packed micro-batch
        self.cuts = sorted(set(rng.integers(0, len(lengths) + 1, 2).tolist()) | {0, len(lengths)})
        longest = max(lengths) + int(rng.integers(0, 4))
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
        self.captured = {}
        for layer in {*self.layer_ids, *([] if self.last_layer is None else [self.last_layer])}:
            states = torch.randn(len(lengths), longest, self.hidden_size, generator=generator, device=device).to(dtype)
            for document, length in enumerate(lengths):
                states[document, length:] = float("nan")
            self.captured[layer] = states
        self.plan = SimpleNamespace(
            m=0, num_tokens=self.n, lengths=np.array(lengths), noise_std=float(rng.choice([0.0, 0.05, 1.0])),
            noise_seed=int(rng.integers(2**62)),
        )  # fmt: skip
        self.places = [(document, token) for document, length in enumerate(lengths) for token in range(length)]

    def capture(self, documents: slice = slice(None)) -> HookCapture:
        """What one forward pass over these documents leaves behind."""
        shot = HookCapture.__new__(HookCapture)
        shot.fc_layer_ids, shot.verifier_last_layer = self.layer_ids, self.last_layer
        shot.captured = {layer: states[documents] for layer, states in self.captured.items()}
        return shot

    def naive(self, layer: int) -> Tensor:
        """[n, H] of one layer, by a loop."""
        return torch.stack([self.captured[layer][document, token] for document, token in self.places])

    def compare(self, path: str, layer, got: Tensor, want: Tensor) -> None:
        """Raise Different at the first row whose bits differ."""
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Different(f"{path}: {list(got.shape)} {got.dtype}, expected {list(want.shape)} {want.dtype}")
        integers = {4: torch.int32, 2: torch.int16}[want.element_size()]
        got, want = got.contiguous().view(integers), want.contiguous().view(integers)
        if torch.equal(got, want):
            return
        row = int((got != want).any(1).nonzero()[0])
        place = "document {}, token {}".format(*self.places[row]) if row < self.n else f"padded row {row}"
        raise Different(f"{path}: layer {layer}, {place} (packed row {row}) is the first that differs")


def check_captures(case: Case, fault: Optional[str]) -> None:
    """Both public packing methods against the loop."""
    everything = case.capture()
    packed, last = everything.get_hidden_states_packed(case.lengths)
    with shifted_rows() if fault == "off-by-one" else contextlib.nullcontext():
        split, split_last = everything.get_hidden_state_layer_packs(case.lengths)
    if (last is None) != (case.last_layer is None) or (split_last is None) != (case.last_layer is None):
        raise Different(f"verifier_last is {last is not None} / {split_last is not None}, asked for {case.last_layer}")
    for layer, part, columns in zip(case.layer_ids, split, packed[0].split(case.hidden_size, dim=1)):
        case.compare("packed", layer, columns, case.naive(layer))
        case.compare("layer packs", layer, part[0], case.naive(layer))
    if not torch.equal(torch.cat(split, dim=2), packed):
        raise Different("the layer packs joined are not the packed form")
    if last is not None:
        case.compare("packed", "verifier_last", last[0], case.naive(case.last_layer))
        case.compare("layer packs", "verifier_last", split_last[0], case.naive(case.last_layer))


def check_slots(case: Case, fault: Optional[str]) -> None:
    """Sender's slot, receiver's slot and the drafter's input, for both sides of the switch."""
    joined = torch.cat([case.naive(layer) for layer in case.layer_ids], dim=1)
    expected = joined.new_zeros(case.n + case.tail, joined.shape[1])
    expected[: case.n] = pipeline.add_noise_(joined.clone(), case.plan.noise_std, case.plan.noise_seed)
    for split in (True, False):
        for cuts in ([0, len(case.lengths)], case.cuts):
            name = f"{'split' if split else 'joined'}, {len(cuts) - 1} forward passes"
            slot = sent_slot(case, split, cuts, swap=fault == "swap-layers" and split)
            sent = list(zip(case.layer_ids, slot.layers(case.n, split)))
            if split:  # noise comes later, so the layers are bare
                for layer, rows in sent:
                    case.compare(f"slot, {name}", layer, rows, case.naive(layer))
            if case.last_layer is not None:
                case.compare(f"slot, {name}", "verifier_last", slot.verifier_last(case.n), case.naive(case.last_layer))
            received = dirty_slot(case)
            for source, destination in zip(slot.messages(case.n), received.messages(case.n)):
                destination.copy_(source)
            if received.checksum(case.n) != slot.checksum(case.n):
                raise Different(f"slot, {name}: the checksums of equal payloads differ")
            plan = SimpleNamespace(**vars(case.plan))
            plan.noise_seed += int(fault == "noise-seed")
            features = pipeline.drafter_features(received, plan, split)
            for i, layer in enumerate(case.layer_ids):
                columns = slice(i * case.hidden_size, (i + 1) * case.hidden_size)
                case.compare(f"features, {name}", layer, features[:, columns], expected[:, columns])


def dirty_slot(case: Case) -> pipeline.Slot:
    """A slot full of NaN: whatever is not overwritten shows."""
    some = case.captured[case.layer_ids[0]]
    slot = pipeline.Slot(0, case.n + case.tail, len(case.layer_ids), case.hidden_size, case.last_layer is not None,
                         some.dtype, case.device)  # fmt: skip
    for memory in (slot.hidden, slot.last):
        if memory is not None:
            memory.fill_(float("nan"))
    return slot


def sent_slot(case: Case, split: bool, cuts: list[int], swap: bool) -> pipeline.Slot:
    """The slot as the sender fills it, from one capture for every part between two cuts."""
    sender = pipeline.HiddenStateSender.__new__(pipeline.HiddenStateSender)
    sender.args = pipeline.PipelineArguments(split_fc_layers=split)
    sender.device, sender.stop_requested = torch.device(case.device), threading.Event()
    sender.ring = pipeline.SlotRing(0)
    slot = dirty_slot(case)
    slot.owner = "filling"
    shots = [(case.capture(slice(a, b)), slice(a, b)) for a, b in zip(cuts, cuts[1:])]
    if swap:
        for shot, _ in shots:
            shot.fc_layer_ids = shot.fc_layer_ids[1::-1] + shot.fc_layer_ids[2:]
    forward = pipeline.Span(sender.device).end()
    sender._pack(pipeline.SendJob(case.plan, shots, slot, forward, 0.0))
    return slot


@contextlib.contextmanager
def shifted_rows() -> Iterator[None]:
    """The off-by-one fault: inside, every gathered row is the next one."""
    right = pipeline.packed_index
    pipeline.packed_index = lambda lengths, longest: (right(lengths, longest) + 1) % (len(lengths) * longest)
    try:
        yield
    finally:
        pipeline.packed_index = right


def random_lengths(rng: np.random.Generator, number: int) -> list[int]:
    """One token, one document, equal lengths (no padding at all), or anything."""
    kind = number % 4
    if kind == 0:
        return rng.choice([1, 2, 30], int(rng.integers(1, 6))).tolist()
    if kind == 1:
        return [int(rng.integers(1, 60))]
    if kind == 2:
        return [int(rng.integers(1, 20))] * int(rng.integers(2, 8))
    return rng.integers(1, 40, int(rng.integers(2, 12))).tolist()


def main() -> int:
    faults = "; ".join(f"{name}: {what}" for name, what in FAULTS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[17, 9, 13, 4, 16], help="Tokens of each document.")
    parser.add_argument("--cases", type=int, default=200, help="Random cases after that, in each dtype (200).")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the random cases (0).")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="All three by default.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu).")
    parser.add_argument("--inject-fault", choices=FAULTS, help=f"Break one path, to see the check fail. {faults}.")
    args = parser.parse_args()
    if min(args.lengths) < 1 or args.cases < 0:
        parser.error("--lengths must be at least 1, --cases at least 0")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: no GPU here")
    first, failed = None, 0
    for dtype in args.dtypes:
        rng = np.random.default_rng(args.seed)
        for number in range(args.cases + 1):
            if number == 0:
                case = Case(args.lengths, rng, DTYPES[dtype], args.device, layers=5)
                if args.inject_fault == "noise-seed":
                    case.plan.noise_std = 0.05
            else:
                case = Case(random_lengths(rng, number), rng, DTYPES[dtype], args.device)
            lengths, layers = " ".join(map(str, case.lengths)), f"{len(case.layer_ids)} layers of {case.hidden_size}"
            what = f"{dtype} case {number}: lengths {lengths}, {layers}, noise {case.plan.noise_std}"
            try:
                check_captures(case, args.inject_fault)
                check_slots(case, args.inject_fault)
                print(f"{what}: equal")
            except Different as difference:
                failed += 1
                first = first or f"{what}: {difference}"
                print(f"{what}: DIFFERENT, {difference}")
    total = len(args.dtypes) * (args.cases + 1)
    if first is not None:
        print(f"FAIL ({failed} of {total}): {first}")
        return 1
    print(f"PASS: {total} cases, every path equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
