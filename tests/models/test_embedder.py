"""`Embedder`: its calls, its errors, and the number of programs that it compiles."""

import itertools

import numpy as np
import pytest
from jax import monitoring
from jax import numpy as jnp
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models

from longspan import hf
from longspan.models import (
    BertConfig,
    CausalLM,
    DenseLayer,
    Embedder,
    Encoder,
    LlamaConfig,
    LongformerConfig,
    MaskedLM,
    Normalize,
    Pooling,
    RobertaConfig,
)
from longspan.models.packing import MAX_PROGRAMS, pack, row_lengths
from tests.cli.checkpoints import SMALL, WORDS, words
from tests.made import made

BERT = BertConfig(vocab_size=len(WORDS), max_position_embeddings=300, **SMALL | dict(num_hidden_layers=1))
TEXTS = ["w1 w2 w3", "w5", "w1 w2 w3", "", "w7 " * 60]


@pytest.fixture(scope="module")
def encoder():
    return made(Encoder, BERT)


@pytest.fixture(scope="module")
def embedder(encoder):
    modules = Pooling(6, ("mean", "lasttoken")), Normalize()
    return Embedder(encoder, words(), modules, prompts=dict(query="w3 w4 ", passage=""))


def alone(embedder, text):
    """The vector of a text in NumPy, from the model's output for the text alone."""
    ids = np.array([embedder.tokenizer.encode(text).ids])
    hidden = np.asarray(embedder.model(ids).last_hidden_state)[0]
    vector = np.concatenate([hidden.mean(axis=0), hidden[-1]])
    return vector / np.linalg.norm(vector)


