"""Every way a rank can go: each rank ends, and its last line names the first cause; or the run goes on.

Real processes under torchrun, gloo, one target and two drafters; the time-out is 3 s. `run_cases` (pipeline_runner.py)
shows every rank's exit code and last line. A rank that has no code was still there when the case's limit passed.
"""

import itertools
import json
import re
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
import train_dflash_pipeline as pipeline
from pipeline_runner import SLOW_STEPS, SMALL, Case, read_metrics, run, run_cases, wait_until

import soak  # isort: skip
from check_pipeline_equiv import write_small_data, write_wrapper  # isort: skip

START = """
import os, signal, time
RANK = int(os.environ["RANK"])
pipeline.ROUND_S = 0.5
right_forward, right_micro_batch = pipeline.TargetRunner.forward, pipeline.DrafterTrainer.micro_batch
def at_target(m, rank, action):
    def forward(self, plan):
        if plan.m == m and RANK == rank:
            action()
        return right_forward(self, plan)
    pipeline.TargetRunner.forward = forward
def at_drafter(m, rank, action):
    def micro_batch(self, plan, spans):
        if plan.m == m and RANK == rank:
            action()
        return right_micro_batch(self, plan, spans)
    pipeline.DrafterTrainer.micro_batch = micro_batch
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
def fail():
    raise ValueError("shapes do not fit")
"""
CUT_DATA = """
import fcntl
right_plan = pipeline.Planner._plan
def plan(self, m):
    with open(pipeline.__file__) as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # never while another rank reads: it would be killed (SIGBUS)
        if m == 9 and RANK == 2:
            os.truncate(self.documents.mapped.name, 1000)
        return right_plan(self, m)
pipeline.Planner._plan = plan
"""
DATA_GOES = """
right_check = pipeline.check_arguments
def check(args):
    right_check(args)
    time.sleep(1)
    if RANK == 0:
        os.unlink(args.data.train_data[0])
pipeline.check_arguments = check
"""
OTHER_TOKEN = """
right_introduce = pipeline.Fabric.introduce
def introduce(self):
    right_introduce(self)
    self.token += RANK == 0
pipeline.Fabric.introduce = introduce
"""
SLOW_BUT_RIGHT = """
def first_call_takes(seconds, name, rank):
    right, calls = getattr(pipeline, name), []
    def slow(*args, **kwargs):
        calls.append(time.sleep(0 if calls or RANK != rank else seconds))
        return right(*args, **kwargs)
    setattr(pipeline, name, slow)
first_call_takes(5, "settle_documents", 0)  # tokenising
first_call_takes(5, "load_target", 0)
first_call_takes(9, "micro_batch_loss", 2)  # compiling
first_call_takes(5, "save_checkpoint", 1)
"""
NEVER_STARTS = "pipeline.SILENT_S = 4\nif RANK == 2: time.sleep(1000)"


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("failures")


@pytest.fixture(scope="session")
def data(work):
    return ["--train-data", str(write_small_data(work / "train.jsonl"))]


@pytest.fixture(scope="session")
def failed(work, data):
    """One short job per failure, each that of micro-batch 5, which is drafter 1's (rank 2)."""
    (work / "goes.jsonl").write_text((work / "train.jsonl").read_text())
    flags = [*SMALL, *data, "--num-target-ranks", "1", "--max-steps", "6", "--transport-timeout", "3"]

    def case(name, patch, *more, limit_s=60):
        return Case(name, [*flags, *more], START + patch, limit_s=limit_s)

    cases = [
        case("killed-drafter", "at_drafter(5, 2, kill)"),
        case("stopped-target", "at_target(5, 0, stop)"),
        case("failing-target", "at_target(5, 0, fail)"),
        case("cut-data", CUT_DATA),
        case("data-goes", DATA_GOES, "--train-data", str(work / "goes.jsonl")),
        case("other-token", OTHER_TOKEN),
        case("never-starts", NEVER_STARTS, limit_s=15),
        case("slow-but-right", SLOW_BUT_RIGHT, "--save-every", "3", limit_s=90),
    ]
    return run_cases(3, cases, work / "failed")


