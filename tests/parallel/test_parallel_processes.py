"""Attention with a sequence sharded over several processes equals one device."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "one_process.py"
ROOT = PROGRAM.parent.parent.parent
SECONDS = 240


@pytest.mark.check
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_of_two_devices_equal_one_device(processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    settings = os.environ | dict(
        JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    command = [sys.executable, str(PROGRAM), str(port), str(processes)]
    running = [
        subprocess.Popen([*command, str(i)], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(processes)
    ]
    try:
        told = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, told, strict=True):
        assert process.returncode == 0, text
        assert "window and global tokens: equal" in text
        assert "documents: equal" in text