def test_vectors_are_in_the_order_of_the_texts(embedder):
    vectors = embedder.embed(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [alone(embedder, text) for text in TEXTS], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    np.testing.assert_allclose(embedder.embed(TEXTS[1:2]), vectors[1:2], rtol=0, atol=1e-6)
    np.testing.assert_allclose(embedder.embed(TEXTS, batch_tokens=1), vectors, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(embedder.embed(np.array(TEXTS)), vectors)
    assert embedder.embed([]).shape == (0, 12)


def test_a_prompt_is_a_text_before_each_text(embedder):
    want = [alone(embedder, "w3 w4 " + text) for text in TEXTS]
    np.testing.assert_allclose(embedder.embed(TEXTS, prompt_name="query"), want, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(embedder.embed(TEXTS, prompt="w3 w4 "), embedder.embed(TEXTS, prompt_name="query"))
    np.testing.assert_array_equal(embedder.embed(TEXTS, prompt_name="passage"), embedder.embed(TEXTS))


def test_truncated_vectors_are_the_first_features(embedder):
    vectors = embedder.embed(TEXTS)
    np.testing.assert_array_equal(embedder.embed(TEXTS, truncate_dim=5), vectors[:, :5])
    shorter = Embedder(embedder.model, embedder.tokenizer, embedder.modules, truncate_dim=3)
    np.testing.assert_array_equal(shorter.embed(TEXTS), vectors[:, :3])
    np.testing.assert_array_equal(shorter.embed(TEXTS, truncate_dim=12), vectors)


def test_long_texts_are_truncated_and_keep_their_last_token(encoder):
    short = Embedder(encoder, words(), max_seq_length=5)
    ids = np.array([[2, 11, 11, 11, 3]])
    want = np.asarray(encoder(ids).last_hidden_state).mean(axis=1)
    np.testing.assert_allclose(short.embed([TEXTS[-1]]), want, rtol=0, atol=1e-6)
    assert Embedder(encoder, words(), max_seq_length=1000).max_seq_length == 300


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_tokens_are_summed_in_float32(dtype):
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=300, **SMALL | dict(num_hidden_layers=1))
    half = Embedder(made(Encoder, config, dtype=jnp.dtype(dtype)), words())
    ids = np.array([half.tokenizer.encode(TEXTS[-1]).ids])
    hidden = np.asarray(half.model(ids).last_hidden_state.astype(jnp.float32))
    got = half.embed(TEXTS[-1:])
    assert got.dtype == np.float32
    # A sum of 62 numbers in 16 bits would lose more than two digits.
    np.testing.assert_allclose(got, hidden.mean(axis=1), rtol=0, atol=4 * float(jnp.finfo(dtype).eps))


def test_any_mix_of_lengths_compiles_at_most_sixteen_programs(encoder):
    """Rows of every length that this model has, in calls of few and of many texts, with and without a prompt."""
    embedder = Embedder(encoder, words(), (Pooling(6, include_prompt=False), Normalize()), max_seq_length=200)
    embedder.embed(["w1"])  # whatever else JAX compiles once
    compiled = []
    listen = lambda event, duration_secs, **_: compiled.append(event)  # noqa: E731
    monitoring.register_event_duration_secs_listener(listen)
    rng, lengths = np.random.default_rng(0), set()
    try:
        for calls, texts, batch_tokens in ((30, 1, 16384), (20, 7, 16384), (8, 40, 700), (3, 60, 100)):
            for _ in range(calls):
                sizes = rng.integers(0, 199, texts) // rng.integers(1, 20, texts)
                given = ["w1 " * size for size in sizes]
                embedder.embed(given, prompt=str(rng.choice(["", "w2 ", "w3 w4 "])), batch_tokens=batch_tokens)
                tokens = [ids for ids, *_ in embedder.tokenize(given)]
                lengths |= {batch.length for batch in embedder.batches(tokens, batch_tokens=batch_tokens)}
    finally:
        monitoring.unregister_event_duration_listener(listen)
    programs = compiled.count("/jax/core/compile/backend_compile_duration")
    assert 5 < programs <= len(lengths) <= MAX_PROGRAMS


@pytest.mark.parametrize("longest", [1, 31, 32, 33, 90, 512, 8192, 10**5, 2**20, 2**24])
def test_row_lengths(longest):
    lengths = row_lengths(longest)
    assert lengths == sorted(set(lengths)) and len(lengths) <= MAX_PROGRAMS and lengths[-1] >= longest
    assert all(b <= 2 * a for a, b in itertools.pairwise(lengths))


@pytest.mark.parametrize("single", [False, True])
def test_rows_contain_each_text_once_and_little_padding(single):
    rng = np.random.default_rng(1)
    texts = [rng.integers(1, 100, size) for size in [*rng.integers(1, 90, 500), 1000, 3]]
    batches = list(pack(texts, row_lengths(1024), 512, skip=1, single=single))
    assert sorted(index for batch in batches for index in batch.texts) == list(range(len(texts)))
    for batch in batches:
        packed = batch.packed
        assert packed.ids.shape == packed.text.shape == packed.place.shape == (1, batch.length)
        assert packed.skip == 1 and (len(batch.texts) == 1 or not single)
        for number, index in enumerate(batch.texts):
            start, stop = packed.starts[number], packed.starts[number] + packed.lengths[number]
            np.testing.assert_array_equal(packed.ids[0, start:stop], texts[index])
            np.testing.assert_array_equal(packed.text[0, start:stop], number)
            np.testing.assert_array_equal(packed.place[0, start:stop], np.arange(len(texts[index])))
        assert (packed.text >= 0).sum() == packed.lengths.sum()
    if not single:
        tokens = sum(map(len, texts))
        assert sum(batch.length for batch in batches) < 1.05 * tokens


def test_similarities():
    a, b = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[6.0, 8.0], [4.0, -3.0], [3.0, 5.0]])
    expected = dict(
        cosine=[[1, 0, 29 / 5 / 34**0.5], [0, 0, 0]],
        dot=[[50, 0, 29], [0, 0, 0]],
        euclidean=[[-5, -(50**0.5), -1], [-10, -5, -(34**0.5)]],
        manhattan=[[-7, -8, -1], [-14, -7, -8]],
    )
    encoder = made(Encoder, BERT)
    for name, want in expected.items():
        embedder = Embedder(encoder, words(), similarity_fn_name=name)
        got = embedder.similarity(a, jnp.asarray(b))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(embedder.similarity(a[0], b), want[:1], rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("unchecked")
def test_vectors_that_cannot_be_compared(embedder):
    a = np.ones((1, 2))
    with pytest.raises(ValueError, match=r"`a` has vectors of size 2 and `b` of size 3\. The sizes must be equal"):
        embedder.similarity(a, np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"`b` must have shape \[n, size\] or \[size\], got \(1, 2, 2\)"):
        embedder.similarity(a, np.ones((1, 2, 2)))


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_of_a_call(embedder, encoder):
    for arguments, kind, words_ in (
        (dict(texts="w1"), TypeError, r"`texts` must be a list of strings, got a str\. Give `\[text\]` for one text"),
        (dict(texts=["w1", 3]), TypeError, r"`texts` must be a list of strings, but texts\[1\] is a int"),
        (dict(prompt="a", prompt_name="query"), ValueError, "`prompt='a'` and `prompt_name='query'` were both given"),
        (
            dict(texts=["w1", "w\ud800"]),
            ValueError,
            r"texts\[1\] is not valid Unicode, at character 1: '\\ud800'\. Decode",
        ),
        (dict(prompt="\udcff"), ValueError, r"`prompt` is not valid Unicode, at character 0"),
        (dict(prompt=3), TypeError, "`prompt` must be a text, got a int"),
        (
            dict(prompt_name="title"),
            ValueError,
            r"`prompt_name='title'` .* It has 'passage', 'query'\. Give",
        ),
        (dict(truncate_dim=0), ValueError, "`truncate_dim` must be a number of features from 1 to 12, .* got 0"),
        (dict(truncate_dim=13), ValueError, "`truncate_dim` must be a number of features from 1 to 12, .* got 13"),
        (dict(batch_tokens=0), ValueError, "`batch_tokens` must be a number of tokens, at least 1, got 0"),
    ):
        with pytest.raises(kind, match=words_):
            embedder.embed(**dict(texts=["w1"]) | arguments)
    bare = Tokenizer(tokenizer_models.WordLevel(dict(w1=0, w2=99), unk_token="w1"))
    with pytest.raises(ValueError, match=r"texts\[1\] has no tokens: the tokenizer drops all of its text\. Leave this"):
        Embedder(encoder, bare).embed(["w1", ""])
    with pytest.raises(ValueError, match=r"The tokenizer gives token 99, but the model has only 31 tokens\. Give the"):
        Embedder(encoder, bare).embed(["w2"])
    unpooled = Embedder(encoder, bare, (Pooling(6, include_prompt=False),))
    with pytest.raises(ValueError, match=r"texts\[0\] has no tokens besides the prompt's, which are not pooled"):
        unpooled.embed([""], prompt="w1")


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_of_an_embedder(encoder):
    kernel = np.zeros((5, 3), np.float32)
    for arguments, kind, words_ in (
        (dict(model=made(MaskedLM, BERT)), TypeError, "must be a models.Encoder or a models.CausalLM, got a MaskedLM"),
        (dict(modules=[Normalize()]), ValueError, r"`modules` must begin with a models\.Pooling, got \['Normalize'\]"),
        (dict(modules=[Pooling(6), Pooling(6)]), ValueError, "`modules` may have only DenseLayer and Normalize, got"),
        (dict(modules=[Pooling(5)]), ValueError, "'mean pooling' takes vectors of size 5, but its input has size 6"),
        (
            dict(modules=[Pooling(6), DenseLayer(kernel)]),
            ValueError,
            "takes vectors of size 5, but its input has size 6",
        ),
        (dict(max_seq_length=0), ValueError, "`max_seq_length` must be a number of tokens, at least 1, got 0"),
        (dict(max_seq_length=2), ValueError, "tokenizer adds 2 special tokens to each, which leaves none for text"),
        (dict(similarity_fn_name="l2"), ValueError, "similarity_fn_name='l2' is not one of 'cosine', 'dot'"),
        (dict(truncation_side="up"), ValueError, "truncation_side='up' is not one of 'left', 'right'"),
        (dict(default_prompt_name="q"), ValueError, "default_prompt_name='q' is not one of"),
        (dict(truncate_dim=7), ValueError, "`truncate_dim` must be a number of features from 1 to 6"),
    ):
        with pytest.raises(kind, match=words_):
            Embedder(**dict(model=encoder, tokenizer=words()) | arguments)
    with pytest.raises(ValueError, match="modes='median' is not one of 'cls', 'max', 'mean'"):
        Pooling(6, ("median",))
    with pytest.raises(ValueError, match="`modes` must be a tuple of at least one of"):
        Pooling(6, ())
    with pytest.raises(ValueError, match="`size` must be an int from 1"):
        Pooling(0)
    with pytest.raises(ValueError, match="activation='mish' is not one of 'identity', 'gelu'"):
        DenseLayer(kernel, activation="mish")


def test_a_decoder_whose_frequencies_depend_on_the_length_is_refused():
    rope = dict(rope_type="dynamic", rope_theta=100.0, factor=3.0)
    options = dict(vocab_size=31, max_position_embeddings=90, **SMALL | dict(hidden_size=8))
    with pytest.raises(NotImplementedError, match="so the vector of a text would depend on its padding"):
        Embedder(made(CausalLM, LlamaConfig(rope_parameters=rope, **options)), words())
    model = made(CausalLM, LlamaConfig(**options))
    got = Embedder(model, words(), [Pooling(8, ("lasttoken",))]).embed(["w1 w2", "w5 w6 w7"])
    want = [np.asarray(model(np.array([ids])).last_hidden_state)[0, -1] for ids in ([2, 5, 6, 3], [2, 9, 10, 11, 3])]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.check
def test_a_longformer_has_one_text_per_row_and_may_have_global_tokens():
    config = LongformerConfig(vocab_size=31, max_position_embeddings=92, window=3, **SMALL)
    embedder = Embedder(made(Encoder, config), words())
    texts = ["w1 w2", "w5 " * 40]
    rows = [np.array([embedder.tokenizer.encode(text).ids]) for text in texts]
    tokens = [ids for ids, *_ in embedder.tokenize(texts)]
    assert [batch.texts for batch in embedder.batches(tokens)] == [[1], [0]]
    for count in (0, 2):
        embedder.global_tokens = count
        flags = [(np.arange(ids.shape[1]) < count)[None].astype(int) for ids in rows]
        want = [
            np.asarray(embedder.model(ids, global_attention_mask=f).last_hidden_state)[0].mean(axis=0)
            for ids, f in zip(rows, flags, strict=True)
        ]
        np.testing.assert_allclose(embedder.embed(texts), want, rtol=0, atol=1e-5)


def test_texts_may_spell_the_padding_token():
    """RoBERTa counts the tokens of a row that are not padding, as Hugging Face does."""
    config = RobertaConfig(vocab_size=31, max_position_embeddings=302, pad_token_id=5, **SMALL)
    embedder = Embedder(made(Encoder, config), words())
    texts = ["w2 w3 w4", "w0 w1 w2 w1 w3", "w1 w1", "w9 w8 w7 w1"]
    rows = [np.array([embedder.tokenizer.encode(text).ids]) for text in texts]
    assert (rows[1] == config.pad_token_id).sum() == 2
    want = [np.asarray(embedder.model(ids).last_hidden_state)[0].mean(axis=0) for ids in rows]
    np.testing.assert_allclose(embedder.embed(texts), want, rtol=0, atol=1e-5)


def test_training_changes_the_vectors(encoder):
    """The programs take the parameters as arguments."""
    embedder = Embedder(made(Encoder, BERT, seed=1), words())
    before = embedder.embed(["w1 w2"])
    embedding = embedder.model.embeddings.word.embedding
    embedding[...] = embedding[...] * 2
    changed = embedder.embed(["w1 w2"])
    assert np.abs(changed - before).max() > 1e-3
    embedder.model = made(Encoder, BERT, seed=1)
    np.testing.assert_array_equal(embedder.embed(["w1 w2"]), before)


def test_a_saved_embedder_replaces_what_was_there(embedder, tmp_path):
    hf.save(embedder, tmp_path)
    other = Embedder(embedder.model, embedder.tokenizer, max_seq_length=7, do_lower_case=True, truncation_side="left")
    hf.save(other, tmp_path)
    loaded = hf.load_embedder(tmp_path)
    assert repr(loaded) == repr(other) == "Embedder(bert, mean pooling, size=6, max_seq_length=7)"
    np.testing.assert_array_equal(loaded.embed(["W1 w2 " * 9]), other.embed(["W1 w2 " * 9]))
    np.testing.assert_array_equal(other.embed(["W1 w2"]), other.embed(["w1 w2"]))
    with pytest.raises(FileNotFoundError, match="must be a directory with a tokenizer"):
        hf.save(other, tmp_path / "new", tokenizer=tmp_path / "1_Pooling")
    hf.save(other, tmp_path / "new", tokenizer=tmp_path)
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_a_directory_may_be_saved_onto_itself(embedder, tmp_path):
    hf.save(embedder, tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    hf.save(hf.load_embedder(tmp_path), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.usefixtures("unchecked")
def test_hf_load_returns_the_model_alone(embedder, tmp_path):
    hf.save(embedder, tmp_path)
    assert type(hf.load(tmp_path)) is Encoder
