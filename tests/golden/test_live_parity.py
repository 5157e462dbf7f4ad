"""The comparisons of the golden files, live, with the torch and transformers that are installed (`make parity`)."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from test_golden import ALIASES, HERE, call, compare, golden, load_alias

from longspan import hf
from tests.golden import peers

pytestmark = [
    pytest.mark.parity,
    # Hugging Face's warnings are not errors here.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("name", peers.names())
def test_hugging_face_gives_what_the_golden_files_say(name, tmp_path):
    peer = peers.make_model(name)
    peer.save_pretrained(tmp_path)
    for case in peers.cases(name):
        want = peers.run(peer, case, gradients=False)
        got = call(hf.load(tmp_path, random_blocks="trained" if case.training else "hf_eval"), case)
        compare(name, case, got, want)


@pytest.mark.parametrize("name", peers.names())
def test_hugging_face_loads_what_we_save(name, tmp_path, caplog):
    hf.save(hf.load(HERE / name), tmp_path)
    case = next(iter(peers.cases(name)))
    with caplog.at_level(logging.INFO, logger="transformers"):
        loaded = hugging_face(tmp_path)
    assert "newly initialized" not in caplog.text
    want, got = (peers.run(m, case, gradients=False) for m in (hugging_face(HERE / name), loaded))
    for key in want:
        np.testing.assert_array_equal(got[key], want[key], err_msg=key)


@pytest.mark.parametrize("family", peers.SPELLINGS)
def test_hugging_face_reads_the_spellings_of_configs_as_stored(family):
    stored = json.loads((HERE / "spellings.json").read_text())[family]
    for raw, want in zip(peers.SPELLINGS[family], stored, strict=True):
        got = peers.spelled(family, raw)
        assert {key: got[key] for key in ("kinds", "window")} == {key: want[key] for key in ("kinds", "window")}
        for kind in set(got["kinds"]):
            np.testing.assert_allclose(np.hstack(got[kind]), np.hstack(want[kind]), rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in peers.names() if name.startswith("roberta")])
@pytest.mark.parametrize("alias", ALIASES)
def test_hugging_face_computes_robertas_of_other_names_alike(alias, name, tmp_path):
    hf.save(load_alias(alias, name, tmp_path / "theirs"), tmp_path / "ours")
    for directory in ("theirs", "ours"):
        peer = hugging_face(tmp_path / directory)
        assert type(peer).__name__.startswith(ALIASES[alias])
        for case in peers.cases(name):
            want = {key: value for key, value in golden(name, case.name).items() if key.startswith("output.")}
            got = peers.run(peer, case, gradients=False)
            for key in want:
                np.testing.assert_allclose(got[key], want[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bertModel", "robertaModel", "bertForSequenceClassification", "robertaForMaskedLM"])
def test_hugging_face_loads_an_extended_model(name, tmp_path):
    long = hf.extend(hf.load(HERE / name), max_positions=150, window=3)
    hf.save(long, tmp_path)
    ids = np.random.default_rng(0).integers(5, 23, (2, 133))
    case = peers.Case("long", dict(input_ids=ids, global_attention_mask=(ids % 7 == 0).astype(np.int64)))
    # An extended BERT has equal windows in all layers, and Hugging Face needs them to divide the length.
    compare(name, case, call(long, case), peers.run(hugging_face(tmp_path), case, gradients=False))


def test_our_advice_converts_a_pickle(tmp_path, monkeypatch):
    import torch

    peer = peers.make_model("bertForMaskedLM")
    peer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(peer.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="Convert it once where torch is installed:\n") as error:
        hf.load(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(str(error.value).split("Convert it once where torch is installed:\n")[1], {})
    case = next(iter(peers.cases("bertForMaskedLM")))
    compare("bertForMaskedLM", case, call(hf.load(tmp_path), case), peers.run(peer, case, gradients=False))


def test_shards_of_hugging_face_load(tmp_path):
    peer = peers.make_model("longformerForTokenClassification")
    peer.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 1
    case = next(iter(peers.cases("longformerForTokenClassification")))
    got = call(hf.load(tmp_path), case)
    compare("longformerForTokenClassification", case, got, peers.run(peer, case, gradients=False))


def test_untied_decoders_survive_the_round_trip(tmp_path):
    import torch

    peer = peers.make_model("robertaForMaskedLM")
    config = type(peer.config)(**{**peer.config.to_dict(), "tie_word_embeddings": False})
    untied = type(peer)(config).eval()
    with torch.no_grad():
        for p in untied.parameters():
            p.normal_(0, peers.STD)
    untied.save_pretrained(tmp_path / "theirs")
    model = hf.load(tmp_path / "theirs")
    hf.save(model, tmp_path / "ours")
    case = next(iter(peers.cases("robertaForMaskedLM")))
    want = peers.run(untied, case, gradients=False)
    compare("robertaForMaskedLM", case, call(model, case), want)
    np.testing.assert_array_equal(
        peers.run(hugging_face(tmp_path / "ours"), case, gradients=False)["output.logits"], want["output.logits"]
    )


@pytest.mark.parametrize("act", ["relu", "silu", "quick_gelu", "gelu_fast", "gelu_pytorch_tanh", "gelu_python"])
def test_activations_agree_with_hugging_face(act):
    import torch
    from transformers.activations import ACT2FN

    from longspan.models.activations import ACTIVATIONS

    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[act](jnp.asarray(x)), ACT2FN[act](torch.from_numpy(x)), atol=1e-6)


def hugging_face(directory):
    import transformers

    (architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(directory).eval()
