"""The scripts of launch/: they parse, and a run under Slurm stops, saves, goes back to the queue and goes on by itself.

Slurm's own commands are stand-ins of a line: `srun` runs its command here, `scontrol` writes down what it was asked.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import yaml
from pipeline_runner import REPOSITORY, SMALL, read_metrics, wait_until

from train_dflash_pipeline import parse_arguments

from check_pipeline_equiv import end_processes, write_small_data  # isort: skip

LAUNCH = REPOSITORY / "launch"
SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
SCONTROL = 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$ASKED"; fi'


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch")))
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)


def test_the_manifest_fits_the_launcher():
    """Every pod runs multi_node.sh with the variables that it reads, and the rendezvous is at the master's port."""
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    pods = sum(spec["replicas"] for spec in replicas.values())
    for spec in replicas.values():
        (container,) = spec["template"]["spec"]["containers"]
        values = {entry["name"]: entry["value"] for entry in container["env"]}
        assert container["command"] == ["bash", "launch/multi_node.sh"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert (values["NODES"], values["RANKS_PER_NODE"]) == (str(pods), str(gpus))
        assert values["RENDEZVOUS"] == f"{job['metadata']['name']}-master-0:{container['ports'][0]['containerPort']}"
        texts = "".join((LAUNCH / name).read_text() for name in ("multi_node.sh", "torchrun.sh", "environment.sh"))
        assert all(f"${{{name}:" in texts for name in values.keys() - {"HF_HOME"}), values
        parse_arguments(["--train-data", __file__, *container["args"][2:]])


@pytest.fixture()
def slurm(tmp_path):
    """(the batch script's command line as Slurm would start it, its environment, the file of what scontrol was asked)."""
    bin_folder, asked = tmp_path / "bin", tmp_path / "asked"
    bin_folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_folder / name).chmod(0o755)
    script = shutil.copy(LAUNCH / "slurm.sbatch", tmp_path / "slurm_script")  # Slurm runs a copy, elsewhere
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}", "ASKED": str(asked), "DFLASH_PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2", "RENDEZVOUS_PORT": str(port), "RANKS_PER_NODE": "2",
    }  # fmt: skip
    return ["bash", script], environment, asked


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_that_ends_by_itself_is_not_requeued(slurm, tmp_path, code):
    command, environment, asked = slurm
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    assert subprocess.run(command, env=environment, timeout=60).returncode == code
    assert not asked.exists()


@pytest.mark.slow
def test_a_stopped_job_saves_and_goes_on_from_the_queue(slurm, tmp_path):
    """Before the time limit (SIGUSR1), then preempted (SIGTERM): each time a checkpoint, exit 0 and one request."""
    command, environment, asked = slurm
    data, output_dir = write_small_data(tmp_path / "train.jsonl"), tmp_path / "run"
    flags = [*SMALL, "--train-data", str(data), "--max-steps", "5000", "--output-dir", str(output_dir)]
    steps = 0
    for number, what in enumerate((signal.SIGUSR1, signal.SIGTERM), 1):
        with open(tmp_path / "log", "w") as log:
            job = subprocess.Popen([*command, *flags], env=environment, stdout=log, stderr=log)
        try:
            wait_until(lambda: len(read_metrics(output_dir)) > steps + 1, job, 120)
            job.send_signal(what)
            assert job.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            end_processes(job.pid)
        assert asked.read_text() == "requeue 17\n" * number
        metrics = read_metrics(output_dir)
        assert [m["step"] for m in metrics] == list(range(1, len(metrics) + 1)) and len(metrics) > steps
        steps = len(metrics)
        assert (output_dir / "checkpoints" / "latest").read_text() == f"step-{steps:06d}"


@pytest.mark.parametrize("flags, complaint", [
    (["--max-step", "3"], "--max-step"), (["--train-data", "nowhere.jsonl"], "--train-data nowhere.jsonl: no such file"),
])  # fmt: skip
def test_a_wrong_flag_ends_a_launcher_before_torchrun(flags, complaint):
    environment = os.environ | {"DFLASH_PYTHON": sys.executable}
    done = subprocess.run(["bash", LAUNCH / "one_node.sh", *flags], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and complaint in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
