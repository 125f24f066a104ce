"""Checkpoints and resume: integrity, damage, trust, other layouts; and the real script, interrupted.

Checkpoints that only need to be read are made here by hand, with hashes computed here.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import train_dflash_pipeline as pipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_runner import REPOSITORY, SMALL, Case, run_cases
from safetensors.torch import load_file, save_file
from train_dflash_pipeline import UserError

from check_pipeline_equiv import last_weights, write_small_data  # isort: skip

IDENTITY = {"data": "abc", "micro_batches_per_step": 4, "seed": 0}


# ---- By hand ----


def fabric_of(rank=1, drafters=1, store=None):
    """What the checkpoint functions use of a Fabric: one target, some drafters, a store in memory."""
    topology = pipeline.Topology(rank, 1 + drafters, rank, 1 + drafters, 1)
    return SimpleNamespace(topology=topology, store=store or dist.HashStore())


def arguments(output_dir, *flags):
    return pipeline.parse_arguments(["--output-dir", str(output_dir), "--gradient-accumulation-steps", "4", *flags])


def choose(output_dir, *flags, identity=IDENTITY):
    return pipeline.choose_checkpoint(arguments(output_dir, *flags), identity, fabric_of())


def hashed(folder):
    """Size and hash of every file but the manifest, as the manifest holds them."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in contents.items()}


def seal(folder):
    """Write the manifest of a folder as it is."""
    (folder / "manifest.json").write_text(json.dumps({"files": hashed(folder)}))


def write_checkpoint(output_dir, step, **state):
    folder = output_dir / "checkpoints" / f"step-{step:06d}"
    (folder / "drafter").mkdir(parents=True)
    (folder / "drafter" / "config.json").write_text('{"block_size": 16}')
    (folder / "shard.pt").write_bytes(bytes(range(256)) * 3)
    (folder / "empty.bin").touch()
    layout = {"drafter_ranks": 1, "zero_stage": 2}
    state = {"step": step, "identity": IDENTITY, "layout": layout, "counters": {"skipped_steps": step}} | state
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    (output_dir / "checkpoints" / "latest").write_text(folder.name)
    return folder


@pytest.fixture
def run(tmp_path):
    """An output folder with checkpoints at steps 2, 4 and 6."""
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    return tmp_path


# ---- Which checkpoint ----


def test_the_newest_is_chosen(run):
    folder = str(run / "checkpoints" / "step-000006")
    assert choose(run) == pipeline.ResumePoint(folder, 6, 1, 2, {"skipped_steps": 6})
    assert choose(run, "--resume", str(run)).step == 6
    assert choose(run, "--resume", str(run / "checkpoints" / "step-000002")).step == 2
    assert choose(run, "--resume", "never") is None
    assert choose(run / "elsewhere") is None


def test_latest_may_be_turned_back(run):
    (run / "checkpoints" / "latest").write_text("step-000004\n")
    assert choose(run).step == 4


