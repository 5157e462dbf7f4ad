"""`longspan generate` with several prompts, and with input that is not text."""

import json
import re

import jax
import pytest

from tests.cli.asserts import assert_one_line

pytestmark = pytest.mark.usefixtures("unchecked")


def reads(monkeypatch, content):
    monkeypatch.setattr("sys.stdin", type("In", (), {"buffer": type("B", (), {"read": lambda self: content})()}))


@pytest.fixture
def generate(run, saved):
    return lambda *arguments: run("generate", "--model", saved("llama"), *arguments)


def test_every_prompt_gets_its_answer(generate):
    """Each prompt gets the answer that it gets alone; text output has titles, JSON output is a list."""
    long = "a long prompt\nof two lines, whose title is cut after some sixty letters"
    options = ("--max-new-tokens", 5, "--temperature", 0)
    code, out, _ = generate("--prompt", "ab", "--prompt", long, *options, "--json")
    together = json.loads(out)
    assert code == 0 and [one["prompt"] for one in together] == ["ab", long]
    alone = json.loads(generate("--prompt", long, *options, "--json")[1])
    assert alone == together[1] and alone["tokens"] == 5
    jax.clear_caches()
    code, out, err = generate("--prompt", "ab", "--prompt", long, *options)
    title = "a long prompt of two lines, whose title is cut after some..."
    answers = [one["text"] for one in together]
    assert code == 0 and out == f"== 1 of 2: ab\n{answers[0]}\n\n== 2 of 2: {title}\n{answers[1]}\n"
    assert re.fullmatch(r"compiling the decoder \.\.\.\ncompiled the decoder in \d+\.\d s\n", err)


def test_one_answer_of_one_token_is_printed_too(generate):
    code, out, _ = generate("--prompt", "ab", "--max-new-tokens", 1)
    assert code == 0 and len(out) >= 2 and out.endswith("\n")


def test_standard_input_is_one_of_the_prompts_at_most(generate, monkeypatch):
    assert_one_line(
        generate("--prompt", "-", "--prompt", "-"), "--prompt - is given more than once, but standard input"
    )
    reads(monkeypatch, b"from a pipe\n")
    found = json.loads(generate("--prompt", "ab", "--prompt", "-", "--max-new-tokens", 1, "--json")[1])
    assert [one["prompt"] for one in found] == ["ab", "from a pipe"]


def test_what_is_no_text_is_refused(generate, monkeypatch):
    reads(monkeypatch, b"ab\xff")
    assert_one_line(generate("--prompt", "-"), "--prompt -: standard input is not UTF-8 text, at byte 2.")
    assert_one_line(generate("--prompt", "a\udcff"), "--prompt is not UTF-8 text, at character 1.")
    assert_one_line(generate("--prompt", "ab", "--prompt", ""), "--prompt is empty. Give a text to continue.")
    assert_one_line(generate("--prompt", "a" * 100_000), "Prompt 0 has 100000 tokens")