@pytest.mark.parametrize("name, code, phrase", [
    ("killed-drafter", {2: -9}, r"gone without a word: drafter 1 \(rank 2\), last seen at: .*; noticed by \["),
    ("stopped-target", {}, r"no sign of life (for 3 s )?from target 0 \(rank 0\), last seen at: "),
    ("failing-target", {}, r"target 0 \(rank 0\)\] (error: )?forward pass of micro-batch 5: ValueError: shapes"),
    ("cut-data", {}, r"\.safetensors was shortened while this run reads it$"),
    ("data-goes", {}, r"goes\.jsonl: "),
    ("other-token", {}, r"\[drafter \d \(rank \d\)\] .*target 0 \(rank 0\) sent a header without this run's token$"),
    ("never-starts", {2: None}, r"no sign of life for 4 s from drafter 1 \(rank 2\), which never started$"),
])  # fmt: skip
def test_every_rank_ends_and_names_the_first_cause(failed, name, code, phrase):
    result = failed[name]
    assert dict(enumerate(result.codes)) == {rank: code.get(rank, 1) for rank in range(3)}, "\n".join(result.err)
    for rank, line in enumerate(result.last_lines()):
        if rank not in code:
            assert re.search(phrase, line), result.err[rank]
    checkpoints = result.output_dir / "checkpoints"
    if (checkpoints / "latest").exists():
        assert (checkpoints / (checkpoints / "latest").read_text() / "state.json").is_file()


def test_news_of_a_lost_peer_are_one_line(failed):
    assert not any("Traceback" in text for text in failed["killed-drafter"].err)


def test_a_late_rank_and_a_long_save_are_waited_for(failed):
    """Tokenising, loading, compiling on one rank, and a save take 5 to 9 s each, against a time-out of 3 s."""
    result = failed["slow-but-right"].check_ok()
    assert [m["step"] for m in result.metrics] == [1, 2, 3, 4, 5, 6]
    assert (result.output_dir / "checkpoints" / "latest").read_text() == "step-000006"


def test_without_its_store_no_rank_stays(work, data):
    """The torchrun agent, which holds the store, is killed: its ranks have nobody to end them, and end themselves."""
    output_dir, ranks = work / "orphans", []

    def kill_agent(process):
        wait_until(lambda: len(read_metrics(output_dir)) >= 1, process, 120)
        agent = psutil.Process(process.pid)
        ranks.extend(agent.children())
        agent.kill()
        gone, there = psutil.wait_procs(ranks, timeout=40)
        for rank in there:
            rank.kill()
        assert not there, f"{len(there)} ranks stay"
        left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(output_dir) in (p.info["cmdline"] or [])]
        assert not left, f"processes {left} of this run are left"  # one that holds its ports, say

    slow = write_wrapper(work / "slow.py", SLOW_STEPS)
    result = run(2, [*SMALL, *data, "--max-steps", "90"], output_dir, script=slow, during=kill_agent)
    assert len(ranks) == 2
    for who in (r"target 0 \(rank 0\)", r"drafter 0 \(rank 1\)"):
        lines = re.findall(rf"^\[{who}\] (?:stopping|error): (.*)", result.log, re.MULTILINE)
        assert len(lines) == 1, result.log
        assert re.match("lost the rendezvous store|the torchrun agent of this host is gone", lines[0]), lines[0]


# ---------------------------------------------------------------------------------------------------------------------
# Who is blamed: the board alone, on a store in memory
# ---------------------------------------------------------------------------------------------------------------------