def test_without_latest_the_newest_counts(run):
    """A kill between the first checkpoint's move and its pointer."""
    (run / "checkpoints" / "latest").unlink()
    assert choose(run).step == 6


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "missing shard": (lambda f: (f / "shard.pt").unlink(), "shard.pt is missing"),
    "truncated shard": (lambda f: truncate(f / "shard.pt"), "shard.pt was changed: {'bytes': 767, "),
    "flipped bit": (lambda f: flip(f / "shard.pt"), "shard.pt was changed: {'bytes': 768, "),
    "flipped bit in state.json": (lambda f: flip(f / "state.json"), "state.json was changed"),
    "truncated state.json": (lambda f: truncate(f / "state.json"), "state.json was changed"),
    "truncated config.json": (lambda f: truncate(f / "drafter" / "config.json"), "drafter/config.json was changed"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda f: truncate(f / "manifest.json"), "manifest.json cannot be read"),
    "a folder of that name": (lambda f: ((f / "shard.pt").unlink(), (f / "shard.pt").mkdir()), "shard.pt is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, capsys, name):
    damage, what = DAMAGES[name]
    folder = run / "checkpoints" / "step-000006"
    damage(folder)
    assert choose(run).step == 4
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and f"{folder} is damaged: {what}" in lines[0]
    with pytest.raises(UserError, match=re.escape(f"{folder} is damaged: {what}")):
        choose(run, "--resume", str(folder))
    damage(run / "checkpoints" / "step-000004")
    assert choose(run).step == 2
    damage(run / "checkpoints" / "step-000002")
    with pytest.raises(UserError, match="none of 3 checkpoints is whole; another --output-dir starts anew"):
        choose(run)
    assert choose(run, "--resume", "never") is None


@pytest.mark.parametrize("text, what", [
    ("", "`latest` is empty"), ("\n", "`latest` is empty"),
    ("step-000008", "`latest` names step-000008, which is not there"),
    ("../../step-000006", "`latest` names no checkpoint but '../../step-000006'"), ("step-6", "names no checkpoint"),
    ("/etc/passwd", "names no checkpoint"), ("step-000006\x00", "names no checkpoint"),
    ("x" * 10**6, "names no checkpoint"),
])  # fmt: skip
def test_a_pointer_of_no_use_is_said_and_the_newest_whole_one_is_used(run, capsys, text, what):
    (run / "checkpoints" / "latest").write_text(text)
    flip(run / "checkpoints" / "step-000006" / "shard.pt")
    assert choose(run).step == 4
    assert what in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(UserError, match=re.escape(f"{run}: {what[:8]}" if what[0] == "`" else str(run))):
        choose(run, "--resume", str(run))
    for step in (2, 4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    with pytest.raises(UserError, match="no other checkpoint is there"):
        choose(run)


def test_what_a_killed_save_left_is_removed(run, capsys):
    root = run / "checkpoints"
    (root / "step-000008.partial" / "drafter").mkdir(parents=True)
    (root / "latest.partial").write_text("step-0000")
    assert choose(run).step == 6
    assert not list(root.glob("*.partial"))
    assert capsys.readouterr().out.count("left by a save that was interrupted") == 2
    for step in (2, 4, 6):  # killed in its very first save: there is nothing to resume, nor anything lost
        shutil.rmtree(root / f"step-{step:06d}")
    (root / "latest").unlink()
    (root / "step-000002.partial").mkdir()
    assert choose(run) is None and not list(root.iterdir())


def test_another_run_is_refused_by_name(run):
    for key, value in (("seed", 1), ("data", "x"), ("new", True)):
        message = f"cannot resume .*: {key} was {json.dumps(IDENTITY.get(key))} and is {json.dumps(value)} now"
        with pytest.raises(UserError, match=message):
            choose(run, identity=IDENTITY | {key: value})


@pytest.mark.parametrize("drafters, accumulation, batch, expected", [
    (2, 1, 8, "drafter_ranks was 1 and is 2, .* not be 8 micro-batches any more; with --gradient-accumulation-steps 4"),
    (3, 1, 8, "drafter_ranks was 1 and is 3, .* they need a number of drafter ranks that divides 8"),
    (1, 3, 8, "gradient_accumulation_steps was 8 and is 3, .* with --gradient-accumulation-steps 8"),
])  # fmt: skip
def test_another_global_batch_is_refused_with_the_way_out(tmp_path, drafters, accumulation, batch, expected):
    write_checkpoint(tmp_path, 2, identity=IDENTITY | {"micro_batches_per_step": batch})
    args = arguments(tmp_path, "--gradient-accumulation-steps", str(accumulation))
    identity = IDENTITY | {"micro_batches_per_step": drafters * accumulation}
    with pytest.raises(UserError, match=expected):
        pipeline.choose_checkpoint(args, identity, fabric_of(drafters=drafters))


# ---- Writing: names, pointers, pieces ----


def test_older_ones_go_only_after_the_new_one_is_in_place(run, monkeypatch):
    root = run / "checkpoints"
    (root / "step-000008.partial" / "drafter").mkdir(parents=True)
    (root / "step-000008.partial" / "manifest.json").write_text("{}")
    seen = []
    right = pipeline.remove_leftovers
    monkeypatch.setattr(pipeline, "remove_leftovers", lambda r: (seen.append((root / "latest").read_text()), right(r)))
    pipeline.publish(root / "step-000008.partial", root / "step-000008", keep=2)
    assert seen == ["step-000008"]
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-000006", "step-000008"]


def test_an_old_one_that_cannot_be_removed_does_not_end_the_run(run, monkeypatch):
    """As on NFS, where a file that is still mapped leaves another name behind."""
    root = run / "checkpoints"
    (root / "step-000008.partial" / "drafter").mkdir(parents=True)
    (root / "step-000008.partial" / "manifest.json").write_text("{}")

    def refuse(*_, **__):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        pipeline.publish(root / "step-000008.partial", root / "step-000008", keep=1)
    assert (root / "latest").read_text() == "step-000008" and list(root.glob("*.partial"))
    pipeline.remove_leftovers(root)
    assert not list(root.glob("*.partial"))


def test_tensors_are_written_with_the_rights_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    pipeline.write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(2)})
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_was_just_saved_is_never_pruned(run):
    """`latest` was turned back to step 2: steps 4 and 6 are of a course that was left."""
    root = run / "checkpoints"
    for step in (3, 4):  # a new one, and one that takes the place of an old one
        (root / f"step-{step:06d}.partial" / "drafter").mkdir(parents=True)
        (root / f"step-{step:06d}.partial" / "manifest.json").write_text(f"new {step}")
        pipeline.publish(root / f"step-{step:06d}.partial", root / f"step-{step:06d}", keep=1)
        assert (root / "latest").read_text() == f"step-{step:06d}"
        assert (root / f"step-{step:06d}" / "manifest.json").read_text() == f"new {step}"
        assert not list(root.glob("*.partial"))
    assert [pipeline.step_of(path) for path in pipeline.step_folders(root)] == [6, 4]


