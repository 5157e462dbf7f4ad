"""The files of sentence-transformers directories: every setting is run, or refused by name."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, normalizers
from tokenizers import models as tokenizer_models

from longspan import hf
from longspan.cli.texts import tokenizer_of
from longspan.hf.sentence_modules import listed_modules, sentence_settings, transformer_settings
from tests.cli import checkpoints

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
DENSE = dict(in_features=6, out_features=4, bias=True, activation_function="torch.nn.modules.activation.Tanh")
FOLDERS = {"Transformer": ""}


def listed(*kinds, spelling="old"):
    """modules.json of these modules, each in its folder."""
    return [
        dict(idx=n, name=str(n), path=FOLDERS.get(kind, f"{n}_{kind}"), type=kind_of(kind, spelling))
        for n, kind in enumerate(kinds)
    ]


def kind_of(name, spelling):
    return OLD.format(name) if spelling == "old" else NEW.format(name.lower(), name)


def write(directory, **files):
    """JSON files, by name: `modules` is modules.json, `pooling` 1_Pooling/config.json."""
    names = dict(modules="modules.json", pooling="1_Pooling/config.json", dense="2_Dense/config.json")
    names |= dict(settings="config_sentence_transformers.json", tokenizer="tokenizer_config.json")
    names |= dict(bert="sentence_bert_config.json", normalize="2_Normalize/config.json")
    for name, content in files.items():
        path = directory / names.get(name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoints.bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def load(model, tmp_path):
    """A function that loads an embedder from a BERT's directory with these files."""

    def embedder(**files):
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            shutil.copy(model / name, tmp_path / name)
        write(tmp_path, **files)
        if "dense" in files:
            tensors = {"linear.weight": np.ones((4, 6), np.float32), "linear.bias": np.ones(4, np.float32)}
            save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
        return hf.load_embedder(tmp_path)

    return embedder


