"""Two hosts as two network namespaces with a cable between them, two ranks each: the real script, gloo.

Each namespace has a host name of its own, which leads to 127.0.1.1 there as on many systems, and a mount table of its
own. Needs the rights to make them (root, iproute2, util-linux), and skips saying so where it lacks them. One torchrun
agent per host serves all cases (pipeline_runner.serve_cases); the last case cuts the cable.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from pipeline_runner import SMALL, Case, read_cases, run_cases, write_cases

from check_pipeline_equiv import last_weights, first_weight_difference, started, write_small_data  # isort: skip

pytestmark = pytest.mark.slow
ADDRESSES = {"host-a": "10.99.7.1", "host-b": "10.99.7.2"}
COMPARED = ("step", "loss", "grad_norm", "acceptance_length")
START = "import os, subprocess, sys, time\nRANK = int(os.environ['RANK'])\n"  # ranks 0 and 1 are on host-a
OTHER_SET_UP = """
import importlib.metadata
if RANK >= 2:
    sys.argv += ["--log-every", "7"]
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "9.9" if name == "torch" else version(name)
"""
NO_FILE = "if RANK >= 2: sys.argv += ['--train-data', '/nowhere.jsonl']"
OWN_DISK = """
folder = sys.argv[sys.argv.index("--output-dir") + 1]
if RANK == 2:
    os.makedirs(folder)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
elif RANK == 3:
    while not os.path.ismount(folder):
        time.sleep(0.05)
"""
NARROW = "if RANK == 0: subprocess.run('tc qdisc add dev cable root tbf rate 1mbit burst 16kb latency 1s', shell=True)"
WIDEN = "if RANK == 0: subprocess.run('tc qdisc del dev cable root', shell=True, check=True)"
CUT = """
if RANK == 0:
    right_forward = pipeline.TargetRunner.forward
    def forward(self, plan):
        if plan.m >= 30:  # well beyond what is sent ahead of the first step
            subprocess.run("ip link set cable down", shell=True, check=True)
        return right_forward(self, plan)
    pipeline.TargetRunner.forward = forward
