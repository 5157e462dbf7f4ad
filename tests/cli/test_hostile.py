"""Huge sizes, full disks, devices and closed streams give one line and an exit code, and damage no file."""

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import longspan as ls
from longspan.cli import _escape_unprintable, library
from longspan.cli.notices import say
from longspan.cli.texts import read_stdin, stop_tokens
from longspan.files import atomic_write, check_writable
from tests.cli.asserts import assert_one_line

pytestmark = pytest.mark.usefixtures("unchecked")

HUGE = 99999999999999999999
AT_MOST = "Input should be less than or equal to"
TOO_LARGE = {
    "show queries": (["show", "Causal()", "-T", HUGE], AT_MOST),
    "show keys": (["show", "Causal()", "-S", HUGE], AT_MOST),
    "show tile": (["show", "Causal()", "-T", 64, "--tile", 99999999999, "--png", "a.png"], AT_MOST),
    "show tiles": (
        ["show", "Causal()", "-T", 10**9, "--tile", 1, "--png", "a.png"],
        "--tile: 1,000,000,000 tokens in tiles of 1 are 1,000,000,000 tiles along a side, more than 65,536. Give a "
        "tile of at least 15,259.",
    ),
    "show head": (["show", "Causal()", "-T", 4, "--head", HUGE], AT_MOST),
    "show batch": (["show", "Causal()", "-T", 4, "--batch", HUGE], AT_MOST),
    "explain tokens": (
        ["explain", "Causal()", "--shape", "1,99999999999,1,1"],
        "--shape: the number of tokens must be at most 16,777,216, got 99,999,999,999.",
    ),
    "explain keys": (["explain", "Causal()", "--shape", "1,8,1,8", "-S", HUGE], AT_MOST),
    "explain kv heads": (["explain", "Causal()", "--shape", "1,8,1,8", "--kv-heads", HUGE], AT_MOST),
    "diff queries": (["diff", "Causal()", "Full()", "-T", 2**24 + 1], f"{AT_MOST} 16777216"),
    "diff keys": (["diff", "Causal()", "Full()", "-S", HUGE], AT_MOST),
    "check": (["check", ".", "-T", HUGE], AT_MOST),
    "bench lengths": (["bench", "-T", 2**24 + 1], "--lengths must be numbers of tokens from 1 to 16,777,216"),
    "bench heads": (["bench", "-T", 64, "--heads", HUGE], AT_MOST),
    "bench rounds": (["bench", "-T", 64, "--rounds", HUGE], AT_MOST),
    "bench memory": (
        ["bench", "-T", 64, "--heads", 10**9],
        "q, k and v of 64 tokens and 1,000,000,000 heads of size 64 need 49,152 GB, but this machine has",
    ),
    "new tokens": (["generate", "--model", ".", "--prompt", "a", "--max-new-tokens", HUGE], AT_MOST),
    "seed": (["generate", "--model", ".", "--prompt", "a", "--seed", HUGE], AT_MOST),
    "top k": (["generate", "--model", ".", "--prompt", "a", "--top-k", HUGE], AT_MOST),
    "batch tokens": (["encode", "a", "--model", ".", "--out", "b.npy", "--batch-tokens", HUGE], AT_MOST),
    "bigbird": (
        ["show", "bigbird(64000000, block_size=1)"],
        "64,000,000 blocks, more than 16,384. Give block_size=4000, or",
    ),
    "stdin twice": (["encode", "-", "-", "--model", ".", "--out", "b.npy"], "- is given more than once, but standard"),
    "long": (["show", "x" * 100_000], "The expression must have at most 20,000 characters, got 100,000."),
    "nul": (["show", "Causal()\0"], "is not an expression"),
    "nul in a path": (["show", "Causal()", "-T", 4, "--html", "a\0.html"], "embedded null byte"),
    "not utf-8": (["show", "Causal(\udcff)"], "is not UTF-8 text, at character 7."),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_would_not_end_is_refused_before_it_begins(run, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, words = TOO_LARGE[name]
    start = time.monotonic()
    assert_one_line(run(*arguments), words)
    assert time.monotonic() - start < 20  # without the check, each would run for minutes or fill the memory
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "There is not enough memory. Give smaller sizes."),
        (
            MemoryError("Unable to allocate 9 EiB"),
            "There is not enough memory (Unable to allocate 9 EiB). Give smaller",
        ),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "There is not enough memory (RESOURCE_EXHAUSTED: Out"),
        (RecursionError("maximum recursion depth exceeded"), "The input is nested too deeply."),
        (OSError(28, "No space left on device"), "standard output: No space left on device"),
        (PermissionError(13, "Permission denied", "ids.npy"), "ids.npy: Permission denied"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_machine_are_one_line(run, monkeypatch, error, words):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(ls.Mask, "show", fails)
    assert_one_line(run("show", "Causal()", "-T", 4), words)


def test_a_full_disk_leaves_the_earlier_file(run, tmp_path):
    out = tmp_path / "a.html"
    out.write_text("of an earlier run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        result = run("show", "Causal()", "-T", 64, "--html", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_one_line(result, f"{out} cannot be written: File too large.")
    assert out.read_text() == "of an earlier run"
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_arrays_on_a_full_disk_name_the_file(tmp_path):
    """NumPy raises an OSError without a number: "1000 requested and 0 written"."""
    with (
        pytest.raises(OSError, match=r"v\.npy cannot be written: 8 requested and 0 written\."),
        atomic_write(tmp_path / "v.npy"),
    ):
        raise OSError("8 requested and 0 written")
    assert list(tmp_path.iterdir()) == []


def test_a_device_or_pipe_receives_the_bytes_and_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe.svg"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        with atomic_write(pipe) as new:
            assert new.suffix == ".svg"
            new.write_text("whole")
        assert reader.communicate(timeout=20)[0] == b"whole"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe.svg"]


def test_a_file_keeps_its_permissions_and_a_link_its_target(tmp_path):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    with atomic_write(link) as new:
        new.write_text("new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_read_only_file_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "kept.txt"
    path.write_text("kept")
    monkeypatch.setattr(os, "access", lambda where, mode: mode != os.W_OK)  # tests may run as root
    with pytest.raises(
        PermissionError, match=r"kept\.txt is read-only\. Change its permissions, or name another file\."
    ):
        check_writable(path)


def test_a_long_name_is_no_problem_for_the_temporary_file(tmp_path):
    path = tmp_path / ("n" * 240 + ".txt")
    with atomic_write(path) as new:
        new.write_text("whole")
    assert path.read_text() == "whole"


def test_without_stderr_an_error_does_not_go_to_stdout(run, monkeypatch, capsys):
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        say("nobody reads this")
        assert run("show", "Nonsense()")[:2] == (2, "")
    gone = SimpleNamespace(write=lambda text: (_ for _ in ()).throw(BrokenPipeError()), flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", gone)
    say("nor this")


def test_a_closed_standard_input_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(
        ValueError, match=r"Standard input is closed, so `-` cannot be read\. Name a file, or pipe text"
    ):
        read_stdin()


def test_an_interrupt_that_python_drops_is_raised_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    monkeypatch.setattr(library, "RETRY_SECONDS", 0.01)
    library.repeat_dropped_interrupts()
    sys.unraisablehook(SimpleNamespace(exc_type=ValueError))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            sys.unraisablehook(SimpleNamespace(exc_type=KeyboardInterrupt))
            time.sleep(20)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_the_encoding_lacks_is_printed_as_escapes(tmp_path, monkeypatch):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        _escape_unprintable()
        print("a\udcff ✓")
    assert (tmp_path / "out").read_text() == "a\\udcff \\u2713\n"


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_a_broken_generation_config_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config.json is not a JSON object. Download or save it again."):
        stop_tokens(tmp_path)


@pytest.mark.parametrize("token", ['"x"', "[1.5]", "true", "[null]"])
def test_a_stop_token_is_a_number(tmp_path, token):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {token}}}')
    with pytest.raises(ValueError, match=r"config.json: 'eos_token_id' must be a token id or a list of them, got"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize(("length", "keys"), [(10**9, None), (1, 10**9), (10**9, 1)])
def test_show_draws_any_length(run, length, keys):
    code, out, _ = run("show", "Causal()", "-T", length, *([] if keys is None else ["-S", keys]), "--json")
    assert code == 0 and f'"queries": {length}' in out


def test_a_file_that_is_no_file_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")  # reading it would wait forever
    for name in ("folder.npy", "pipe.npy"):
        assert_one_line(run("show", f"Segments('{name}')"), f"{name}: it is not a file.")
    monkeypatch.setattr(np, "load", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert_one_line(run("show", "Segments('secret.npy')"), "secret.npy: Permission denied.")
