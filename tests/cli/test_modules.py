"""`longspan encode` and the module files of sentence-transformers: unsupported settings are refused or reported."""

import json
import shutil

import numpy as np
import pytest

from longspan.cli.modules import modules_of
from tests.cli.asserts import assert_one_line

pytestmark = pytest.mark.usefixtures("unchecked")

OLD = "sentence_transformers.models.{}"
NEW = "sentence_transformers.sentence_transformer.modules.{}.{}"
MEAN = dict(
    word_embedding_dimension=6,
    pooling_mode_cls_token=False,
    pooling_mode_mean_tokens=True,
    pooling_mode_max_tokens=False,
    pooling_mode_mean_sqrt_len_tokens=False,
)
CLS = MEAN | dict(pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
FOLDERS = {"Transformer": ""}


def kind_of(name, spelling):
    return OLD.format(name) if spelling == "old" else NEW.format(name.lower(), name)


def listed(*kinds, spelling="old"):
    """modules.json of these modules, each in its folder."""
    return [
        dict(idx=n, name=str(n), path=FOLDERS.get(kind, f"{n}_{kind}"), type=kind_of(kind, spelling))
        for n, kind in enumerate(kinds)
    ]


def write(directory, **files):
    """JSON files, by name: `modules` is modules.json, `pooling` 1_Pooling/config.json."""
    names = dict(modules="modules.json", pooling="1_Pooling/config.json", bert="sentence_bert_config.json")
    names |= dict(settings="config_sentence_transformers.json", tokenizer="tokenizer_config.json")
    for name, content in files.items():
        path = directory / names.get(name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return directory


def not_run(directory, pooling="mean", max_tokens=90):
    return modules_of(directory).not_run(pooling, max_tokens)


PLAIN = dict(modules=listed("Transformer", "Pooling"), pooling=MEAN)
FINE = {
    "no module files": {},
    "mean": PLAIN,
    "mean, newer spellings": dict(
        modules=listed("Transformer", "Pooling", spelling="new"),
        pooling=dict(embedding_dimension=6, pooling_mode="mean", include_prompt=True),
    ),
    "mean in a list": PLAIN | dict(pooling=dict(pooling_mode=["mean"])),
    "no mode is mean": PLAIN | dict(pooling={key: False for key in MEAN if "mode" in key}),
    "only the size": PLAIN | dict(pooling=dict(word_embedding_dimension=6)),
    "out of order": PLAIN | dict(modules=listed("Transformer", "Pooling")[::-1]),
    "the model's length": PLAIN | dict(bert=dict(max_seq_length=90, do_lower_case=False)),
    "no length": PLAIN | dict(bert=dict(max_seq_length=None)),
    "a tokenizer without a length": PLAIN | dict(tokenizer=dict(model_max_length=int(1e30))),
    "such a float": PLAIN | dict(tokenizer='{"model_max_length": 1e30}'),
    "the tokenizer's length, if nothing is listed": dict(tokenizer=dict(model_max_length=40)),
    "prompts that are not used": PLAIN
    | dict(settings=dict(prompts=dict(query="q: "), default_prompt_name=None, similarity_fn_name="cosine")),
    "an empty prompt": PLAIN | dict(settings=dict(prompts=dict(query=""), default_prompt_name="query")),
}


@pytest.mark.parametrize("name", FINE)
def test_a_transformer_with_mean_pooling_is_what_encode_runs(name, tmp_path):
    assert not_run(write(tmp_path, **FINE[name])) == []


def test_without_module_files_any_pooling_is_as_good(tmp_path):
    assert not_run(tmp_path, "cls") == []


TRANSFORMER, POOLING = listed("Transformer", "Pooling")
OTHERS = {
    "cls": (PLAIN | dict(pooling=CLS), "1_Pooling/config.json sets cls pooling, not mean"),
    "cls, newer": (PLAIN | dict(pooling=dict(pooling_mode="cls")), "1_Pooling/config.json sets cls pooling"),
    "two": (PLAIN | dict(pooling=MEAN | dict(pooling_mode_cls_token=True)), "sets cls and mean pooling"),
    "two, newer": (PLAIN | dict(pooling=dict(pooling_mode=["max", "mean"])), "sets max and mean pooling"),
    "last": (
        PLAIN | dict(pooling=CLS | dict(pooling_mode_cls_token=False, pooling_mode_lasttoken=True)),
        "sets lasttoken pooling",
    ),
    "normalize": (PLAIN | dict(modules=listed("Transformer", "Pooling", "Normalize")), "lists Normalize (2_Normalize)"),
    "normalize, newer": (
        PLAIN | dict(modules=listed("Transformer", "Pooling", "Normalize", spelling="new")),
        "modules.json lists Normalize (2_Normalize)",
    ),
    "dense": (PLAIN | dict(modules=listed("Transformer", "Pooling", "Dense")), "modules.json lists Dense (2_Dense)"),
    "no pooling": (dict(modules=listed("Transformer")), "modules.json lists no Pooling after the Transformer"),
    "no transformer": (dict(modules=listed("StaticEmbedding")), "modules.json does not begin with a Transformer"),
    "nothing": (dict(modules=[]), "modules.json does not begin with a Transformer"),
    "somebody's": (
        PLAIN
        | dict(modules=[dict(idx=0, path="", type="custom_st.Transformer"), *listed("Transformer", "Pooling")[1:]]),
        "modules.json lists custom_st.Transformer",
    ),
    "another folder": (
        PLAIN
        | dict(modules=[dict(listed("Transformer")[0], path="0_Transformer"), *listed("Transformer", "Pooling")[1:]]),
        "modules.json has its Transformer in 0_Transformer",
    ),
    "short": (
        PLAIN | dict(bert=dict(max_seq_length=40)),
        "sentence_bert_config.json truncates texts to 40 tokens, but",
    ),
    "short, without a list": (
        dict(bert=dict(max_seq_length=40)),
        "sentence_bert_config.json truncates texts to 40 tokens",
    ),
    "short, older": (
        PLAIN | {"sentence_roberta_config.json": dict(max_seq_length=40)},
        "sentence_roberta_config.json truncates texts to 40 tokens",
    ),
    "the tokenizer's": (
        PLAIN | dict(tokenizer=dict(model_max_length=40)),
        "tokenizer_config.json truncates texts to 40",
    ),
    "lower": (PLAIN | dict(bert=dict(do_lower_case=True)), "sentence_bert_config.json converts texts to lower case"),
    "prompt": (
        PLAIN | dict(settings=dict(prompts=dict(query="query: "), default_prompt_name="query")),
        "config_sentence_transformers.json adds the prompt 'query: ' before every text",
    ),
    "cut": (PLAIN | dict(settings=dict(truncate_dim=3)), "truncates vectors to 3 numbers"),
    "sparse": (PLAIN | dict(settings=dict(model_type="SparseEncoder")), "sets the model type SparseEncoder"),
    "lost list": (dict(pooling=CLS), "1_Pooling/config.json sets cls pooling, not mean"),
    "lost list, dense": ({"2_Dense/config.json": {}}, "2_Dense is a module's folder, but modules.json is missing"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_named_with_its_file(name, tmp_path):
    files, words = OTHERS[name]
    found = not_run(write(tmp_path, **files))
    assert found and any(words in line for line in found), found


BROKEN = {
    "modules": (dict(modules="[{"), "modules.json is not JSON. Download or save it again."),
    "deep": (dict(modules="[" * 100_000), "modules.json is not JSON"),
    "bytes": (dict(modules="\udcff"), "modules.json is not JSON"),
    "no list": (dict(modules={}), "modules.json must contain a list, got {}."),
    "no module": (dict(modules=[3]), "modules.json must list objects with the strings 'path' and 'type', got 3."),
    "no type": (dict(modules=[dict(path="")]), "modules.json must list objects with the strings 'path' and 'type'"),
    "pooling": (PLAIN | dict(pooling="{"), "1_Pooling/config.json is not JSON"),
    "pooling list": (PLAIN | dict(pooling=[]), "1_Pooling/config.json must contain an object, got []."),
    "no pooling": (dict(modules=PLAIN["modules"]), "1_Pooling/config.json is missing, but modules.json refers to it."),
    "mode": (PLAIN | dict(pooling=dict(pooling_mode=7)), "'pooling_mode' must be a name or a list of names, got 7."),
    "flag": (
        PLAIN | dict(pooling=dict(pooling_mode_max_tokens="no")),
        "'pooling_mode_max_tokens' must be true or false",
    ),
    "length": (
        PLAIN | dict(bert=dict(max_seq_length="long")),
        "'max_seq_length' must be a number of tokens, at least 1",
    ),
    "negative": (
        PLAIN | dict(bert=dict(max_seq_length=-1)),
        "sentence_bert_config.json: 'max_seq_length' must be a number",
    ),
    "bert": (PLAIN | dict(bert="nonsense"), "sentence_bert_config.json is not JSON"),
    "settings": (PLAIN | dict(settings="nonsense"), "config_sentence_transformers.json is not JSON"),
    "unknown prompt": (
        PLAIN | dict(settings=dict(prompts={}, default_prompt_name="query")),
        "config_sentence_transformers.json: 'default_prompt_name' must be one of its 'prompts', got query.",
    ),
    "tokenizer": (PLAIN | dict(tokenizer="{"), "tokenizer_config.json is not JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(name, tmp_path):
    files, words = BROKEN[name]
    if name == "bytes":
        (tmp_path / "modules.json").write_bytes(b"\xff\xfe[")
    else:
        write(tmp_path, **files)
    with pytest.raises(ValueError) as caught:
        modules_of(tmp_path)
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "folder", ["../other", "/etc", "1_Pooling/../../other", "C:\\other", "..\\other", "link", "a\0b"]
)
def test_a_folder_outside_of_the_directory_is_not_opened(folder, tmp_path):
    """The outside folder has a valid config. The error shows that it was not read."""
    inside = tmp_path / "model"
    write(tmp_path / "other", **{"config.json": MEAN})
    modules = listed("Transformer", "Pooling")
    modules[1]["path"] = folder
    write(inside, modules=modules)
    (inside / "link").symlink_to(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"modules.json names the folder .* outside of the directory. Such a folder is not opened"
    ):
        modules_of(inside)


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    write(blobs, **{"a": listed("Transformer", "Pooling"), "b": CLS})
    (snapshot / "1_Pooling").mkdir(parents=True)
    (snapshot / "modules.json").symlink_to(blobs / "a")
    (snapshot / "1_Pooling" / "config.json").symlink_to(blobs / "b")
    assert not_run(snapshot) == ["1_Pooling/config.json sets cls pooling, not mean"]
    assert not_run(snapshot, "cls") == [], "what is asked for is what the file says"


@pytest.fixture
def encode(run, saved, tmp_path):
    """Encodes with a directory that has these files; the result, and the vectors if there are any."""
    directory, document, out = tmp_path / "model", tmp_path / "a.txt", tmp_path / "vectors.npy"
    shutil.copytree(saved("bert"), directory)
    document.write_text("w1 w2 w3")

    def command(*options, **files):
        write(directory, **files)
        out.unlink(missing_ok=True)
        result = run("encode", "--model", directory, document, "--out", out, "--json", *options)
        return result, np.load(out) if out.exists() else None

    return command


ALL_OF_IT = dict(
    modules=listed("Transformer", "Pooling", "Dense", "Normalize"),
    pooling=CLS,
    bert=dict(max_seq_length=40, do_lower_case=True),
    settings=dict(prompts=dict(p="query: "), default_prompt_name="p"),
)


def test_encode_refuses_other_modules_unless_pooling_is_named(encode):
    (code, _, err), plain = encode()
    assert (code, err) == (0, "")
    result, vectors = encode(**ALL_OF_IT)
    assert_one_line(
        result, "is a sentence-transformers directory with settings that `longspan encode` does not support"
    )
    assert vectors is None
    files = [
        "modules.json lists Dense",
        "Normalize",
        "1_Pooling/config.json sets cls",
        "config.json converts texts to lower",
    ]
    for file in [*files, "config_sentence_transformers.json adds", "give --pooling mean or --pooling cls."]:
        assert file in result[2]
    (code, _, err), vectors = encode("--pooling", "mean")
    assert code == 0 and err.count("\n") == 1
    assert err.startswith("longspan: warning: with --pooling mean, settings of ")
    cut = "sentence_bert_config.json truncates texts to 40 tokens, but the encoder takes 90"
    pooling = "1_Pooling/config.json sets cls pooling, not mean"
    for what in ("Dense (2_Dense)", "Normalize (3_Normalize)", pooling, cut, "'query: '"):
        assert what in err
    np.testing.assert_array_equal(vectors, plain)
    err = encode("--pooling", "cls")[0][2]
    assert "Normalize" in err and "1_Pooling" not in err, "cls is what the file says"


def test_encode_refuses_a_shorter_max_seq_length_only_after_it_knows_the_model(encode):
    result, vectors = encode(**PLAIN, bert=dict(max_seq_length=89))
    assert_one_line(result, "sentence_bert_config.json truncates texts to 89 tokens, but the encoder takes 90")
    assert vectors is None
    (code, _, err), vectors = encode(**PLAIN, bert=dict(max_seq_length=90))
    assert (code, err) == (0, "") and vectors is not None


def test_encode_names_a_broken_module_file_whatever_pooling_is_asked_for(encode):
    for options in ((), ("--pooling", "mean")):
        result, vectors = encode(*options, modules="[")
        assert_one_line(result, "modules.json is not JSON. Download or save it again.")
        assert vectors is None