class QuietBoard(pipeline.FailureBoard):
    """A board whose rounds are made by hand, and which remembers its end instead of ending the process."""

    def __init__(self, rank, store, timeout_s=10.0, hosts=()):
        self.ended = None
        super().__init__(pipeline.Topology(rank, 4, rank, 4, 2, dict(enumerate(hosts))), store, timeout_s)

    def _watch(self):
        pass

    _watch_store = _watch

    def _end(self, cause):
        self.ended = self.ended or cause


@pytest.fixture()
def boards(monkeypatch):
    monkeypatch.setattr(pipeline, "ROUND_S", 1.0)
    monkeypatch.setattr(pipeline.time, "sleep", lambda seconds: None)
    store = dist.HashStore()
    return [QuietBoard(rank, store) for rank in range(4)]


def rounds(boards, count, silent=()):
    """Rounds of all boards but the silent ones, until one has an end to tell; returns how many it took."""
    for number in range(1, count + 1):
        for board in boards:
            if board.topology.rank not in silent:
                board._round()
        if any(board.ended for board in boards):
            return number
    return None


def test_a_wait_is_blamed_on_who_keeps_all_waiting(boards):
    """Drafter 3 waits for drafter 2, which waits through its receiver for target 1, which computes on and on."""
    for board in boards:
        board.now("at work")
    boards[3].now("exchanging gradients", [2])
    boards[2].now("waiting for micro-batch 7", pipeline.HELPER)
    boards[2].stages["receiver"] = pipeline.Stage("waiting for the header", [1])
    boards[1].now("forward pass of micro-batch 7")
    took = rounds(boards, 40)
    assert 10 < took <= 10 + pipeline.ASLEEP_ROUNDS + 2
    [cause] = {board.ended for board in boards if board.ended}
    assert "the one that keeps all waiting: target 1 (rank 1), last seen at: forward pass of micro-batch 7" in cause


def test_who_moves_on_or_may_take_long_is_waited_for(boards):
    for board in boards:
        board.now("at work")
    boards[3].now("exchanging gradients", [2])
    boards[2].now("saving step 4", may_last=True)
    assert rounds(boards, 60) is None
    for _ in range(12):
        boards[2].now("another forward pass")
        assert rounds(boards, 5) is None
    assert rounds(boards, 40) is not None


def test_two_that_wait_for_each_other_name_what_they_wait_for(boards):
    for board in boards:
        board.now("at work")
    boards[0].now("sending the header of micro-batch 3", [2])
    boards[2].now("sending the credit of micro-batch 3", [0])
    assert rounds(boards, 40)
    [cause] = {board.ended for board in boards if board.ended}
    assert cause == "[target 0 (rank 0)] waited 10 s: sending the header of micro-batch 3"


@pytest.mark.parametrize("told_by", [0, 2])
def test_a_payload_that_never_ends_is_named(boards, told_by):
    """It holds the GPU, and so drafter 0's main thread in a call that awaits nobody; target 0 waits for that one."""
    for board in boards:
        board.now("at work")
    boards[0].now("waiting for a free slot", pipeline.HELPER)
    boards[0].stages["postprocess"] = pipeline.Stage("sending the header for micro-batch 7", [2])
    boards[2].now("backward pass of micro-batch 4")
    boards[2].stages["receiver"] = pipeline.Stage("receiving the payload for micro-batch 6", [0])
    boards = [boards[told_by], *[board for board in boards if board is not boards[told_by]]]
    assert 10 < rounds(boards, 40) <= 10 + pipeline.ASLEEP_ROUNDS + 2
    assert boards[0].store.get("failure").decode() == {
        0: "[target 0 (rank 0)] waited 10 s: waiting for a free slot (sending the header for micro-batch 7); the one that "
           "keeps all waiting: drafter 0 (rank 2), last seen at: backward pass of micro-batch 4, its transfer thread at: "
           "receiving the payload for micro-batch 6",
        2: "[drafter 0 (rank 2)] waited 10 s: receiving the payload for micro-batch 6",
    }[told_by]  # fmt: skip


