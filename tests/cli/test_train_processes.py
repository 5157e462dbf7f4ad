"""`longspan train` in processes of its own: killed, resumed, interrupted, and supervised."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cli import checkpoints
from tests.cli.test_train import records, write_texts

pytestmark = [pytest.mark.check, pytest.mark.usefixtures("unchecked")]

SECONDS = 240  # the longest that a step of these runs may take on a busy machine


def command(*arguments):
    return [sys.executable, "-m", "longspan", "train", *map(str, arguments)]


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """The arguments of a small run that starts from nothing: a decoder of bytes."""
    folder = tmp_path_factory.mktemp("new")
    config = folder / "config.json"
    config.write_text(json.dumps(dict(model_type="llama", **checkpoints.SMALL | dict(hidden_size=8))))
    options = ("--data", write_texts(folder / "texts"), "--batch", 4, "--length", 64, "--steps", 40)
    return ("--new", config, *options, "--save-every", 4, "--eval-every", 20)


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=SECONDS)


def wait_for_step(out, step, process):
    """Waits until a run has written a step's line."""
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        path = out / "metrics.jsonl"
        if path.exists() and len(path.read_text("utf-8").splitlines()) >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"the run did not reach step {step}")


def losses(out):
    return [(record["step"], record["loss_hex"]) for record in records(out) if "loss_hex" in record]


@pytest.fixture(scope="module")
def whole(new, tmp_path_factory):
    """The folder of the uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run(*new, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_a_killed_run_continues_with_equal_losses(new, whole, tmp_path):
    out = tmp_path / "killed"
    with subprocess.Popen(command(*new, "--out", out), stderr=subprocess.DEVNULL) as process:
        wait_for_step(out, 10, process)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "model").exists()
    again = run("--resume", out)
    assert again.returncode == 0, again.stderr
    assert "resumed from step " in again.stderr
    assert losses(out) == losses(whole)
    assert [step for step, _ in losses(out)] == list(range(1, 41))
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        for folder in ("model", "best"):
            assert (out / folder / name).read_bytes() == (whole / folder / name).read_bytes()


def test_an_interrupted_run_saves_its_last_step(new, tmp_path):
    out = tmp_path / "run"
    with subprocess.Popen(command(*new, "--out", out), stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(out, 6, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    last = losses(out)[-1][0]
    assert f"interrupted; step {last} is saved. Continue with: longspan train --resume {out}" in err
    assert (out / "checkpoints" / str(last)).is_dir()


def test_processes_restart_after_one_of_them_dies(new, tmp_path):
    out = tmp_path / "run"
    arguments = command(*new, "--out", out, "--processes", 2)
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(out, 6, process)
        workers = json.loads((out / "workers.json").read_text("utf-8"))
        assert set(workers) == {"0", "1"}
        os.kill(workers["1"], signal.SIGKILL)
        _, err = process.communicate(timeout=2 * SECONDS)
    assert process.returncode == 0, err
    assert "process 1 ended with signal SIGKILL: restarting all 2 processes" in err
    assert [step for step, _ in losses(out)] == list(range(1, 41))
    assert (out / "model" / "model.safetensors").is_file()
    # All processes find that the checkpoint is of another model, and one of them says it.
    summary = out / "checkpoints" / "40" / "longspan.json"
    summary.write_text(summary.read_text("utf-8").replace('"float32"', '"float64"'), "utf-8")
    again = run("--resume", out, "--steps", 44)
    assert again.returncode == 2
    assert again.stderr.count("is of another model, dtype or optimizer") == 1, again.stderr


def on_cluster(port, rank, *arguments):
    """A process as Open MPI starts it, with two CPU devices."""
    cluster = dict(
        OMPI_MCA_orte_hnp_uri="1531576320.0;tcp://127.0.0.1:34911",
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_RANK=str(rank),
        OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
        JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
        JAX_NUM_CPU_DEVICES="2",
    )
    return subprocess.Popen(command(*arguments), env=os.environ | cluster, stderr=subprocess.PIPE, text=True)


def test_processes_of_a_cluster_share_the_batch(new, whole, tmp_path):
    out = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [on_cluster(port, rank, *new, "--out", out) for rank in range(2)]
    told = [process.communicate(timeout=SECONDS)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert json.loads((out / "run.json").read_text("utf-8"))["arguments"]["dp"] == 4
    values = [[float.fromhex(loss) for _, loss in losses(folder)] for folder in (out, whole)]
    np.testing.assert_allclose(*values, rtol=0, atol=1e-5)
    assert (out / "best" / "model.safetensors").is_file() and "step 40 of 40" in told[0]
    assert not any(word in told[1] for word in ("compil", "step", "longspan train:")), told[1]
    wrong = {
        "--dp · --fsdp · --tp · --sp = 2 devices, but the 2 processes of the cluster have 4.": (
            "--resume",
            out,
            "--dp",
            2,
        ),
        f"{out} exists and is not empty.": (*new, "--out", out),
    }
    for message, arguments in wrong.items():
        both = [on_cluster(port, rank, *arguments) for rank in range(2)]
        told = [process.communicate(timeout=SECONDS)[1] for process in both]
        assert [process.returncode for process in both] == [2, 2]
        assert all(message in text for text in told), told
