"""`generate` raises before it allocates caches that do not fit; sliding layers store one window at any length."""

import numpy as np
import pytest
from flax import nnx

import longspan as ls
from longspan import models
from longspan.models.decoders import memory

SIZES = dict(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)


def test_caches_that_fit_no_device_are_refused_before_they_are_allocated(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: 24 * 10**9)
    model = models.CausalLM(models.LlamaConfig(**SIZES), rngs=nnx.Rngs(0))
    message = r"1,000,000,000 tokens need 64,000,000,000 bytes, but the devices have 24,000,000,000\. Give a smaller"
    with pytest.raises(ValueError, match=message):
        ls.generate(model, [[1, 2, 3]], max_new_tokens=4, max_length=10**9)
    with pytest.raises(ValueError, match=r"`length` must be at most 1,073,741,823"):
        ls.generate(model, [[1, 2, 3]], max_new_tokens=4, max_length=2**40)


def test_the_limit_of_caches_is_the_devices_memory(monkeypatch):
    there, config = memory.device_bytes(), models.LlamaConfig(**SIZES)
    assert there is not None and 2**28 < there < 2**50
    monkeypatch.setattr(memory, "device_bytes", lambda: 63_999)
    with pytest.raises(
        ValueError, match=r"need 64,000 bytes, but the devices have 63,999\. Give a smaller `max_length`"
    ):
        memory.check_memory(config, 1, 1000, np.float32)
    memory.check_memory(config, 1, 999, np.float32)
    monkeypatch.setattr(memory, "device_bytes", lambda: None)
    memory.check_memory(config, 1, 10**9, np.float32)


def test_a_window_decodes_with_a_billion_positions():
    model = models.CausalLM(models.MistralConfig(**SIZES, sliding_window=3), rngs=nnx.Rngs(0))
    prompts = [[1, 2, 3, 4, 5], [6]]
    short, long = (ls.generate(model, prompts, max_new_tokens=5, max_length=n) for n in (10, 10**9))
    for one, other in zip(short, long, strict=True):
        np.testing.assert_array_equal(one, other)
