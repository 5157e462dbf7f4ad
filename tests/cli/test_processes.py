"""The command as a process: its entry point, pipes, interrupts, completion. Few tests: JAX takes a second to load."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import longspan as ls
from longspan.cli.library import _uninterrupted
from tests.cli import checkpoints

ROOT = Path(__file__).parent.parent.parent
ENTRY = "from _longspan_command import main; main()"


def start(*arguments, code=ENTRY, **options):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"COLUMNS": "100"} | options.pop("env", {})
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    # Enables Ctrl-C as in a terminal: a process that a shell starts in the background ignores it.
    listening = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, **(pipes | options), text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, listening)


def run(*arguments, **options):
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_the_entry_point_starts_without_jax():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["scripts"] == {"longspan": "_longspan_command:main"}
    assert "_longspan_command" in project["tool"]["scikit-build"]["wheel"]["packages"]


def test_help_comes_before_jax():
    heavy = "{'jax', 'flax', 'matplotlib'}"
    told = f"import sys, atexit; atexit.register(lambda: print(*sorted({heavy} & set(sys.modules)))); "
    code, out, err = run("--help", code=told + ENTRY)
    assert (code, err) == (0, "")
    assert "generate" in out and out.endswith("\n\n"), "none of them was loaded"
    assert run("show", "--wrong", code=told + ENTRY)[:2] == (2, "\n")


def test_a_command_runs_by_its_entry_point_and_as_a_module():
    code, out, err = run("show", "Causal() & Window(1, 0)", "-T", "3", "--json")
    assert (code, err) == (0, "") and json.loads(out)["allowed"] == pytest.approx(5 / 9)
    module = "import runpy; runpy.run_module('longspan', run_name='__main__')"
    assert run("show", "Cau", code=module) == (2, "", "longspan: 'Cau' is a name without arguments. Write the "
                                               "arguments in parentheses: Causal(), Window(511, 0).\n")  # fmt: skip


@pytest.mark.parametrize("length", [3, 500], ids=["at the end", "in between"])
def test_a_reader_that_leaves_early_is_no_error(length):
    with start("show", "Causal()", "-T", length, "--max-cells", 500) as process:
        process.stdout.close()  # before anything is written
        err = process.stderr.read()
    assert (process.returncode, err) == (1, "")


def test_interrupted_while_it_waits_it_leaves_without_a_word(tmp_path):
    directory = checkpoints.llama(tmp_path)
    with start("generate", "--model", directory, "--prompt", "-") as process:
        wait_until_it_reads(process)
        process.send_signal(signal.SIGINT)
        said = process.stdout.read(), process.stderr.read()
    assert (process.returncode, *said) == (130, "", "")


def test_interrupted_while_it_computes_it_leaves_nothing_behind(tmp_path):
    endless = ("bench", "-T", "64", "--heads", 1, "--rounds", 10**6, "--engine", "xla", "--no-peers")
    with start(*endless, "--save", tmp_path, "--plot", tmp_path / "times.svg") as process:
        time.sleep(3)
        out, err = interrupted(process)
    assert (process.returncode, out) == (130, "")
    assert all(line.startswith(("compiling", "compiled")) for line in err.splitlines())
    assert list(tmp_path.iterdir()) == []


def interrupted(process):
    """The output after Ctrl-C, which is repeated every five seconds: JAX drops an interrupt while it traces."""
    for _ in range(12):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    raise AssertionError("it does not end")


def test_an_interrupt_waits_for_the_library_to_be_loaded(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run without it, in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    done = []
    with pytest.raises(KeyboardInterrupt), _uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def wait_until_it_reads(process):
    """Waits until the process reads its standard input; two seconds on systems without /proc."""
    what, until = Path(f"/proc/{process.pid}/wchan"), time.monotonic() + 20
    if not what.exists():
        return time.sleep(2)
    while time.monotonic() < until and "pipe_read" not in what.read_text():
        time.sleep(0.05)
    return time.sleep(0.1)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_without_jax(shell):
    words = {"bash": {"COMP_WORDS": "longspan sh", "COMP_CWORD": "1"}}
    told = {"_TYPER_COMPLETE_ARGS": "longspan sh", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code, out, _ = run(env={"_LONGSPAN_COMPLETE": f"complete_{shell}"} | words.get(shell, told))
    assert code == 0 and re.search(r"\bshow\b", out) and "explain" not in out


def test_a_closed_or_full_standard_output_is_no_traceback():
    closed = "import sys; sys.stdout = None; "  # as Python does if the shell closed it with `>&-`
    assert run("show", "Causal()", "-T", "3", code=closed + ENTRY) == (0, "", "")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            code, _, err = run("show", "Causal()", "-T", "3", stdout=full)
        assert (code, err) == (2, "longspan: standard output: No space left on device\n")


def test_without_a_terminal_nothing_is_coloured():
    code, out, err = run("explain", "Causal()", "--shape", "1,64,1,8", stdin=subprocess.DEVNULL)
    assert (code, err) == (0, "") and "\x1b" not in out and out.startswith("engine")


def test_the_version_is_the_packages():
    assert run("--version") == (0, f"{ls.__version__}\n", "")
