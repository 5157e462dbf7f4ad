"""examples/semantic_search.py at toy size: a question finds its words in the middle of a long document."""

import importlib.util
from pathlib import Path

import numpy as np

from longspan import hf
from longspan.models import BertConfig, Embedder, Encoder
from tests.cli.checkpoints import SMALL, WORDS, words
from tests.made import made

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "semantic_search.py"


def test_a_question_finds_a_passage_in_a_long_document(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("semantic_search", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=90, initializer_range=1.0, **SMALL)
    embedder = Embedder(made(Encoder, config), words(), max_seq_length=12, prompts=dict(query="w9 ", document="w8 "))
    hf.save(embedder, tmp_path / "model")
    rng = np.random.default_rng(0)
    passage = "w1 w20 w3 w20 w5 w6"
    for number in range(3):
        noise = [" ".join(f"w{n}" for n in rng.integers(10, 19, 40)) for _ in range(2)]
        middle = passage if number == 1 else ""
        (tmp_path / f"{number}.txt").write_text(f"{noise[0]}\n{middle}\n{noise[1]}")
    (tmp_path / "empty.txt").write_text("")
    example.main([str(tmp_path / "model"), str(tmp_path), passage, "--count", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "  1.txt: " in lines[0] and "w20" in lines[0]
    passages = example.passages_of(embedder, (tmp_path / "1.txt").read_text())
    assert len(passages) == 17 and all(len(text.split()) <= 10 for text in passages)
    assert example.passages_of(embedder, "") == [] and example.passages_of(embedder, "w1") == ["w1"]
