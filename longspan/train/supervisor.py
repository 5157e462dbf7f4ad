"""`supervise`: runs a program in several processes, and restarts all of them when one dies."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.checks import check_static_size
from longspan.train.checkpoints import CHECKPOINTS, checkpoint_steps
from longspan.train.disk import DiskFull, disk_errors
from longspan.train.interrupts import SIGNALS
from longspan.train.processes import WorkerSettings
from longspan.train.report import say

WORKERS = "workers.json"
DONE, BAD_INPUT, BUDGET_SPENT, DISK_FULL, INTERRUPTED = 0, 2, 3, 4, 130
FINAL = (DONE, BAD_INPUT, DISK_FULL, INTERRUPTED)  # a restart would not change these
POLL_SECONDS, GRACE_SECONDS = 0.05, 60
LOOPBACK = "127.0.0.1"


def supervise(
    command: Sequence[str],
    processes: int,
    out: str | os.PathLike,
    *,
    restarts: int = 3,
    heartbeat_seconds: int = 20,
    address: str = LOOPBACK,
) -> int:
    """Runs a command in several processes until all of them are done, and returns an exit code.

    The command must call `ls.train.join()` before it uses JAX, and `ls.train.fit(..., resume=True)`. If a process dies,
    the others would wait for it until JAX ends them. So the supervisor ends them at once, and starts all of them again:
    they continue from the last checkpoint. `workers.json` in the folder of the run has the id of each process by rank.
    Ctrl-C and SIGTERM are passed on once, so that the processes save and stop; the second one ends them.

    Args:
        command: the program and its arguments.
        processes: the number of processes.
        out: the folder of the run.
        restarts: the number of restarts without a new checkpoint in between.
        heartbeat_seconds: processes that the coordinator does not hear of for so long are taken for dead.
        address: the address at which the coordinator listens; by default only this machine reaches it.

    Returns:
        0 if all processes are done, 3 if the restarts are spent, 130 after an interruption. A process that ends with 2
        (bad input) or 4 (disk full) is not restarted, and its code is returned.

    Example:
        >>> import sys
        >>> from longspan import train
        >>> with tempfile.TemporaryDirectory() as out:
        ...     train.supervise([sys.executable, "-c", "raise SystemExit(0)"], 2, out)
        0
    """
    check_static_size("processes", processes, 1)
    check_static_size("restarts", restarts, 0)
    if check_static_size("heartbeat_seconds", heartbeat_seconds, 1) > 30:
        say(f"heartbeat_seconds={heartbeat_seconds}: a dead process may be found only after so long")
    out = Path(out)
    folder, left = out / CHECKPOINTS, restarts
    with _Workers(command, processes, heartbeat_seconds, address) as workers:
        while True:
            before = checkpoint_steps(folder)[:1]
            try:
                workers.start(out)
            except DiskFull as error:
                say(str(error))
                return DISK_FULL
            rank, code = workers.wait()
            if code in FINAL:
                return code
            if workers.interrupted:
                return INTERRUPTED
            if checkpoint_steps(folder)[:1] != before:
                left = restarts
            if not left:
                say(f"process {rank} ended with {_words(code)}, and {restarts} restarts brought no new checkpoint")
                return BUDGET_SPENT
            left -= 1
            say(f"process {rank} ended with {_words(code)}: restarting all {processes} processes")


class _Workers:
    """The processes of a run, which end with this block."""

    def __init__(self, command: Sequence[str], count: int, heartbeat_seconds: int, address: str):
        self.command, self.count = [*command], count
        self.heartbeat_seconds, self.address = heartbeat_seconds, address
        self.running: list[subprocess.Popen] = []
        self.interrupted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Workers":
        self._before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, out: Path) -> None:
        """Starts all processes, and writes their ids."""
        port = _free_port(self.address)
        at = f"{self.address}:{port}"
        for rank in range(self.count):
            settings = WorkerSettings(at, at, self.count, rank, self.heartbeat_seconds)
            # A session of its own: Ctrl-C in a terminal reaches the supervisor alone. The pipe is never written to: a
            # process ends when it closes.
            self.running.append(
                subprocess.Popen(
                    self.command, env=os.environ | settings.environment(), stdin=subprocess.PIPE, start_new_session=True
                )
            )
        part = out / f"{WORKERS}.part"
        with disk_errors(str(out / WORKERS)):
            out.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({str(rank): one.pid for rank, one in enumerate(self.running)}) + "\n", "utf-8")
            os.replace(part, out / WORKERS)

    def wait(self) -> tuple[int, int]:
        """Waits until all processes are done or one failed, ends the others, and returns its rank and its code."""
        deadline = None
        while True:
            codes = [one.poll() for one in self.running]
            failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, DONE, INTERRUPTED)]
            over = None not in codes
            if INTERRUPTED in codes and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            if over or failed or (deadline is not None and time.monotonic() > deadline):
                self.kill()
                ended = [(rank, code) for rank, code in enumerate(codes) if code == INTERRUPTED]
                return [*failed, *ended, (0, DONE)][0]
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Ends all processes at once."""
        for one in self.running:
            if one.poll() is None:
                one.kill()
            one.wait()
            if one.stdin is not None:
                one.stdin.close()
        self.running = []

    def _pass_on(self, number: int, frame: Any) -> None:
        for one in self.running:
            if one.poll() is None:
                one.send_signal(signal.SIGKILL if self.interrupted else signal.SIGTERM)
        self.interrupted = True


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return free.getsockname()[1]


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
