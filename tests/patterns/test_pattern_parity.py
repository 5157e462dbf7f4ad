"""Our functions between Hugging Face's projections, live: `pytest -m parity` with torch and transformers installed."""

import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls

pytestmark = pytest.mark.parity
N, H = 3, 4


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return torch


def strong(torch, module):
    """Weights with a larger std than the default 0.02, which gives near-uniform attention that hides mask errors."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return module


def projected(torch, module, x, *names):
    with torch.no_grad():
        return [jnp.asarray(getattr(module, name)(x).view(*x.shape[:2], N, H).numpy()) for name in names]


def assert_parity(got, theirs):
    np.testing.assert_allclose(np.asarray(got).reshape(theirs.shape), theirs.numpy(), atol=2e-5)


@pytest.mark.parametrize(("length", "training"), [(768, True), (1024, True), (704, False)])
def test_bigbird_attention_equals_hugging_face(torch, length, training):
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(hidden_size=N * H, num_attention_heads=N, attention_probs_dropout_prob=0.0)
    module = strong(torch, BigBirdBlockSparseAttention(config, seed=2)).train(training)
    x, mask = torch.randn(2, length, N * H), torch.ones(2, length)
    mask[0, length - 100 :], mask[1, 130:150] = 0, 0
    blocked, band, from_mask, to_mask = BigBirdModel.create_masks_for_block_sparse_attn(mask, 64)
    options = dict(band_mask=band, from_mask=from_mask, to_mask=to_mask)
    with torch.no_grad():
        theirs = module(x, **options, from_blocked_mask=blocked, to_blocked_mask=blocked)[0]
    blocks = np.zeros((N, length // 64 - 2, 3), np.int32)  # in evaluation it draws nothing but block 0
    if training:
        blocks = ls.bigbird_random_blocks(length, block_size=64, num_random_blocks=3, num_heads=N, seed=2)
    q, k, v = projected(torch, module, x, "query", "key", "value")
    masks = dict(q_mask=mask.numpy(), kv_mask=mask.numpy())
    assert_parity(ls.bigbird_attention(q, k, v, block_size=64, rand_attn=blocks, **masks), theirs)


def test_longformer_attention_equals_hugging_face(torch):
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=N * H, num_attention_heads=N, attention_window=[8], attention_probs_dropout_prob=0.0
    )
    module = strong(torch, LongformerSelfAttention(config, 0)).eval()
    x, kinds = torch.randn(2, 64, N * H), torch.zeros(2, 64)
    kinds[0, [0, 33]], kinds[1, 5], kinds[0, 60:], kinds[1, :3] = 1, 1, -1, -1
    options = dict(is_index_masked=kinds < 0, is_index_global_attn=kinds > 0, is_global_attn=True)
    with torch.no_grad():
        theirs = module(x, attention_mask=10000.0 * kinds, **options)[0]
    names = ("query", "key", "value", "query_global", "key_global", "value_global")
    qkv = projected(torch, module, x, *names)
    assert_parity(ls.longformer_attention(*qkv, window=4, token_kinds=kinds.numpy()), theirs)