"""


def tell(command: str) -> str:
    """Run a command and return what it said; CalledProcessError carries that too."""
    return subprocess.check_output(command, shell=True, text=True, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """host name -> the beginning of a command line that runs the rest of it there."""
    missing = [tool for tool in ("ip", "tc", "unshare", "mount", "hostname") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"two hosts need root, iproute2 and util-linux; missing: {', '.join(missing) or 'root'}")
    names = {host: f"dflash-{os.getpid()}-{host}" for host in ADDRESSES}
    with contextlib.ExitStack() as stack:
        try:
            for host, name in names.items():
                tell(f"ip netns add {name}")
                stack.callback(tell, f"ip netns del {name}")
                tell(f"ip netns exec {name} unshare --uts --mount true")
            tell(f"ip link add cable netns {names['host-a']} type veth peer name cable netns {names['host-b']}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.output.strip()}")
        commands = {}
        for host, name in names.items():
            for order in (f"addr add {ADDRESSES[host]}/24 dev cable", "link set cable up", "link set lo up"):
                tell(f"ip -n {name} {order}")
            others = "".join(f"{a} {h}\n" for h, a in ADDRESSES.items() if h != host)
            table = tmp_path_factory.mktemp("etc") / host
            table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n{others}")
            enter = f'hostname {host} && mount --bind {table} /etc/hosts && exec "$@"'
            commands[host] = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", enter, "sh"]
        yield commands


@pytest.fixture(scope="module")
def ran(hosts, tmp_path_factory):
    """(results of the cases on two hosts, result of the run on one host)."""
    work = tmp_path_factory.mktemp("two-hosts")
    data = write_small_data(work / "train.jsonl")
    flags = [*SMALL, "--train-data", str(data), "--num-target-ranks", "2",
             "--max-steps", "4", "--transport-timeout", "5"]  # fmt: skip
    apart = [*flags, "--placement", "targets-first"]
    long = [*apart, "--max-steps", "100"]
    cases = [
        Case("spread", flags, START),
        Case("targets-first", apart, START),
        Case("other-set-up", flags, START + OTHER_SET_UP),
        Case("no-file", flags, START + NO_FILE),
        Case("drafters-apart", flags, START + OWN_DISK),
        Case("drafters-together", [*apart, "--max-steps", "1"], START + OWN_DISK),
        Case("narrow", [*apart, "--max-steps", "3", "--transport-timeout", "60"], START + NARROW),
        Case("cut", long, START + WIDEN + CUT, limit_s=45),
    ]
    one_host = run_cases(4, [Case("one-host", flags)], work / "one")["one-host"].check_ok()
    folder = work / "two"
    script, more = write_cases(cases, folder)
    with contextlib.ExitStack() as stack:
        agents = []
        for host, enter in hosts.items():
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2",
                        "--rdzv-backend", "c10d", "--rdzv-endpoint", "host-a:29500"]  # fmt: skip
            agents.append(stack.enter_context(started([*enter, *launcher, str(script), *more], work / f"{host}.log")))
        deadline = time.monotonic() + 400
        while len(list(folder.glob("cut/*.code"))) < 4 and time.monotonic() < deadline:  # agents may outlive the cable
            assert all(agent.poll() is None for agent in agents), (work / "host-a.log").read_text()
            time.sleep(0.1)
    return read_cases(4, cases, folder), one_host


@pytest.mark.parametrize("placement, crossing", [("spread", "0.0 MB (0%)"), ("targets-first", "0.7 MB (100%)")])
def test_two_hosts_train_as_one(ran, placement, crossing):
    results, one_host = ran
    result = results[placement].check_ok()
    for mine, theirs in zip(result.metrics, one_host.metrics, strict=True):
        assert [mine[name] for name in COMPARED] == [theirs[name] for name in COMPARED]
    weights = [last_weights(r.output_dir) for r in (result, one_host)]
    assert first_weight_difference(*weights, "two hosts and one") is None
    text = "".join(result.out)
    assert f"of which {crossing} cross nodes" in text, text
    assert ("gradients cross nodes" in text) == (placement == "spread")


def test_what_differs_is_named_by_host_on_every_rank(ran):
    result = ran[0]["other-set-up"]
    assert result.codes == [1] * 4
    for line in result.last_lines():
        assert re.search(r'ranks disagree: --log-every is 1 on host-a but 7 on host-b; '
                         r'torch is "2[^"]*" on host-a but "9.9" on host-b$', line), line  # fmt: skip


def test_a_failure_before_the_roles_meet_ends_both_hosts(ran):
    result = ran[0]["no-file"]
    assert result.codes == [1] * 4
    assert all("--train-data /nowhere.jsonl: no such file" in line for line in result.last_lines()), result.err
    assert all(re.search(r"\[rank [23] on host-b\]", line) for line in result.last_lines()[:2]), result.err


def test_drafters_without_a_common_folder_are_refused(ran):
    result = ran[0]["drafters-apart"]
    assert result.codes == [1] * 4
    for line in result.last_lines():
        assert "must be on a file system that all drafters share: drafter 1 (rank 3 on host-b) does not see what " \
               "drafter 0 (rank 1 on host-a) writes there" in line, line  # fmt: skip


def test_targets_need_no_common_folder(ran):
    """Only the drafters' host sees the checkpoints; the targets' host makes a data cache of its own."""
    result = ran[0]["drafters-together"].check_ok()
    assert len(list((result.output_dir / "data").glob("*.safetensors"))) == 1
    assert sorted(path.name for path in result.output_dir.iterdir()) == ["data"]


def test_a_narrow_link_shows_in_the_waits(ran):
    """At 1 Mbit/s a step's states take 5 s to arrive, far longer than the drafters need to train on them."""
    results, _ = ran
    wide, narrow = (results[name].check_ok().metrics[1:] for name in ("targets-first", "narrow"))
    assert [m["tokens"] for m in narrow] == [m["tokens"] for m in wide[: len(narrow)]]
    waited = [sum(m["ms"]["receive_wait"] for m in metrics[: len(narrow)]) for metrics in (wide, narrow)]
    assert waited[1] > 2 * waited[0]  # in all: what was received ahead hides the wait of a single step
    assert max(m["drafter_wait_share"] for m in narrow) > 0.5


def test_a_cut_link_ends_every_rank_and_names_the_host(ran):
    result = ran[0]["cut"]
    assert result.codes == [1] * 4, result.err
    lines = result.last_lines()
    for line in lines[:2]:
        assert re.search(r"no sign of life .*\(rank [23] on host-b\)", line), line
    for line in lines[2:]:
        assert re.search(r"on host-b\)\] .*no answer (for 5 s )?from the rendezvous store on host-a$", line), line
    assert result.metrics, "it was cut in mid-run"
