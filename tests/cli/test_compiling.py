"""Notices of compilation and its seconds appear on stderr, never on stdout, and not with --json."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspan.cli.notices import DelayedStream, compiling, covered

pytestmark = pytest.mark.usefixtures("unchecked")

SAID = r"compiling {0} \.\.\.\ncompiled {0} in (\d+\.\d) s\n"


def test_the_seconds_are_those_that_jax_compiled(capsys):
    with compiling("a sum") as compiled:
        jax.jit(lambda x: (x * 2).sum())(np.arange(17.0))
        assert capsys.readouterr().err == "compiling a sum ...\n", "as soon as it begins"
        compiled()
        found = re.fullmatch(r"compiled a sum in (\d+\.\d) s\n", capsys.readouterr().err)
        assert found and float(found[1]) < 100
        jax.jit(lambda x: (x * 3).sum())(np.arange(17.0))
    assert capsys.readouterr() == ("", ""), "once"


def test_without_compilation_nothing_is_printed(capsys):
    with compiling("nothing"):
        pass
    assert capsys.readouterr() == ("", "")


def test_time_that_is_not_spent_compiling_does_not_count(capsys, monkeypatch):
    from jax import monitoring

    clock = iter([10.0, 11.5, 12.0])
    monkeypatch.setattr("longspan.cli.notices.time.perf_counter", lambda: next(clock))
    with compiling("it"):
        monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 1.0)
        monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)
        monitoring.record_event_duration_secs("/jax/compilation_cache/cache_retrieval_time_sec", 500.0)
    assert capsys.readouterr().err == "compiling it ...\ncompiled it in 2.0 s\n"
    assert covered([(0.0, 2.0), (1.0, 3.0), (2.5, 2.6)]) == 3.0 and covered([]) == 0.0


def test_the_listener_is_removed_and_an_error_prints_no_notice(capsys):
    from jax._src import monitoring

    before = list(monitoring.get_event_duration_listeners())
    with pytest.raises(ValueError, match="stopped"), compiling("it"):
        assert len(monitoring.get_event_duration_listeners()) == len(before) + 1
        raise ValueError("stopped")
    assert list(monitoring.get_event_duration_listeners()) == before
    assert capsys.readouterr() == ("", "")
    with compiling("it", quiet=True) as compiled:
        compiled()
    assert capsys.readouterr() == ("", "")


def test_tokens_wait_until_both_programs_are_compiled():
    events = []
    held = DelayedStream(lambda row, token: events.append((row, token)), 2, lambda: events.append("compiled"))
    held(0, 5)
    held(1, 6)
    assert events == []
    held(0, 7)
    assert events == ["compiled", (0, 5), (1, 6), (0, 7)]
    held(1, 8)
    held.release()
    assert [event for event in events if event != "compiled"] == [(0, 5), (1, 6), (0, 7), (1, 8)]


def test_encode_prints_a_notice_per_shape_but_not_with_json(run, saved, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("w1\nw2 w3\n" + "w4 " * 80 + "\n" + "w5 " * 60 + "\n")
    jax.clear_caches()
    command = ("encode", "--model", saved("bert"), lines, "--lines", "--out", tmp_path / "v.npy", "--batch-tokens", 64)
    code, out, err = run(*command)
    shapes = [r"the encoder for 96 tokens", r"the encoder for 64 tokens"]
    found = re.fullmatch("".join(SAID.format(shape) for shape in shapes), err)
    assert code == 0 and found and all(float(seconds) > 0 for seconds in found.groups())
    assert "compil" not in out
    code, out, err = run(*command, "--json")
    assert (code, err) == (0, "") and json.loads(out)["documents"] == 4


def test_bench_prints_a_notice_per_length_but_not_with_json(run):
    command = ("bench", "-T", "16,32", "--heads", 1, "--head-dim", 8, "--rounds", 1, "--engine", "xla", "--no-peers")
    code, out, err = run(*command)
    assert code == 0 and "compil" not in out
    assert re.fullmatch("".join(SAID.format(f"attention for {length} tokens") for length in (16, 32)), err)
    assert run(*command, "--json")[2] == ""


def test_commands_that_compile_nothing_print_no_notice(run):
    """These commands plan in NumPy. If they compiled a program, JAX would report an event."""
    events = []
    listen = lambda event, duration_secs, **_: events.append(event)  # noqa: E731
    jnp.zeros(3).block_until_ready()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for command in (
            ["show", "Causal()"],
            ["explain", "Causal()", "--shape", "1,64,1,8"],
            ["diff", "Full()", "Full()"],
        ):
            assert run(*command)[2] == ""
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if event.startswith("/jax/core/compile/backend")]
