"""Runs in processes of their own: kills at any moment, several processes, the supervisor."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from longspan import train
from longspan.train.checkpoints import checkpoint_steps, find_damage
from tests.train.small import losses

ROOT = Path(__file__).parent.parent.parent
STEPS = 8
SECONDS = 240
RANDOM_KILLS = 20


def settings(devices):
    # Programs are compiled once, as in the other tests.
    cache = dict(
        JAX_COMPILATION_CACHE_DIR=str(ROOT / "build" / "jax"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="0",
    )
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    return os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=str(ROOT), **cache)


def start(out, devices=1, before=(), steps=STEPS, **given):
    program = [sys.executable, "-m", "tests.train.run_small", str(out), str(steps), json.dumps(given)]
    return subprocess.Popen(
        [*before, *program],
        cwd=ROOT,
        env=settings(devices),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def ended(process):
    """The exit code and the lines on stderr."""
    try:
        told = process.communicate(timeout=SECONDS)[1]
    finally:
        process.kill()
    return process.returncode, told


def run(out, **given):
    code, told = ended(start(out, **given))
    assert code == 0, told
    return told


def supervised(processes, out, *more):
    """A command line before that of `run_small`, which runs it under the supervisor."""
    program = (
        "import sys; from longspan import train; sys.exit(train.supervise(sys.argv[3:], int(sys.argv[1]), sys.argv[2]))"
    )
    return [sys.executable, "-c", program, str(processes), str(out), *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of an uninterrupted run in one process on one device."""
    out = tmp_path_factory.mktemp("whole")
    run(out, save_every=2)
    return losses(out)


def assert_close(found, wanted, allowed):
    assert list(found) == list(wanted)
    values = [np.array([float.fromhex(text) for text in each.values()]) for each in (found, wanted)]
    np.testing.assert_allclose(*values, rtol=0, atol=allowed)


@pytest.mark.check
def test_runs_that_were_killed_and_resumed_equal_one_that_was_not(tmp_path, whole):
    """kill -9 in the first step, in a later one, and during a save; each step occurs once, with equal bits."""
    # Checkpoint 4 may be unfinished when the batch of step 6 is made.
    for kill, last in ((["batch", 0, 0], [None]), (["batch", 5, 0], [2, 4]), (["save", 6, 0], [4])):
        code, told = ended(start(tmp_path, save_every=2, kills=[kill]))
        assert code == -signal.SIGKILL, told
        assert max(checkpoint_steps(tmp_path / "checkpoints"), default=None) in last
    told = run(tmp_path, save_every=2)
    assert told == "resumed from step 4\n"
    assert losses(tmp_path) == whole


@pytest.mark.slow
def test_random_kills_lose_no_checkpoint(tmp_path):
    """Each kill comes at a random moment after a new step, mid-step or during a save; a save follows every step."""
    given = dict(steps=1000, save_every=1, keep=2)
    run(tmp_path / "whole", **given)
    rng, last, out = random.Random(0), 0, tmp_path / "killed"
    for _ in range(RANDOM_KILLS):
        before = metrics_of(out)
        process = start(out, **given)
        wait_for(partial(has_new_step, last, before, out, process))
        time.sleep(rng.uniform(0, 0.3))
        assert process.poll() is None, "the run ended before it was killed"
        process.kill()
        _, told = ended(process)
        assert "damaged" not in told
        now = max([0, *checkpoint_steps(out / "checkpoints")])
        assert now >= last
        last = now
    assert last > RANDOM_KILLS
    run(out, **given)
    assert losses(out) == losses(tmp_path / "whole")


def metrics_of(out):
    path = out / "metrics.jsonl"
    return path.read_text() if path.exists() else ""


def has_new_step(last, before, out, process):
    """Whether a process has written the line of a step after `last`, or has ended."""
    now = metrics_of(out)
    # The process before may have written lines of steps after its last checkpoint; they are cut.
    written = now != before and any(int(found) > last for found in re.findall(r'"step": (\d+), ', now))
    return written or process.poll() is not None


@pytest.mark.check
def test_processes_under_a_supervisor_survive_kills(tmp_path, whole):
    """A worker and rank 0 kill themselves, in a step and during a save. One device and two give the same losses."""
    given = dict(save_every=2, mesh=dict(dp=2))
    kills = [["batch", 5, 1], ["save", 8, 0]]
    code, told = ended(start(tmp_path, before=supervised(2, tmp_path), kills=kills, **given))
    assert code == 0, told
    assert "process 1 ended with signal SIGKILL: restarting all 2 processes" in told
    assert "process 0 ended with signal SIGKILL: restarting all 2 processes" in told
    assert re.search("resumed from step [24]", told) and "resumed from step 6" in told and "damaged" not in told
    assert_close(losses(tmp_path), whole, 1e-6)
    assert set(json.loads((tmp_path / "workers.json").read_text())) == {"0", "1"}