def test_steps_are_ordered_as_numbers(tmp_path):
    names = ["step-999999", "step-1000000", "step-000010", "step-1", "step-000001x", "step-000007.partial"]
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in pipeline.step_folders(tmp_path)] == ["step-1000000", "step-999999", "step-000010"]


def test_every_byte_of_every_file_counts(run):
    folder = run / "checkpoints" / "step-000006"
    files = hashed(folder)
    assert pipeline.file_records(folder, list(files)) == files
    for name in files:
        for place in range(0, len((folder / name).read_bytes()), 7):
            right = (folder / name).read_bytes()
            (folder / name).write_bytes(right[:place] + bytes([right[place] ^ 128]) + right[place + 1 :])
            with pytest.raises(pipeline.DamagedFile, match=f"^{name} was changed"):
                pipeline.verify_files(folder)
            (folder / name).write_bytes(right)
    pipeline.verify_files(folder)


# ---- Whatever is in the files: one line ----

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**18, 10**300) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KNOWN_KEYS = ["step", "layout", "counters", "identity", "drafter_ranks", "zero_stage", "files", "state.json", "bytes",
              "sha256", "../x", "/etc/passwd", "a\x00b", "\ud800"]  # fmt: skip
LIKELY_JSON = st.recursive(
    ANY_JSON, lambda inner: st.dictionaries(st.sampled_from(KNOWN_KEYS), inner, max_size=4), max_leaves=8
)
FUZZ = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_one_line(run, capsys, *flags):
    """The start finds a whole checkpoint or raises UserError; what it says is printable, line by line."""
    try:
        point = choose(run, *flags)
        assert point is None or point.step in (2, 4, 6)
    except UserError as error:
        message = str(error)
        assert "\n" not in message and message.encode() and len(message) < 1000, message
    printed = capsys.readouterr().out
    assert printed.encode() is not None and len(printed.splitlines()) <= 4


def restore(run, folder):
    for name in ("state.json", "manifest.json"):
        shutil.copy(run / name, folder / name)


@pytest.fixture
def fuzzed(run):
    folder = run / "checkpoints" / "step-000006"
    for name in ("state.json", "manifest.json"):
        shutil.copy(folder / name, run / name)
    return folder


@FUZZ
@given(data=st.binary(max_size=60) | st.text(max_size=30).map(lambda s: s.encode("utf-8", "surrogatepass")))
def test_any_bytes_as_latest(run, capsys, data):
    (run / "checkpoints" / "latest").write_bytes(data)
    check_one_line(run, capsys)
    check_one_line(run, capsys, "--resume", str(run))


@FUZZ
@given(data=st.binary(max_size=60) | (ANY_JSON | LIKELY_JSON).map(lambda v: json.dumps(v).encode()))
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_any_bytes_as_state_or_manifest(run, fuzzed, capsys, name, data):
    (fuzzed / name).write_bytes(data)
    check_one_line(run, capsys)
    if name == "state.json":
        seal(fuzzed)  # as a hostile writer would
        check_one_line(run, capsys)
    check_one_line(run, capsys, "--resume", str(fuzzed))
    restore(run, fuzzed)


