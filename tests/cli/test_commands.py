"""The commands, run inside the test process: their output, their files and their errors."""

import json
import re
import xml.dom.minidom

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

import longspan as ls
from longspan import models
from longspan.cli.diff import difference
from longspan.cli.texts import TextStream
from tests.cli import checkpoints
from tests.cli.asserts import assert_one_line

pytestmark = pytest.mark.usefixtures("unchecked")


def test_show_draws_in_characters(run):
    assert run("show", "Window(1, 0)", "-T", 3) == (0, "#..\n##.\n.##\n", "")
    assert run("show", "Causal()", "-T", 2, "-S", 3) == (0, "#..\n##.\n", "")
    code, out, _ = run("show", "Causal() & Window(511, 0)")
    assert code == 0 and out == (ls.Causal() & ls.Window(511, 0)).show(2048, 2048) + "\n"


def test_show_writes_files_whole(run, tmp_path):
    names = [tmp_path / f"mask.{kind}" for kind in ("png", "svg", "html")]
    options = [word for path in names for word in (f"--{path.suffix[1:]}", path)]
    code, out, _ = run("show", "Causal()", "-T", 64, "--tile", 16, *options)
    assert code == 0 and out == f"wrote {', '.join(map(str, names))}\n"
    assert names[0].read_bytes().startswith(b"\x89PNG")
    xml.dom.minidom.parse(str(names[1]))
    assert "<title>Causal()</title>" in names[2].read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mask.html", "mask.png", "mask.svg"]


def test_show_prints_json(run):
    code, out, _ = run("show", "PerHead((Causal(), Full()))", "-T", 4, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["mask"], facts["queries"], facts["keys"], facts["heads"]) == ("PerHead((Causal(), Full()))", 4, 4, 2)
    assert facts["allowed"] == (10 + 16) / 32 and not facts["allowed_is_estimate"] and facts["files"] == []


def test_explain_is_that_of_the_library(run):
    x, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 300, 4, 16), (2, 500, 2, 16)))
    report = ls.explain(x, k, k, mask=ls.Causal())
    options = ("--shape", "2x300x4x16", "-S", 500, "--kv-heads", 2, "--dtype", "bfloat16")
    assert run("explain", "Causal()", *options) == (0, f"{report}\n", "")
    facts = json.loads(run("explain", "Causal()", *options, "--json")[1])
    assert facts["tiles_partial"] == report.tiles_partial and facts["engine"] == report.engine


def test_diff_says_where_masks_first_differ(run):
    assert run("diff", "Causal() & Window(3, 0)", "Window(3, 0)", "-T", 99) == (
        0,
        "The masks are the same for 99 queries and 99 keys.\n",
        "",
    )
    code, out, _ = run("diff", "Causal()", "Causal() & Window(800, 0)")
    assert code == 1
    assert out == (
        "The masks differ: only the first mask allows query 801 to attend to key 0. 2.4% of the pairs differ.\n"
    )
    code, out, _ = run("diff", "Chunk(7)", "PerHead((Chunk(7), Chunk(8)))", "-T", 20, "-S", 30, "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert {name: found["first_difference"][name] for name in ("head", "query", "key", "allowed_by")} == dict(
        head=1, query=0, key=7, allowed_by="second"
    )


@pytest.mark.parametrize("length", [1, 7, 130, 1000])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (ls.Causal(), ls.Causal() & ~ls.Global((6,), rows=False)),
        (ls.Window(5, 5), ls.Window(5, 4)),
        (ls.Full(), ls.Empty()),
        (ls.Segments(np.repeat(np.arange(500), 2)[None]), ls.Segments(np.arange(1000)[None] // 3)),
        (ls.Window(50, 0, dilation=2), ls.Window(49, 0, dilation=2)),
    ],
    ids=repr,
)
def test_the_first_difference_is_that_of_the_dense_masks(a, b, length):
    if any(mask._length("T") not in (None, length) for mask in (a, b)):
        pytest.skip("its ids are of another length")
    dense = [np.asarray(mask.dense(length, length))[0, 0] for mask in (a, b)]
    where = np.argwhere(dense[0] != dense[1])
    found = difference(a, b, length, length)
    if not len(where):
        assert found is None
    else:
        assert found is not None
        assert (found.query, found.key) == tuple(where[0])
        assert found.allowed_by == ("first" if dense[0][tuple(where[0])] else "second")