@pytest.mark.check
def test_two_processes_of_four_devices_equal_one_process_of_eight(tmp_path, whole):
    """And the checkpoint of the two resumes in the one."""
    given, one, two = dict(mesh=dict(dp=2, fsdp=4)), tmp_path / "one", tmp_path / "two"
    run(one, devices=8, **given)
    code, told = ended(start(two, devices=4, before=supervised(2, two), steps=5, **given))
    assert code == 0, told
    assert run(two, devices=8, **given) == "resumed from step 5\n"
    assert_close(losses(two), losses(one), 1e-5)
    assert_close(losses(one), whole, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(fsdp=2, tp=2, sp=2), dict(dp=2, sp=4), dict(fsdp=4, tp=2)], ids=str)
def test_a_decoder_on_two_processes_equals_one_device(mesh, tmp_path):
    code, told = ended(start(tmp_path, devices=4, before=supervised(2, tmp_path), decoder=True, mesh=mesh))
    assert code == 0, told
    run(tmp_path / "alone", decoder=True)
    assert_close(losses(tmp_path), losses(tmp_path / "alone"), 1e-5)


@pytest.mark.check
def test_an_interrupted_supervisor_saves_and_returns_130(tmp_path):
    process = start(tmp_path, before=supervised(2, tmp_path), steps=1000, sleep=0.1, mesh=dict(dp=2), save_every=1)
    wait_for(lambda: len(losses(tmp_path)) > 2 if (tmp_path / "metrics.jsonl").exists() else False)
    process.send_signal(signal.SIGINT)
    code, told = ended(process)
    assert code == 130, told
    assert checkpoint_steps(tmp_path / "checkpoints")[0] == max(losses(tmp_path))


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


# Programs for the supervisor that take no time: they use none of JAX.
def program(text):
    return [
        sys.executable,
        "-c",
        f"import os, signal, sys, time; rank = int(os.environ['LONGSPAN_WORKER_RANK']); {text}",
    ]


def supervise(out, text, processes=2, **given):
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longspan.train.supervisor.say", told.append)
        return train.supervise(program(text), processes, out, **given), told


def test_spent_restarts_return_3(tmp_path):
    code, told = supervise(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", restarts=2)
    assert code == 3
    assert told == [
        "process 1 ended with signal SIGKILL: restarting all 2 processes",
        "process 1 ended with signal SIGKILL: restarting all 2 processes",
        "process 1 ended with signal SIGKILL, and 2 restarts brought no new checkpoint",
    ]


def test_a_new_checkpoint_renews_the_restarts(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    text = f"n = len(os.listdir({str(folder)!r})); n < 3 and os.mkdir({str(folder)!r} + f'/{{n}}'); sys.exit(1)"
    code, told = supervise(tmp_path, text, processes=1, restarts=1)
    assert code == 3 and len(told) == 4, told
    assert told[0] == "process 0 ended with exit code 1: restarting all 1 processes"


@pytest.mark.parametrize("code", [0, 2, 4])
def test_codes_that_a_restart_would_not_change_are_returned(code, tmp_path):
    assert supervise(tmp_path, f"sys.exit({code}) if rank or not {code} else time.sleep(60)") == (code, [])


def test_a_disk_that_is_full_when_the_processes_start_is_code_4(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, told = supervise(tmp_path, "time.sleep(60)")
    assert code == 4 and [line.partition(" could")[0] for line in told] == [
        f"The disk is full: {tmp_path / 'workers.json'}"
    ]


def test_processes_end_with_a_killed_supervisor(tmp_path):
    worker = program("from longspan.train import processes; processes._end_with_supervisor()")
    process = subprocess.Popen(supervised(2, tmp_path, *worker), cwd=ROOT, env=settings(1))
    wait_for((tmp_path / "workers.json").exists)
    pids = json.loads((tmp_path / "workers.json").read_text()).values()
    assert all(map(alive, pids))
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, pids)))


def test_a_heartbeat_of_more_than_30_seconds_is_noted(tmp_path):
    code, told = supervise(tmp_path, "sys.exit(0)", heartbeat_seconds=100)
    assert code == 0 and told == ["heartbeat_seconds=100: a dead process may be found only after so long"]


@pytest.mark.check
def test_a_full_disk_ends_with_4_and_an_intact_checkpoint(tmp_path):
    """On a file system of 700 KB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        code, told = ended(start(tmp_path, steps=200, save_every=2, keep=500))
        assert code == 4
        assert re.fullmatch(r"The disk is full: \S+ could not be written. The last checkpoint is intact.*\n", told)
        found = checkpoint_steps(tmp_path / "checkpoints")
        assert found and find_damage(tmp_path / "checkpoints" / str(found[0])) is None
        # Fewer checkpoints are kept, which frees space before the next one is written.
        told = run(tmp_path, steps=found[0] + 10, save_every=2, keep=2)
        assert told == f"resumed from step {found[0]}\n"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
