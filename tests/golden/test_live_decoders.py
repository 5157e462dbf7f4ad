"""The comparisons of decoders, live, with the torch and transformers that are installed (`make parity`)."""

import decoder_peers as peers
import numpy as np
import pytest

import longspan as ls
from longspan import hf
from tests.models.test_decoders import assert_close, directory, hidden_states, load, logits, real

pytestmark = [
    pytest.mark.parity,
    # Hugging Face's warnings are not errors here.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("name", [*peers.MODELS, *peers.VISIONS, peers.MXFP4])
def test_hugging_face_gives_what_the_golden_files_say(name):
    peer = peers.hugging_face(directory(name))
    for inputs in peers.cases().values():
        assert_close(real(logits(load(name), inputs), inputs), peers.run(peer, inputs))


@pytest.mark.parametrize("name", peers.MODELS)
def test_hugging_face_gives_the_same_hidden_states(name):
    peer = peers.hugging_face(directory(name))
    for inputs in peers.cases().values():
        assert_close(real(hidden_states(load(name), inputs), inputs), peers.hidden_states(peer, inputs))


@pytest.mark.parametrize("name", [*peers.MODELS, *peers.VISIONS, peers.MXFP4])
def test_hugging_face_loads_what_we_save(name, tmp_path):
    hf.save(load(name), tmp_path)
    inputs = peers.cases()["left"]
    want, got = (peers.run(peers.hugging_face(where), inputs) for where in (directory(name), tmp_path))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", [*peers.MODELS, *peers.VISIONS, peers.MXFP4])
def test_hugging_face_generates_the_same_tokens(name):
    answers = ls.generate(load(name), peers.prompts(), max_new_tokens=peers.NEW, stop_tokens=())
    for prompt, tokens in zip(peers.prompts(), answers, strict=True):
        peer = peers.hugging_face(directory(name))  # the frequencies of some depend on the longest row so far
        if name not in peers.BY_LENGTH:
            np.testing.assert_array_equal(tokens, peers.cached_answer(peer, prompt))
        np.testing.assert_array_equal(tokens, peers.answer(peer, prompt))