@FUZZ
@given(place=st.sampled_from(["step", "identity", "layout", "counters", "drafter_ranks", "zero_stage"]), value=ANY_JSON)
def test_one_wrong_value_in_state(run, fuzzed, capsys, place, value):
    state = json.loads((run / "state.json").read_text())
    (state["layout"] if place in state["layout"] else state)[place] = value
    (fuzzed / "state.json").write_text(json.dumps(state))
    seal(fuzzed)
    check_one_line(run, capsys)
    restore(run, fuzzed)


@FUZZ
@given(name=st.sampled_from(["shard.pt", "../x", "a/../../x", "/etc/passwd", "a\x00", "\ud800", "x" * 300]),
       value=ANY_JSON, key=st.sampled_from(["bytes", "sha256", None]))  # fmt: skip
def test_one_wrong_entry_in_the_manifest(run, fuzzed, capsys, name, value, key):
    manifest = json.loads((run / "manifest.json").read_text())
    entry = dict(manifest["files"]["shard.pt"])
    manifest["files"][name] = value if key is None else entry | {key: value}
    (fuzzed / "manifest.json").write_text(json.dumps(manifest))
    assert choose(run).step == (6 if (name, manifest["files"][name]) == ("shard.pt", entry) else 4)
    check_one_line(run, capsys)
    restore(run, fuzzed)


@pytest.mark.parametrize("name", ["../step-000004/shard.pt", "drafter/../../step-000004/shard.pt", "{run}/x.bin"])
def test_a_manifest_does_not_reach_outside(run, fuzzed, capsys, name):
    """To files that are there and have the right hash."""
    (run / "x.bin").write_bytes((fuzzed / "shard.pt").read_bytes())
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["files"][name.format(run=run)] = manifest["files"]["shard.pt"]
    (fuzzed / "manifest.json").write_text(json.dumps(manifest))
    assert choose(run).step == 4
    assert "is missing; trying the one before" in capsys.readouterr().out


DEEP = '{"files": ' + "{" * 5000


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 100_000, DEEP, "\ufeff{}", "NaN", '"\\ud800"'])
def test_json_that_breaks_parsers(run, fuzzed, capsys, text):
    for name in ("state.json", "manifest.json"):
        (fuzzed / name).write_text(text)
        seal(fuzzed) if name == "state.json" else None
        assert choose(run).step == 4
        check_one_line(run, capsys)
        restore(run, fuzzed)


def test_no_code_is_loaded(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"optimizer_state_dict": Hostile()}, tmp_path / "shard.pt")
    with pytest.raises(UserError, match="more than tensors and plain values, and is not loaded: it names posix.system"):
        pipeline.load_plain(tmp_path / "shard.pt")
    assert not (tmp_path / "ran").exists()
    for junk in (b"", b"\x80\x05N.", b"PK\x03\x04 no zip", b"x" * 1000):
        (tmp_path / "junk.pt").write_bytes(junk)
        with pytest.raises(UserError, match="junk.pt"):
            pipeline.load_plain(tmp_path / "junk.pt")


# ---- Identity and metrics ----


def test_a_target_is_known_by_its_files(tmp_path, target_folder):
    original, moved = Path(target_folder("qwen3")), tmp_path / "moved"
    shutil.copytree(original, moved)
    fingerprint = pipeline.target_hashes(str(original))
    assert pipeline.target_hashes(str(moved)) == fingerprint
    weights = load_file(moved / "model.safetensors")
    norm = next(name for name, weight in weights.items() if weight.dim() == 1)
    weights[norm] = weights[norm] * 1.5
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    assert pipeline.target_hashes(str(moved)) != fingerprint
    for name in (name for name, weight in load_file(original / "model.safetensors").items() if weight.dim() > 1):
        weights = load_file(original / "model.safetensors")  # an adapter merged into one matrix
        weights[name] += 0.1 * torch.outer(torch.ones(len(weights[name])), torch.randn(weights[name].shape[1]))
        save_file(weights, moved / "model.safetensors", {"format": "pt"})
        assert pipeline.target_hashes(str(moved)) != fingerprint, name
    shutil.copy(original / "model.safetensors", moved / "model.safetensors")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert pipeline.target_hashes(str(moved)) != fingerprint


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 6)]
    assert pipeline.metrics_until(path, 3) == []
    path.write_text("\n".join(lines))
    assert pipeline.metrics_until(path, 3) == lines[:3]
    assert pipeline.metrics_until(path, 0) == []
    path.write_bytes("\n".join(lines[:3]).encode() + b'\n{"step": 4, "lo')
    assert pipeline.metrics_until(path, 5) == lines[:3]
    path.write_bytes("\n".join(lines[:4]).encode() + b"\n\xff\xfe[1]\n3\n\n")
    assert pipeline.metrics_until(path, 5) == lines[:4]


