"""The pages for those who come from other libraries: what they show of these runs, and gives what we give."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan import hf, models

pytestmark = [
    pytest.mark.parity,
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

DOCS = Path(__file__).parent.parent / "docs"
IDS = np.array([[0] * 40 + [1] * 24, [0] * 64])
LENGTHS = np.array([64, 40])
WINDOW = ls.Causal() & ls.Window(15, 0) & ls.Segments(IDS)
SMALL = dict(vocab_size=60, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)


def before(page, number=0):
    """One of the blocks of a page that are code of another library."""
    text = (DOCS / f"coming-from-{page}.md").read_text("utf-8")
    return [block for block in re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S) if "import" in block][number]


def run(page, number=0, **names):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as users have it
        exec(compile(before(page, number), f"coming-from-{page}.md", "exec"), names)
    return names


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def assert_same(theirs, ours):
    assert theirs.shape == ours.shape
    np.testing.assert_allclose(np.asarray(theirs), np.asarray(ours), rtol=0, atol=64 * np.finfo(np.float32).eps)


def test_flex_attention():
    torch = pytest.importorskip("torch")
    q, k, v = arrays((2, 4, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16))
    theirs = run("flexattention", **{name: torch.from_numpy(x) for name, x in zip("qkv", (q, k, v), strict=True)})
    ours = ls.attention(*(jnp.asarray(x.swapaxes(1, 2)) for x in (q, k, v)), mask=WINDOW)
    assert_same(theirs["out"].numpy().swapaxes(1, 2), ours)


def test_splash(monkeypatch):
    kernel = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
    made = functools.partial(kernel.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(kernel, "make_splash_mha_single_device", made)
    q, k, v = map(jnp.asarray, arrays(*[(2, 4, 256, 16)] * 3))
    documents = jnp.array([[0] * 100 + [1] * 156, [0] * 200 + [1] * 56])
    theirs = run("splash", q=q, k=k, v=v, documents=documents)
    mask = ls.Causal() & ls.Window(63, 0) & ls.Segments(documents)
    assert_same(theirs["out"].swapaxes(1, 2), ls.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), mask=mask))


def test_tokamax(monkeypatch):
    pytest.importorskip("tokamax")
    monkeypatch.setattr("sys.argv", ["a program"])  # its flags read the command line
    q, k, v = map(jnp.asarray, arrays((2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 8)))
    theirs = run("tokamax", q=q, k=k, v=v, lengths=jnp.asarray(LENGTHS))
    mask = ls.Causal() & ls.Window(63, 0) & ls.KvLengths(LENGTHS)
    ours = ls.attention(q, k, v, mask=mask, soft_cap=30.0)
    assert_same(theirs["out"], ours)


def test_ejkernel():
    pytest.importorskip("ejkernel")
    ids = np.array([[0, 0, 0, 0, 0, 1, 1, -1]])
    q, k, v = map(jnp.asarray, arrays(*[(1, 8, 2, 16)] * 3))
    theirs = run("ejkernel", q=q, k=k, v=v, ids=ids)
    assert_same(theirs["out"], ls.attention(q, k, v, mask=ls.Segments(ids) & ls.Causal() & ls.Window(3, 0)))


@pytest.fixture
def tokenizer(tmp_path):
    """A directory with a tokenizer of 60 words."""
    pytest.importorskip("torch")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{n}" for n in range(4, 60))]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: n for n, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", eos_token="</s>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
    return tmp_path


def test_an_encoder_of_hugging_face(tokenizer):
    nnx = pytest.importorskip("flax.nnx")
    config = models.LongformerConfig(**SMALL, window=8, max_position_embeddings=66)
    hf.save(models.SequenceClassifier(config, rngs=nnx.Rngs(0)), tokenizer)
    theirs = run("hugging-face", directory=tokenizer, texts=["w5 w6 w7", "w8"])
    ids = np.array([[5, 6, 7], [8, 1, 1]])
    assert_same(theirs["logits"].numpy(), hf.load(tokenizer)(ids, attention_mask=ids != 1).logits)


def test_a_decoder_of_hugging_face(tokenizer):
    nnx = pytest.importorskip("flax.nnx")
    hf.save(models.CausalLM(models.MistralConfig(**SMALL, sliding_window=8), rngs=nnx.Rngs(0)), tokenizer)
    theirs = run("hugging-face", 1, directory=tokenizer, prompts=["w5 w17 w4", "w8"])
    assert theirs["inputs"]["input_ids"].tolist() == [[5, 17, 4], [1, 1, 8]]
    assert theirs["out"].shape[0] == 2 and 3 < theirs["out"].shape[1] <= 23


def test_attention_of_pytorch():
    torch = pytest.importorskip("torch")
    q, k, v = arrays(*[(2, 4, 64, 16)] * 3)
    theirs = run("hugging-face", 2, **{name: torch.from_numpy(x) for name, x in zip("qkv", (q, k, v), strict=True)})
    ours = ls.attention(*(jnp.asarray(x.swapaxes(1, 2)) for x in (q, k, v)), mask=ls.Causal())
    assert_same(theirs["out"].numpy().swapaxes(1, 2), ours)