def test_who_saves_is_not_blamed_by_its_own_transfer_thread(boards):
    for board in boards:
        board.now("at work")
    boards[2].now("saving step 4", may_last=True)
    boards[2].stages["receiver"] = pipeline.Stage("waiting for the header", [0])
    boards[0].now("waiting for a free slot", pipeline.HELPER)
    boards[0].stages["postprocess"] = pipeline.Stage("waiting for the credit", [2])
    assert rounds(boards, 60) is None


def test_silence_is_noticed_before_the_time_out(boards):
    for board in boards:
        board.timeout_s = 600.0
        board.now("at work")
    boards[3].now("exchanging gradients", [2])
    rounds(boards, 3)
    took = rounds(boards, 100, silent=[2])
    assert pipeline.SILENT_S <= took <= pipeline.SILENT_S + 3
    assert "no sign of life for 30 s from drafter 0 (rank 2), last seen at: at work" in boards[1].ended


def test_a_store_that_does_not_answer_is_noticed(monkeypatch):
    """Where the link to it is cut, a round of the watch never ends."""
    monkeypatch.setattr(pipeline, "ROUND_S", 0.01)
    monkeypatch.setenv("MASTER_ADDR", "host-a")

    class HangingBoard(QuietBoard):
        _watch_store = pipeline.FailureBoard._watch_store

    board = HangingBoard(0, dist.HashStore(), timeout_s=0.5)
    board.now("saving", may_last=True)
    time.sleep(1)
    assert board.ended is None  # 30 s at least
    board.now("at work")
    deadline = time.monotonic() + 30
    while board.ended is None and time.monotonic() < deadline:
        time.sleep(0.01)
    board.finished.set()
    assert board.ended == "no answer for 0 s from the rendezvous store on host-a"


def test_a_rank_that_saves_may_be_silent_up_to_the_time_out(boards):
    for board in boards:
        board.timeout_s = 100.0
        board.now("saving", may_last=True)
    rounds(boards, 3)
    assert 100 <= rounds(boards, 200, silent=[2]) <= 103


def test_a_suspended_job_goes_on(boards, monkeypatch):
    """No round is made while all are stopped; a clock would have counted those minutes."""
    for board in boards:
        board.now("waiting", board.topology.others())
    boards[1].now("forward pass")
    assert rounds(boards, 5) is None
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: 1e9)
    assert rounds(boards, 4) is None


def test_the_first_cause_wins(boards):
    first, second = ValueError("the real one"), RuntimeError("a later one")
    boards[1].now("forward pass of micro-batch 2")
    assert boards[1].report(first) == "[target 1 (rank 1)] forward pass of micro-batch 2: ValueError: the real one"
    assert boards[2].report(second) == "[target 1 (rank 1)] forward pass of micro-batch 2: ValueError: the real one"
    boards[3]._round()
    assert boards[3].ended == "[target 1 (rank 1)] forward pass of micro-batch 2: ValueError: the real one"


def test_a_lost_peer_is_not_the_first_cause(boards, monkeypatch):
    """The peer's own report comes a moment after its connection broke."""
    naps = itertools.count()

    def nap(seconds):
        if next(naps) == 1:
            boards[1].store.compare_set("failure", "", "[target 1 (rank 1)] the real cause")

    monkeypatch.setattr(pipeline.time, "sleep", nap)
    error = pipeline.TransportError("waiting for the header: Connection closed by peer [127.0.0.1]:5000")
    assert boards[2].report(error) == "[target 1 (rank 1)] the real cause"


def test_a_lost_peer_that_says_nothing_is_found_by_its_silence(boards, monkeypatch):
    monkeypatch.setattr(pipeline.time, "sleep", lambda seconds: [boards[r]._publish() for r in (0, 2, 3)])
    for board in boards:
        board.now("at work")
        board._publish()
    cause = boards[2].report(RuntimeError("Connection reset by peer"))
    assert cause.startswith("gone without a word: target 1 (rank 1), last seen at: at work; noticed by [drafter 0")