def test_tensorboard_shows_every_number_of_the_metrics(tmp_path):
    """Under names of its own; what has no value (a loss of nothing) is left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = arguments(tmp_path)
    monitor = pipeline.Monitor(args, 0, 1)
    span = SimpleNamespace(ms=lambda: 2.5)
    stats = torch.tensor([6.0, 3.0, 4.0, 3.0, 1.0, 4.0, 2.0, 0.0], dtype=torch.float64)  # blocks of two slots
    extras = {"skipped_steps": 0, "skipped_micro_batches": 0, "held_out_loss": None, "held_out_acceptance_length": 1.5,
              "held_out_slot_accuracy": [0.5, 0.25]}  # fmt: skip
    monitor.write(pipeline.StepRecord(
        step=0, learning_rate=0.25, noise_std=0.125, weights=[2.0], tokens=96, my_tokens=48, stats=stats, ready=None,
        grad_norm=1.5, taken=True, spans={"forward": [span, span], "step": [span]}, receive_wait_ms=3.0, wall_s=2.0,
        queue_depth=1, target_times={"forward": 6.0, "wait": 2.0}, extras=extras,
    ))  # fmt: skip
    monitor.close()
    [line] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (line["loss"], line["acceptance_length"], line["slot_accuracy"]) == (3.0, 1.75, [0.75, 0.5])
    assert line["ms"] == {"target_forward": 6, "pack": 0, "send_wait": 2, "receive_wait": 3, "forward": 5, "step": 2.5}
    expected = {f"train/{k}": v for k, v in line.items() if k != "step" and isinstance(v, (int, float))}
    expected |= {f"ms/{k}": v for k, v in line["ms"].items()}
    for name in ("slot_accuracy", "held_out_slot_accuracy"):
        expected |= {f"{name}/slot_{slot:02d}": v for slot, v in enumerate(line[name], 1)}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {tag: [(1, pytest.approx(value))] for tag, value in expected.items()}


# ---- The real script ----

SAVE_AND_END = """
def save_and_end(self, first_step, identity):
    pipeline.save_checkpoint(self.engine, first_step, self.args, identity, self.config, self.fabric, self.counters())
    self.receiver.finish()
pipeline.DrafterTrainer.train = save_and_end
"""
# From the second save on, one drafter may write no file beyond 100 kB.
FULL_DISK = """
import os, resource
right, saves, rank = pipeline.save_checkpoint, [], os.environ["RANK"]
def save(*args, **kwargs):
    saves.append(1)
    if len(saves) == 2 and rank == "{rank}":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return right(*args, **kwargs)
pipeline.save_checkpoint = save
"""
SLOW_SAVE = """
import os, time
right, rank = pipeline.write_files, os.environ["RANK"]
def write_files(*args, **kwargs):
    time.sleep(12 if rank == "2" and args[2]["step"] == 2 else 0)
    return right(*args, **kwargs)
pipeline.write_files = write_files
"""
HOSTILE = """
import os, torch
right = torch.save
class Hostile:
    def __reduce__(self):
        return os.system, ("touch {marker}",)
def save(contents, file):
    right(contents | {{"extra": Hostile()}} if "optim_states" in file.name else contents, file)
pipeline.torch.save = save
"""


def zero(stage):
    return ["--deepspeed", str(REPOSITORY / "ds_configs" / f"zero{stage}.json")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def cases(place):
    """Jobs on three ranks: one target and two drafters, or two and one."""
    data = ["--train-data", str(write_small_data(place / "train.jsonl"))]
    held_out = ["--eval-data", str(write_small_data(place / "eval.jsonl", 10)), "--eval-every", "3"]
    common = [*SMALL, *data, "--max-steps", "6"]
    two = [*common, "--num-target-ranks", "1", "--gradient-accumulation-steps", "2"]  # drafters
    one = [*common, "--num-target-ranks", "2", "--gradient-accumulation-steps", "4"]
    evaluated = [*two, *held_out, "--save-every", "2"]
    folder = place / "cases"
    zero3 = json.loads((REPOSITORY / "ds_configs" / "zero3.json").read_text())
    zero3["zero_optimization"]["sub_group_size"] = 20_000  # several sub-groups a rank, as beyond 10^9 parameters
    (place / "zero3.json").write_text(json.dumps(zero3))
    sub_groups = ["--deepspeed", str(place / "zero3.json")]

    def after(name, step):
        return ["--resume", f"{folder}/{name}/run/checkpoints/step-{step:06d}"]

    def again(name):
        return ["--output-dir", f"{folder}/{name}/run"]

    damage = f"""