def test_a_million_tokens_are_compared_by_tiles():
    a, b = ls.Causal() & ls.Window(4095, 0), ls.Causal() & (ls.Window(4095, 0) | ls.Global((777_777,), rows=False))
    found = difference(a, b, 1_000_000, 1_000_000)
    assert found is not None and (found.query, found.key, found.allowed_by) == (777_777 + 4096, 777_777, "second")


def test_info_says_what_runs_and_why_not(run, monkeypatch):
    code, out, _ = run("info")
    assert code == 0 and f"longspan {ls.__version__}" in out and re.search(r"^  reference +runs$", out, re.M)
    facts = json.loads(run("info", "--json")[1])
    assert facts["longspan"] == ls.__version__ and set(facts["engines"]) >= {"cpu", "xla", "reference"}
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    facts = json.loads(run("info", "--json")[1])
    assert "LONGSPAN_NATIVE=0" in facts["engines"]["cpu"] and facts["instruction_sets"] == []


def test_bench_times_saves_compares_and_plots(run, tmp_path, monkeypatch):
    monkeypatch.setattr("longspan.cli.timing.is_installed", lambda name: False)
    small = ("bench", "Causal()", "-T", "16,32", "--heads", 1, "--head-dim", 8, "--rounds", 1, "--engine", "reference")
    code, out, err = run(*small, "--save", tmp_path, "--plot", tmp_path / "times.svg")
    assert code == 0 and "tokens" in out and "jax.nn" in out and "torch sdpa: not installed" in out
    assert "FlexAttention: not installed" in out
    (saved,) = tmp_path.glob("*.json")
    assert f"longspan-{ls.__version__}-jax-" in saved.name and f"wrote {saved}" in err
    report = json.loads(saved.read_text())
    assert {row["name"] for row in report["rows"]} == {"reference", "jax.nn", "torch sdpa", "FlexAttention"}
    assert all(row["seconds"] > 0 for row in report["rows"] if not row["left_out"])
    xml.dom.minidom.parse(str(tmp_path / "times.svg"))
    code, out, _ = run(*small, "--no-peers", "--compare", saved, "--json")
    again = json.loads(out)
    assert code == 0 and all(row["times_as_fast"] > 0 for row in again["rows"])
    code, out, _ = run(*small, "--no-peers", "--compare", saved)
    assert "times as fast" in out