def test_an_error_keeps_the_innermost_stage(boards):
    board = boards[0]
    board.now("at work")
    board._round()
    with pytest.raises(ValueError) as caught:
        with board.doing("outer"), board.doing("inner", [1]):
            assert board.state().awaits == [1]
            raise ValueError
    assert caught.value.stage == "inner" and board.state() == pipeline.Stage("at work", rounds=0)


def test_hosts_are_named_where_there_are_several():
    topology = pipeline.Topology(5, 8, 1, 4, 5, {0: "host-a", 5: "host-b"})
    assert str(topology) == "drafter 0 (rank 5 on host-b)"
    assert str(topology.of(0)) == "target 0 (rank 0 on host-a)"
    assert str(topology.of(1)) == "target 1 (rank 1)"
    assert topology.role_peers() == [6, 7] and topology.others() == [0, 1, 2, 3, 4, 6, 7]


def test_a_second_signal_in_the_handler_does_not_block(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.setdefault(number, handler))
    handlers = {}
    requested = pipeline.request_stop_on_signals()

    def arrives(number):
        handler = threading.Thread(target=handlers[number], args=(number, None), daemon=True)
        handler.start()
        return handler

    with requested._cond:  # the first signal's handler is held up inside set()
        first = arrives(signal.SIGTERM)
        first.join(0.2)
        second = arrives(signal.SIGUSR1)
        second.join(30)
        assert first.is_alive() and not second.is_alive()
    first.join(30)
    assert requested.is_set()
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGINT](signal.SIGINT, None)


# ---------------------------------------------------------------------------------------------------------------------
# Splits of the ranks, ragged ends
# ---------------------------------------------------------------------------------------------------------------------

LOGGED_BATCHES = """
import json, os
right_micro_batch = pipeline.DrafterTrainer.micro_batch
log = open(os.environ["BATCH_LOG"] + os.environ["RANK"], "w")
def micro_batch(self, plan, spans):
    print(json.dumps([plan.m, plan.documents.tolist()]), file=log, flush=True)
    return right_micro_batch(self, plan, spans)
pipeline.DrafterTrainer.micro_batch = micro_batch
"""
FOUR_OF_FIVE = "import os\nif os.environ['RANK'] == '4': os._exit(0)"


@pytest.fixture(scope="session")
def splits(work, data):
    samples = work / "103.jsonl"
    with samples.open("w") as file:
        for number in range(103):
            row = {"prompt": f"Number {number:03d}?", "response": "x" * (30 + 37 * (number % 10))}
            file.write(json.dumps(row) + "\n")
    four = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    few = [*SMALL, *data, "--max-steps", "2"]
    ragged = [*SMALL, "--train-data", str(samples), "--num-epochs", "1", "--max-document-tokens", "250",
              "--num-target-ranks", "3", "--gradient-accumulation-steps", "4"]  # fmt: skip
    cases = [
        *[Case(f"{t}+{4 - t}", [*few, "--num-target-ranks", str(t)], FOUR_OF_FIVE, four) for t in (1, 2, 3)],
        Case("3+2", [*few, "--num-target-ranks", "3"]),  # step 1 uses two of the six links
        Case("ragged", ragged, LOGGED_BATCHES, {"BATCH_LOG": str(work / "batches-")}),
    ]
    return run_cases(5, cases, work / "splits")


@pytest.mark.parametrize("name", ["1+3", "2+2", "3+1", "3+2"])
def test_every_split_starts_and_ends(splits, name):
    result = splits[name].check_ok()
    assert [m["step"] for m in result.metrics] == [1, 2]