from pathlib import Path
shard = Path("{folder}/straight/run/checkpoints/step-000006/zero_pp_rank_1_mp_rank_00_optim_states.pt")
import os
if os.environ["RANK"] == "0":
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    metrics = Path("{folder}/straight/run/metrics.jsonl")
    metrics.rename(metrics.with_suffix(".whole"))
    metrics.write_bytes(metrics.with_suffix(".whole").read_bytes()[:-40])
"""
    copy_first = f"""
import os, shutil
if os.environ["RANK"] == "0":
    shutil.copytree("{folder}/full/run/checkpoints", "{folder}/full/left")
"""
    jobs = [
        Case("straight", evaluated),
        Case("damaged", [*evaluated, *again("straight")], damage),  # goes on from step 4 in the same folder
        Case("full", [*evaluated], FULL_DISK.format(rank=2)),
        Case("after-full", [*evaluated, *again("full")], copy_first),
        Case("finished", [*evaluated, *again("full")]),
        Case("slow", [*two, "--max-steps", "4", "--save-every", "2", "--transport-timeout", "2"], SLOW_SAVE),
        Case("hostile-saved", [*two, "--max-steps", "1"], HOSTILE.format(marker=place / "ran")),
        Case("hostile", [*two, *after("hostile-saved", 1)]),
        Case("zero0", [*two, *zero(0), "--save-every", "3"]),
        Case("0-to-3", [*one, *sub_groups, *after("zero0", 3)], SAVE_AND_END),
        Case("3-to-1", [*two, *zero(1), *after("0-to-3", 3)], SAVE_AND_END),
        Case("1-to-2", [*one, *zero(2), *after("3-to-1", 3)], SAVE_AND_END),
        Case("2-to-3", [*two, *sub_groups, *after("1-to-2", 3)], SAVE_AND_END),
        Case("3-to-0", [*two, *zero(0), *after("2-to-3", 3)], SAVE_AND_END),
        Case("3-on-one", [*one, *zero(2), *after("2-to-3", 3)]),
    ]
    return run_cases(3, jobs, folder)


EXACT = ("step", "loss", "grad_norm", "acceptance_length", "slot_accuracy", "learning_rate", "tokens", "held_out_loss",
         "unsupervised_micro_batches", "skipped_micro_batches", "skipped_steps")  # fmt: skip


def exact(result):
    return [{key: line.get(key) for key in EXACT} for line in result]


def test_after_a_flipped_byte_the_run_goes_on_from_the_one_before(cases):
    damaged = cases["damaged"].check_ok()
    folder = cases["straight"].check_ok().output_dir
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt was changed" in damaged.out[1]
    assert "trying the one before" in damaged.out[1] and "6 steps from step 4" in damaged.out[1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (folder / "metrics.whole").read_text().splitlines()]
    assert exact(lines) == exact(whole) and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert sum(line.get("held_out_loss") is not None for line in lines) == 2
    mine, theirs = last_weights(folder), last_weights(cases["full"].output_dir)  # resumed, too, by now
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_finished_run_says_that_nothing_is_left_to_do(cases):
    finished = cases["finished"].check_ok()
    folder = cases["full"].output_dir
    assert f"nothing to do: {folder} holds step 6; a larger --max-steps goes on" in finished.out[1]
    assert [line["step"] for line in cases["full"].metrics] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_ends_the_run_and_costs_nothing(cases):
    result = cases["full"]
    root = result.output_dir / "checkpoints"
    assert set(result.codes) == {1}, "\n".join(result.err)
    for line, text in zip(result.last_lines(), result.err):
        assert f"cannot write checkpoint {root}/step-000004: drafter 1 (rank 2): " in line, text
        assert "File too large" in line and "Traceback" not in text, text
    left = result.output_dir.parent / "left"  # as the resume found it
    assert (left / "latest").read_text() == "step-000002"
    assert sorted(path.name for path in left.iterdir() if path.suffix != ".py") == ["latest", "step-000002"]
    assert is_whole(left / "step-000002")


def is_whole(folder) -> bool:
    """Whether the manifest, hashed here, covers every file."""
    return json.loads((folder / "manifest.json").read_text())["files"] == hashed(folder)


def test_a_resume_after_a_full_disk_is_exact(cases):
    whole = cases["straight"].output_dir / "metrics.whole"
    cases["damaged"].check_ok()
    cases["after-full"].check_ok()  # in the folder of "full"
    assert exact(cases["full"].metrics) == exact(map(json.loads, whole.read_text().splitlines()))


def test_a_save_may_outlast_the_time_out(cases):
    result = cases["slow"].check_ok()
    assert [m["step"] for m in result.metrics] == [1, 2, 3, 4]


def test_a_hostile_checkpoint_runs_nothing(cases, place):
    cases["hostile-saved"].check_ok()
    result = cases["hostile"]
    assert set(result.codes) == {1}
    assert all("holds more than tensors and plain values" in line for line in result.last_lines())
    assert not (place / "ran").exists()


def test_the_state_survives_every_layout_bit_for_bit(cases):
    """Saved by ZeRO 0 as plain tensors by name; through ZeRO 3, 1, 2, 3, on one drafter and two in turn; and back."""
    first = cases["zero0"].check_ok().output_dir / "checkpoints" / "step-000003"
    for name in ("0-to-3", "3-to-1", "1-to-2", "2-to-3"):
        cases[name].check_ok()
    last = cases["3-to-0"].check_ok().output_dir / "checkpoints" / "step-000003"
    before, after = (torch.load(f / "mp_rank_00_model_states.pt", weights_only=True) for f in (first, last))
    assert list(before["module"]) == list(after["module"])
    for name, weight in before["module"].items():
        assert weight.dtype == torch.float32 and torch.equal(weight, after["module"][name]), name
    states = before["optimizer"]["state"], after["optimizer"]["state"]
    assert states[0].keys() == states[1].keys() and len(states[0]) == len(before["module"])
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in state.items():
            assert value.dtype == torch.float32 and torch.equal(value, states[1][number][key]), (number, key)
    assert int(states[0][0]["step"]) == 3 and before["global_steps"] == after["global_steps"] == 3


def test_another_number_of_drafters_trains_on_within_rounding(cases):
    result, straight = cases["3-on-one"].check_ok(), cases["zero0"].check_ok()
    assert [m["step"] for m in result.metrics] == [4, 5, 6]
    for mine, theirs in zip(result.metrics, straight.metrics[3:]):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5) and mine["tokens"] == theirs["tokens"]
        assert mine["learning_rate"] == theirs["learning_rate"]
    mine, theirs = last_weights(result.output_dir), last_weights(straight.output_dir)
    for key, weight in theirs.items():
        torch.testing.assert_close(mine[key], weight, rtol=1e-4, atol=1e-6)


def test_killed_runs_go_on_exactly(place):
    """SIGKILL in the middle of a save; torchrun starts the ranks again (seed 135)."""
    command = [sys.executable, str(REPOSITORY / "tools" / "check_resume.py"), "--points", "1", "--kinds", "save",
               "--seed", "135", "--steps", "5", "--num-target-ranks", "1", "--num-drafter-ranks", "1"]  # fmt: skip
    result = subprocess.run([*command, "--keep", str(place / "killed")], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0 and "PASS: 1 of 1 identical" in result.stdout, result.stdout + result.stderr


def test_hashes_that_an_earlier_version_did_not_make_are_not_compared():
    point = SimpleNamespace(folder="here", drafter_ranks=1)

    def check(saved: dict, now: dict) -> None:
        rest = {"micro_batches_per_step": 1}
        pipeline.check_identity(point, rest | {"target": saved}, rest | {"target": now}, 1)

    now = {"config_sha256": "c", "weights_sha256": "w", "matrices_sha256": "m"}
    check({"config_sha256": "c", "weights_sha256": "w"}, now)
    check(now, now)
    for name in now:
        with pytest.raises(UserError, match=f'cannot resume here: target {name} was "other" and is "{now[name]}" now'):
            check(now | {name: "other"}, now)
    with pytest.raises(UserError, match='target was "toy" and is {"config_sha256"'):
        check("toy", now)