def test_check_looks_into_a_checkpoint(run, saved, monkeypatch):
    monkeypatch.setattr("longspan.cli.check.is_installed", lambda name: name not in ("torch", "transformers"))
    code, out, _ = run("check", saved("mistral"), "-T", 64, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["loads"] and facts["family"] == "mistral" and facts["task"] == "causal_lm"
    assert facts["layers"] == ["0 to 1: Causal() & Window(15, 0)"]
    assert facts["cache_bytes"] == 2 * 2 * 16 * 1 * 4 * 4, "two layers, keys and values, a window, a head of 4 floats"
    assert facts["tokenizer"] == "tokenizer.json, 256 tokens"
    facts = json.loads(run("check", saved("longformer"), "--json")[1])
    assert facts["layers"] == ["0: longformer(3)", "1: longformer(5)"] and facts["longest_input"] == 90
    code, out, _ = run("check", saved("bert"))
    assert code == 0 and "0 to 1: Full()" in out and "not compared: torch and transformers are not installed" in out


@pytest.mark.parity
@pytest.mark.parametrize("name", ["bert", "llama", "mistral"])
def test_check_compares_with_pytorch(run, saved, name):
    facts = json.loads(run("check", saved(name), "--json")[1])
    found = re.fullmatch(
        r"(logits|last_hidden_state) differs by at most (\S+); its largest value is (\S+)", facts["parity"]
    )
    assert found and float(found[2]) < 1e-5 * float(found[3])


def test_check_says_what_does_not_load(run, saved, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((saved("bert") / "config.json").read_text())
    code, out, err = run("check", broken, "--json")
    facts = json.loads(out)
    assert code == 1 and err == "" and not facts["loads"] and "model.safetensors" in facts["problem"]
    (broken / "config.json").write_text('{"model_type": "whatever"}')
    assert "whatever" in json.loads(run("check", broken, "--json")[1])["problem"]
    (broken / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer" in json.loads(run("check", broken, "--json")[1])["tokenizer"]


def speaking(tokens):
    """A stand-in for `ls.generate` that generates these tokens."""
    asked = {}

    def generate(
        model,
        prompts,
        *,
        max_new_tokens,
        max_length=None,
        temperature=0.0,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=1.0,
        stop_tokens=None,
        key=None,
        stream=None,
        prefill_chunk=2048,
    ):
        asked.update(locals())
        said = tokens[:max_new_tokens]
        for token in said:
            stream(0, np.int32(token))
        return [np.array(said, np.int32)]

    return generate, asked


def test_generate_streams_whole_characters(run, saved, monkeypatch):
    text = "naïve — 日本語 👩‍🚀!"
    tokens = checkpoints.byte_level().encode(text).ids
    generate, asked = speaking(tokens)
    monkeypatch.setattr(ls, "generate", generate, raising=False)
    written = []
    monkeypatch.setattr("longspan.cli.generate._print", written.append)
    assert run("generate", "--model", saved("llama"), "--prompt", "é", "--max-new-tokens", 99)[0] == 0
    assert "".join(written) == text + "\n"
    assert all("\ufffd" not in piece for piece in written) and len(written) > 10
    assert asked["prompts"][0].tolist() == checkpoints.byte_level().encode("é").ids
    assert asked["key"] is None and asked["max_new_tokens"] == 99
    assert isinstance(asked["model"], models.CausalLM)


def test_generate_prints_json_and_passes_its_options_on(run, saved, monkeypatch):
    generate, asked = speaking(checkpoints.byte_level().encode("日").ids[:2])
    monkeypatch.setattr(ls, "generate", generate, raising=False)
    monkeypatch.setattr("sys.stdin", type("In", (), {"buffer": type("B", (), {"read": lambda self: b"hello\n"})()}))
    (saved("llama") / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    options = ("--temperature", 0.5, "--top-k", 5, "--top-p", 0.9, "--min-p", 0.1, "--repetition-penalty", 1.2)
    code, out, _ = run("generate", "--model", saved("llama"), "--prompt", "-", *options, "--seed", 3, "--json")
    said = json.loads(out)
    assert code == 0 and said["prompt"] == "hello" and said["prompt_tokens"] == 5 and said["tokens"] == 2
    assert said["text"] == "\ufffd", "it ended in the middle of a character"
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop_tokens")
    assert [asked[name] for name in names] == [0.5, 5, 0.9, 0.1, 1.2, [7, 9]]
    assert asked["key"] is not None


def test_tokens_become_text_as_a_whole_would():
    tokenizer = checkpoints.byte_level()
    for text in ("plain", "日本語", "👩‍🚀", "a\n b\n\n", "\ufffd kept", "ß" * 50):
        tokens = tokenizer.encode(text).ids
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in tokens] + [stream.rest()]
        assert "".join(pieces) == text


def test_a_decoder_that_drops_the_first_space_keeps_that_of_the_answer():
    words = Tokenizer(WordLevel({"▁once": 0, "▁upon": 1, "▁a": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    stream = TextStream(words, words.encode("once").ids)
    assert [stream.push(token) for token in (1, 2)] == [" upon", " a"]


def test_what_never_becomes_a_character_does_not_wait_forever():
    tokenizer = checkpoints.byte_level()
    broken = tokenizer.encode("日").ids[0]
    stream = TextStream(tokenizer)
    pieces = [stream.push(broken) for _ in range(100)]
    assert "".join(pieces) + stream.rest() == "\ufffd" * 100 and pieces[50:].count("") < 50


BAD = {
    "no such mask": (["show", "Nonsense()"], "'Nonsense' is not a mask"),
    "no expression": (["show"], "Missing argument 'EXPR'. See `longspan show --help`."),
    "no such command": (["shwo"], "No such command 'shwo'."),
    "no such option": (["show", "Causal()", "--wrong"], "No such option: --wrong"),
    "length": (["show", "Causal()", "-T", "-3"], "Invalid value for '-T' / '--queries'"),
    "not a number": (["show", "Causal()", "-T", "many"], "integer. See `longspan show --help`."),
    "fixed length": (["show", "Segments([[0, 0, 1]])", "-T", "5"], "Segments.q_ids"),
    "no such head": (["show", "PerHead((Causal(), Full()))", "-T", "4", "--head", "2"], "head=2 is out of range"),
    "too long": (["show", "Causal()", "-T", "99999999999999"], "Invalid value for '-T' / '--queries'"),
    "no folder": (["show", "Causal()", "-T", "4", "--html", "no/such/folder/a.html"], "is not a directory"),
    "no file": (["show", "Causal()", "-T", "4", "--png", "."], "is a directory"),
    "plot": (["bench", "--plot", "times.xyz"], "--plot: the file name must end in .png, .svg or .pdf, got times.xyz."),
    "plot folder": (["bench", "--plot", "no/times.png"], "no is not a directory"),
    "shape": (["explain", "Causal()", "--shape", "1,2,3"], "--shape must be four numbers"),
    "no shape": (["explain", "Causal()"], "Missing option '--shape'"),
    "dtype": (["explain", "Causal()", "--shape", "1,8,2,4", "--dtype", "int8"], "--dtype='int8' is not one of"),
    "engine": (["explain", "Causal()", "--shape", "1,8,2,4", "--engine", "warp"], "engine='warp' is not one of"),
    "heads": (["explain", "Causal()", "--shape", "1,8,4,4", "--kv-heads", "3"], "4 heads"),
    "diff": (["diff", "Causal()", "Cusal()"], "'Cusal' is not a mask"),
    "heads differ": (["diff", "PerHead((Causal(), Full()))", "PerHead((Causal(), Full(), Full()))"], ""),
    "lengths": (["bench", "-T", "0"], "--lengths must be numbers of tokens"),
    "bench engine": (["bench", "--engine", "warp"], "--engine='warp' is not one of"),
    "compare": (["bench", "--compare", "no.json"], "no.json: No such file or directory"),
    "save": (["bench", "--save", "no/such"], "--save: no/such is not a directory"),
    "no directory": (["check", "no/such"], "no/such"),
    "no model": (["encode", "a.txt", "--out", "b.npy"], "Missing option '--model'"),
    "no such model": (["encode", "a.txt", "--model", "no/such", "--out", "b.npy"], "no/such"),
    "temperature": (["generate", "--model", ".", "--prompt", "x", "--temperature", "-1"], "--temperature"),
    "no tokenizer": (["generate", "--model", ".", "--prompt", "x"], "has no tokenizer.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(run, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, words = BAD[name]
    assert_one_line(run(*arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_generate_refuses_an_encoder_and_an_empty_prompt(run, saved):
    assert_one_line(run("generate", "--model", saved("bert"), "--prompt", "w1"), "generates no text. Give a decoder")
    assert_one_line(run("generate", "--model", saved("llama"), "--prompt", ""), "--prompt is empty")


def test_a_mistake_of_ours_is_not_hidden(run, monkeypatch):
    def broken(*_, **__):
        raise AssertionError("ours")

    monkeypatch.setattr(ls.Mask, "show", broken)
    with pytest.raises(AssertionError, match="ours"):
        run("show", "Causal()")


def test_without_the_extra_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr("longspan.optional.is_installed", lambda name: name != "typer")
    code, out, err = run("show", "Causal()")
    assert (code, out) == (1, "")
    assert err == "longspan: The command `longspan` needs typer: pip install 'longspan[cli]'\n"


def commands():
    from typer.main import get_command

    from longspan.cli.app import app

    return get_command(app).commands


def test_help_shows_everything_that_it_was_given(run, monkeypatch):
    """Rich treats text in brackets as markup and drops it, unless it is escaped."""
    monkeypatch.setenv("COLUMNS", "1000")
    brackets = 0
    for name, command in commands().items():
        code, out, err = run(name, "--help")
        assert (code, err) == (0, "")
        shown = " ".join(out.replace("│", " ").split())
        for text in [command.help, *(parameter.help for parameter in command.params)]:
            plain = " ".join((text or "").replace("\\[", "[").split())
            assert plain in shown, f"{name} --help"
            brackets += "[" in plain
    assert brackets >= 1, "a text with brackets shows that this test can fail"
    assert "Usage: longspan bench [OPTIONS] [EXPR]" in run("bench", "--help")[1]


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"{ls.__version__}\n", "")


def test_explain_reports_on_a_chip(run):
    facts = json.loads(run("explain", "Causal()", "--shape", "1,1024,2,64", "--chip", "v6e", "--json")[1])
    assert facts["engine"] == "pallas_tpu" and facts["chip"]["chip"] == "v6e" and not facts["chip"]["is_proven"]