def test_a_ragged_epoch_trains_or_drops_every_sample(splits, work):
    """103 samples, 3 targets, 2 drafters, accumulation 4: the drafters make equally many micro-steps."""
    result = splits["ragged"].check_ok()
    logs = [(work / f"batches-{rank}").read_text().splitlines() for rank in (3, 4)]
    logs = [[json.loads(line) for line in log] for log in logs]
    steps = len(result.metrics)
    assert [len(log) for log in logs] == [4 * steps, 4 * steps]
    numbers = sorted(m for log in logs for m, _ in log)
    assert numbers == list(range(8 * steps))
    trained = {document for log in logs for _, documents in log for document in documents}
    dropped = result.metrics[-1]["dropped_rows"]
    assert dropped > 0 and sorted(trained) == list(range(103 - dropped))
    assert f"{dropped} over 250 tokens" in "".join(result.out)


# ---------------------------------------------------------------------------------------------------------------------
# The soak
# ---------------------------------------------------------------------------------------------------------------------


def test_a_short_soak_finds_nothing(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["soak.py", "--seed", "7", "--runs", "1", "--variants", "1", "--steps", "3"])
    assert soak.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "seeds 7 to 7: 1 runs, 3 steps compared, 0 differences"


@pytest.mark.parametrize("change, found", [
    (None, "seeds 5 to 6: 4 runs, 8 steps compared, 0 differences"),
    ("loss", "differ at step 2: loss is 0.5 and 0.25"),
    ("weights", "differ in fc.weight[1]"),
    ("fails", "2+1 async split: exit 1"),
])  # fmt: skip
def test_a_soak_reports_what_differs(capsys, monkeypatch, change, found):
    """The comparison alone: the runs are made up, and a variant of the second case is not like its plain run."""

    def execute(self, folder, flags, timeout_s):
        wrong = bool(self.patch) and "seed-6" in str(folder)
        if wrong and change == "fails":
            raise RuntimeError("2+1 async split: exit 1")
        loss = 0.25 if wrong and change == "loss" else 0.5
        self.metrics = [{"step": step, "loss": loss if step == 2 else 1.0, "grad_norm": 1.0, "acceptance_length": 1.0}
                        for step in (1, 2)]  # fmt: skip
        self.weights = {"fc.weight": torch.tensor([0.0, 1.0 if wrong and change == "weights" else 2.0])}

    monkeypatch.setattr(soak.Run, "execute", execute)
    monkeypatch.setattr("sys.argv", ["soak.py", "--seed", "5", "--runs", "2"])
    assert soak.main() == (0 if change is None else 1)
    assert found in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_soak_seed_gives_one_case_with_valid_flags(tmp_path, device):
    for seed in range(8):
        cases = []
        for attempt in ("a", "b"):
            folder = tmp_path / f"{seed}{attempt}"
            folder.mkdir()
            flags, runs, own_flags = soak.draw_case(seed, folder, 2, (3, 2), device)
            for own in own_flags:
                pipeline.check_tiles(pipeline.parse_arguments([*flags, *own]), torch.device(device))
            files = {path.name: path.read_text() for path in folder.iterdir()}
            flags = [flag.replace(str(folder), "") for flag in flags]
            cases.append((flags, [vars(run) for run in runs], own_flags, files))
        assert cases[0] == cases[1]
        assert (runs[0].targets, runs[0].asynchronous, runs[0].split, runs[0].patch) == (1, False, False, "")


def test_gloo_binds_to_the_interface_that_is_named(monkeypatch):
    """Groups made directly obey GLOO_SOCKET_IFNAME as torch's own do; an interface that is not there is one clear line."""
    fabric = pipeline.Fabric(pipeline.Topology(0, 2, 0, 2, 1), torch.device("cpu"), False, dist.HashStore(), board=None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert fabric._gloo("a", 0, 1).size() == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(pipeline.TransportError, match="nosuch0; where hosts have several networks, GLOO_SOCKET_IFNAME"):
        fabric._gloo("b", 0, 1)