PLAIN = dict(modules=listed("Transformer", "Pooling"), pooling=MEAN)
WITH_DENSE = PLAIN | dict(modules=listed("Transformer", "Pooling", "Dense"), dense=DENSE)
NORMALIZED = PLAIN | dict(modules=listed("Transformer", "Pooling", "Normalize"))
NEUTRAL = dict(transformer_task="feature-extraction", module_output_name="token_embeddings", unpad_inputs=None)
RUN = {
    "no module files": ({}, "mean pooling, size=6, max_seq_length=90"),
    "mean": (PLAIN, "mean pooling, size=6, max_seq_length=90"),
    "newer spellings": (
        dict(
            modules=listed("Transformer", "Pooling", "Normalize", spelling="new"),
            pooling=dict(embedding_dimension=6, pooling_mode="max", include_prompt=False),
            normalize=dict(module_input_name="sentence_embedding", module_output_name="sentence_embedding"),
        ),
        "max pooling without the prompt, Normalize, size=6",
    ),
    "a list": (PLAIN | dict(pooling=dict(embedding_dimension=6, pooling_mode=["max", "cls"])),
               "max and cls pooling, size=12"),
    "no mode is mean": (PLAIN | dict(pooling=MEAN | dict(pooling_mode_mean_tokens=False)), "mean pooling, size=6"),
    "only the size": (PLAIN | dict(pooling=dict(word_embedding_dimension=6)), "mean pooling, size=6"),
    "two modes": (PLAIN | dict(pooling=CLS | dict(pooling_mode_mean_tokens=True)), "cls and mean pooling, size=12"),
    "folders with a dot": (PLAIN | dict(modules=[PLAIN["modules"][0] | dict(path="."),
                                                 PLAIN["modules"][1] | dict(path="./1_Pooling/")]),
                           "mean pooling, size=6"),
    "a folder that begins with a dot": (dict(modules=[PLAIN["modules"][0], PLAIN["modules"][1] | dict(path=".hidden")],
                                             pooling=CLS) | {".hidden/config.json": MEAN}, "mean pooling, size=6"),
    "dense": (WITH_DENSE, "mean pooling, Dense 6 to 4, tanh, size=4"),
    "length": (PLAIN | dict(bert=dict(max_seq_length=40)), "max_seq_length=40)"),
    "longer than the model": (PLAIN | dict(bert=dict(max_seq_length=400)), "max_seq_length=90)"),
    "neutral settings": (PLAIN | dict(bert=NEUTRAL | dict(model_args={})), "max_seq_length=90)"),
    "no length": (PLAIN | dict(bert=dict(max_seq_length=None)), "max_seq_length=90)"),
    "the tokenizer's length": (PLAIN | dict(tokenizer=dict(model_max_length=40)), "max_seq_length=40)"),
    "its oldest key": (PLAIN | dict(tokenizer=dict(max_len=41)), "max_seq_length=41)"),
    "a tokenizer without a length": (PLAIN | dict(tokenizer=dict(model_max_length=int(1e30))), "max_seq_length=90)"),
    "such a float": (PLAIN | dict(tokenizer='{"model_max_length": 1e30}'), "max_seq_length=90)"),
    "another model's name": (PLAIN | {"sentence_roberta_config.json": dict(max_seq_length=42)}, "max_seq_length=42)"),
    "truncated vectors": (PLAIN | dict(settings=dict(truncate_dim=3)), "mean pooling, size=3"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_settings_that_are_run(name, load):
    files, words = RUN[name]
    assert words in repr(load(**files))


REFUSED = {
    "out of order": (PLAIN | dict(modules=PLAIN["modules"][::-1]),
                     "modules.json lists modules in another order than their 'idx', [1, 0]."),
    "one name": (PLAIN | dict(modules=[module | dict(name="0") for module in PLAIN["modules"]]),
                 "modules.json lists more than one module with the name '0'."),
    "two poolings": (PLAIN | dict(modules=listed("Transformer", "Pooling", "Pooling")),
                     "lists Pooling (2_Pooling) where Longspan supports only Dense or Normalize"),
    "no pooling": (dict(modules=listed("Transformer")), "modules.json has 1 modules"),
    "normalize first": (dict(modules=listed("Transformer", "Normalize")),
                        "lists Normalize (1_Normalize) where Longspan"),
    "no transformer": (dict(modules=listed("StaticEmbedding")),
                       "lists StaticEmbedding (0_StaticEmbedding) where Longspan"),
    "nothing": (dict(modules=[]), "modules.json has 0 modules"),
    "unknown": (PLAIN | dict(modules=listed("Transformer", "Pooling", "LayerNorm")),
                "lists LayerNorm (2_LayerNorm) where Longspan supports only Dense or Normalize"),
    "somebody's": (PLAIN | dict(modules=[dict(idx=0, path="", type="custom_st.Transformer"), *PLAIN["modules"][1:]]),
                   "lists custom_st.Transformer where Longspan supports only Transformer"),
    "lost list": (dict(pooling=CLS), "has 1_Pooling, a folder of a sentence-transformers module, but no modules.json"),
    "mode": (PLAIN | dict(pooling=dict(embedding_dimension=6, pooling_mode="median")),
             "'median' is not one of 'cls', 'max'"),
    "old mode": (PLAIN | dict(pooling=MEAN | dict(pooling_mode_median_tokens=True)),
                 "has 'pooling_mode_median_tokens', which is not a pooling mode. The modes are pooling_mode_cls_token"),
    "mode's type": (PLAIN | dict(pooling=dict(embedding_dimension=6, pooling_mode=7)),
                    "'pooling_mode' must be a name or a list of names, got 7."),
    "null mode": (PLAIN | dict(pooling=dict(embedding_dimension=6, pooling_mode=None)),
                  "'pooling_mode' must be a name or a list of names, got None."),
    "no modes": (PLAIN | dict(pooling=dict(embedding_dimension=6, pooling_mode=[])),
                 "must be a name or a list of names"),
    "flag": (PLAIN | dict(pooling=MEAN | dict(pooling_mode_max_tokens="no")), "must be true or false, got no."),
    "prompt flag": (PLAIN | dict(pooling=MEAN | dict(include_prompt=1)),
                    "'include_prompt' must be true or false, got 1."),
    "key": (PLAIN | dict(pooling=MEAN | dict(temperature=2)), "has 'temperature', which Longspan does not know."),
    "size": (PLAIN | dict(pooling=MEAN | dict(word_embedding_dimension=7)),
             "has word_embedding_dimension=7, but the module reads vectors of size 6."),
    "no size": (PLAIN | dict(pooling=dict(pooling_mode="cls")), "has no 'embedding_dimension'. It must be 6"),
    "bool size": (WITH_DENSE | dict(dense=DENSE | dict(in_features=True)), "has in_features=True, but"),
    "dense size": (WITH_DENSE | dict(dense=DENSE | dict(in_features=5)), "2_Dense/config.json has in_features=5, but"),
    "dense weights": (WITH_DENSE | dict(dense=DENSE | dict(out_features=5)), "but its config.json needs"),
    "dense bias": (WITH_DENSE | dict(dense=DENSE | dict(bias=False)),
                   "but its config.json needs {'linear.weight': (4, 6)}"),
    "dense bool": (WITH_DENSE | dict(dense=DENSE | dict(bias=0)), "'bias' must be true or false, got 0."),
    "dense output": (WITH_DENSE | dict(dense=DENSE | dict(out_features=None)),
                     "'out_features' must be a number of features"),
    "activation": (WITH_DENSE | dict(dense=DENSE | dict(activation_function="torch.nn.modules.activation.Mish")),
                   "has activation_function='torch.nn.modules.activation.Mish', which Longspan does not support"),
    "code": (WITH_DENSE | dict(dense=DENSE | dict(activation_function="os.system")), "activation_function='os.system'"),
    "dense input": (WITH_DENSE | dict(dense=DENSE | dict(module_input_name="token_embeddings")),
                    "has module_input_name='token_embeddings', but Longspan supports only 'sentence_embedding'."),
    "dense key": (WITH_DENSE | dict(dense=DENSE | dict(dropout=0.5)), "has 'dropout', which Longspan does not know."),
    "no dense": ({**PLAIN, "modules": listed("Transformer", "Pooling", "Dense")}, "2_Dense/config.json is missing"),
    "normalize": (NORMALIZED | dict(normalize=dict(module_input_name="token_embeddings")),
                  "has module_input_name='token"),
    "no pooling file": (dict(modules=PLAIN["modules"]),
                        "1_Pooling/config.json is missing, but modules.json refers to it."),
    "task": (PLAIN | dict(bert=dict(transformer_task="fill-mask")),
             "sentence_bert_config.json has transformer_task=fill-mask, which Longspan does not support"),
    "model arguments": (PLAIN | dict(bert=dict(model_args=dict(rotary_scaling_factor=2))), "has model_args={'rotary"),
    "unknown setting": (PLAIN | dict(bert=dict(whatever=1)), "has whatever=1, which Longspan does not support"),
    "lower": (PLAIN | dict(bert=dict(do_lower_case="yes")), "'do_lower_case' must be true or false, got yes."),
    "length": (PLAIN | dict(bert=dict(max_seq_length="long")),
               "'max_seq_length' must be a number of tokens, at least 1"),
    "negative": (PLAIN | dict(bert=dict(max_seq_length=-1)),
                 "sentence_bert_config.json: 'max_seq_length' must be a number"),
    "no room": (PLAIN | dict(bert=dict(max_seq_length=2)),
                "the tokenizer adds 2 special tokens to each, which leaves none"),
    "sparse": (PLAIN | dict(settings=dict(model_type="SparseEncoder")), "has model_type='SparseEncoder', but Longspan"),
    "prompts": (PLAIN | dict(settings=dict(prompts=["query: "])),
                "'prompts' must be an object of texts, got ['query: ']."),
    "unknown prompt": (PLAIN | dict(settings=dict(prompts={}, default_prompt_name="query")),
                       "'default_prompt_name' must be one of its 'prompts', got query."),
    "similarity": (PLAIN | dict(settings=dict(similarity_fn_name="maxsim")),
                   "similarity_fn_name='maxsim' is not one of"),
    "dim": (PLAIN | dict(settings=dict(truncate_dim=0)),
            "'truncate_dim' must be a number of features, at least 1, got 0."),
    "large dim": (PLAIN | dict(settings=dict(truncate_dim=7)),
                  "`truncate_dim` must be a number of features from 1 to 6"),
    "not a flag": (PLAIN | dict(tokenizer=dict(split_special_tokens="no")),
                   "tokenizer_config.json: 'split_special_tokens' must be true or false, got no."),
    "special tokens": (PLAIN | dict(tokenizer=dict(split_special_tokens=True)), "has split_special_tokens=true, but"),
    "side": (PLAIN | dict(tokenizer=dict(truncation_side="middle")), "'truncation_side'='middle' is not one of"),
    "modules": (dict(modules="[{"), "modules.json is not JSON. Download or save it again."),
    "deep": (dict(modules="[" * 100_000), "modules.json is not JSON"),
    "no list": (dict(modules={}), "modules.json must contain a list, got {}."),
    "no module": (dict(modules=[3]), "modules.json must list objects with the strings 'path' and 'type', got 3."),
    "no type": (dict(modules=[dict(path="")]), "modules.json must list objects with the strings 'path' and 'type'"),
    "pooling": (PLAIN | dict(pooling="{"), "1_Pooling/config.json is not JSON"),
    "pooling list": (PLAIN | dict(pooling=[]), "1_Pooling/config.json must contain a JSON object"),
    "bert": (PLAIN | dict(bert="nonsense"), "sentence_bert_config.json is not JSON"),
    "settings": (PLAIN | dict(settings="nonsense"), "config_sentence_transformers.json is not JSON"),
    "tokenizer": (PLAIN | dict(tokenizer="{"), "tokenizer_config.json is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_by_name(name, load, tmp_path):
    files, words = REFUSED[name]
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(**files)
    assert words in str(caught.value) and len(str(caught.value)) < 1000
    assert str(tmp_path) in str(caught.value) or name in ("no room", "similarity", "large dim")


LETTERS = {"[UNK]": 0, "a": 1, "A": 2, "é": 3, "É": 4, "e": 5}
WORDPIECE = Tokenizer(tokenizer_models.WordPiece(LETTERS, unk_token="[UNK]"))
OF_BERT = dict(tokenizer_class="BertTokenizer")
NORMALIZED_IDS = {
    "lower case": (OF_BERT | dict(do_lower_case=True), [1, 5, 5]),
    "the default is lower case": (OF_BERT, [1, 5, 5]),
    "cased": (dict(tokenizer_class="BertTokenizerFast", do_lower_case=False), [2, 4, 3]),
    "cased without accents": (OF_BERT | dict(do_lower_case=False, strip_accents=True), [2, 0, 5]),
    "accents": (OF_BERT | dict(strip_accents=False), [1, 3, 3]),
    "no class, but a bert": ({}, [1, 5, 5]),
    "the file as it is": (dict(tokenizer_class="PreTrainedTokenizerFast", do_lower_case=True), [2, 4, 3]),
}


@pytest.mark.parametrize("name", NORMALIZED_IDS)
def test_berts_tokenizer_takes_its_settings_from_its_config(name, load, tmp_path):
    """As in Hugging Face, whatever `tokenizer.json` says, which has lowercase=false here. Training reads it alike."""
    load(**PLAIN)
    config, want = NORMALIZED_IDS[name]
    WORDPIECE.normalizer = normalizers.BertNormalizer(lowercase=False)
    WORDPIECE.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer=config)
    letters = ["A", "É", "é"]
    found = hf.load_embedder(tmp_path).tokenize(letters)
    assert [ids.tolist() for ids, *_ in found] == [[number] for number in want]
    assert [encoding.ids for encoding in tokenizer_of(tmp_path).encode_batch(letters)] == [[number] for number in want]


def test_a_setting_of_berts_tokenizer_is_true_or_false(load, tmp_path):
    load(**PLAIN)
    WORDPIECE.normalizer = normalizers.BertNormalizer()
    WORDPIECE.save(str(tmp_path / "tokenizer.json"))
    for key in ("do_lower_case", "tokenize_chinese_chars"):
        write(tmp_path, tokenizer=OF_BERT | {key: None})
        with pytest.raises(ValueError, match=f"tokenizer_config.json: '{key}' must be true or false, got None"):
            hf.load_embedder(tmp_path)


def test_a_file_that_is_not_utf8_is_named(load, tmp_path):
    (tmp_path / "modules.json").write_bytes(b"\xff\xfe[")
    with pytest.raises(ValueError, match=r"modules\.json is not JSON"):
        load()


def test_weights_in_a_pickle_are_not_read(load, tmp_path):
    load(**WITH_DENSE)
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"is missing\. It has pytorch_model\.bin, a pickle, which"):
        hf.load_embedder(tmp_path)


def test_a_directory_without_a_tokenizer_or_a_model_is_refused(load, tmp_path):
    load(**PLAIN)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        hf.load_embedder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        hf.load_embedder(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a directory, and Longspan does not download"):
        hf.load_embedder(tmp_path / "nowhere")


def test_a_folder_with_a_dot_is_not_an_absolute_one(tmp_path):
    """`./other` without its dot would be `/other`."""
    outside, inside = tmp_path / "other", tmp_path / "model"
    write(outside, **{"config.json": MEAN})
    modules = listed("Transformer", "Pooling")
    modules[1]["path"] = f".{outside}"
    write(inside, modules=modules)
    (folder,) = (module.folder for module in listed_modules(inside) if module.kind == "Pooling")
    assert folder == str(outside).lstrip("/") and not (inside / folder).exists()


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
        hf.load_embedder(inside)


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    settings = dict(prompts=dict(query="q: ", none=None), default_prompt_name="query")
    write(blobs, a=listed("Transformer", "Pooling"), b=dict(max_seq_length=7, do_lower_case=True), c=settings)
    snapshot.mkdir(parents=True)
    files = dict(a="modules.json", b="sentence_bert_config.json", c="config_sentence_transformers.json")
    for blob, name in files.items():
        (snapshot / name).symlink_to(blobs / blob)
    assert [str(module) for module in listed_modules(snapshot)] == ["Transformer", "Pooling (1_Pooling)"]
    assert transformer_settings(snapshot) == (7, True)
    assert sentence_settings(snapshot) == (dict(query="q: "), "query", "cosine", None)


def test_the_transformer_may_be_in_a_folder(load, tmp_path):
    want = load(**NORMALIZED, bert=dict(max_seq_length=7)).embed(["w1 w2", "w3 " * 20])
    (tmp_path / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        (tmp_path / name).rename(tmp_path / "0_Transformer" / name)
    modules = NORMALIZED["modules"]
    write(tmp_path, modules=[dict(modules[0], path="0_Transformer"), *modules[1:]])
    embedder = hf.load_embedder(tmp_path)
    np.testing.assert_array_equal(embedder.embed(["w1 w2", "w3 " * 20]), want)
    hf.save(embedder, tmp_path / "saved")
    np.testing.assert_array_equal(hf.load_embedder(tmp_path / "saved").embed(["w1 w2", "w3 " * 20]), want)
