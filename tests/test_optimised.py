"""What users run: one device and XLA's default flags. The other tests compile without optimisations.

Values and gradients once more, and programs that do not grow with the length or fold the user's data.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from tests.cache import test_programs as caches
from tests.engines import every_sparse_engine
from tests.golden import test_golden as encoders
from tests.models import test_decoders as decoders
from tests.models import test_generate as generation
from tests.test_parity import check

pytestmark = pytest.mark.optimised

SMALL, ONE, ODD, LONG = (
    "B2-T7-S11-N6-K3-H5", "B1-T1-S13-N2-K1-H3-Hv9", "B3-T37-S29-N4-K4-H17-Hv11", "B1-T67-S67-N2-K2-H64"
)  # fmt: skip
MATRIX = [  # each mask's arrays, each feature, each dtype and each tiling at least once
    ("none", LONG, "plain", "f32", "own tiles"),
    ("causal window", ODD, "all", "f32", "own tiles"),
    ("packed, pinned", ODD, "row bias, dropout and positions", "f32", "tiles 8x4"),
    ("between", SMALL, "head bias, sinks, scale and cap", "bf16", "own tiles"),
    ("flags", ODD, "plain", "bf16", "tiles 3x5"),
    ("blocks, rows", ODD, "all", "f32", "tiles 8x4"),
    ("dense behind a prefix", SMALL, "row bias, dropout and positions", "f16", "own tiles"),
    ("per head", LONG, "head bias, sinks, scale and cap", "f32", "tiles 3x5"),
    ("custom, rows", SMALL, "plain", "f64", "own tiles"),
    ("negated", ONE, "all", "f32", "own tiles"),
    ("lengths", ODD, "score", "f32", "own tiles"),
    ("segments", ODD, "relative", "f64", "tiles 3x5"),
]


def test_nothing_is_switched_off():
    assert "XLA_FLAGS" not in os.environ and jax.device_count() == 1


@pytest.mark.parametrize("choice", MATRIX, ids=", ".join)
def test_engines_match_float64(choice):
    check(*choice)


@pytest.mark.parametrize("name", ["longformerModel", "big_birdModel"])
def test_encoders_are_hugging_faces_in_values_and_gradients(name):
    case = next(p.values[1] for p in encoders.CASES if p.values[0] == name and encoders.peers.has_gradients(*p.values))
    encoders.test_outputs_agree_with_hugging_face(name, case)
    encoders.test_gradients_agree_with_hugging_face(name, case)


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "phi3_long"])
def test_decoders_are_hugging_faces(name):
    decoders.test_logits_agree_with_hugging_face(name, "left")


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_greedy_answers_are_hugging_faces(name):
    generation.test_greedy_answers_are_hugging_faces_token_for_token(name)


def test_a_cache_gives_the_same_in_one_step_and_in_a_scan():
    caches.test_a_whole_generation_is_one_trace_under_jit_and_under_scan(caches.PINNED)


@every_sparse_engine
@pytest.mark.parametrize("kind", ["window", "documents", "flags"])
def test_programs_do_not_grow_with_the_length(engine, kind):
    """The instructions of both passes' program as XLA optimises it, from a length on at which every loop is one."""
    short, long = (compiled_gradient(engine, kind, length).count(" = ") for length in (4096, 65536))
    assert 0 < long <= 1.05 * short  # a search over flags has a step more


def compiled_gradient(engine, kind, length) -> str:
    mask = {
        "window": ls.Causal() & ls.Window(63, 0) | ls.Prefix(4),
        "documents": ls.Causal() & ls.Segments(np.sort(np.arange(length) % 5).reshape(1, -1)),
        "flags": ls.Window(32, 32) | ls.Global(q_flags=np.arange(length)[None] == 7, kv_flags=None),
    }[kind]
    q = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    loss = jax.grad(lambda q, k, v, mask: ls.attention(q, k, v, mask=mask, engine=engine).sum(), (0, 1, 2))
    return jax.jit(loss).lower(q, q, q, mask).compile().as_text()
