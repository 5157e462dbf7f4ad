"""Other libraries' attention, for comparison. All of them are optional."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

from longspan.testing import Shape, make_qkv


def installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def jax_nn(shape: Shape, *, window: int | None = None, causal: bool = False):
    """`jax.nn.dot_product_attention`, dense."""
    q, k, v = make_qkv(shape, jnp.float32)
    size = None if window is None else (window, window)
    run = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, local_window_size=size))
    return lambda: run(q, k, v)


def torch_qkv(shape: Shape, *, grad: bool = False):
    import torch

    arrays = [torch.from_numpy(np.asarray(x).swapaxes(1, 2).copy()) for x in make_qkv(shape, jnp.float32)]
    return [x.requires_grad_(grad) for x in arrays]


def torch_sdpa(shape: Shape, bias=None):
    """PyTorch's scaled_dot_product_attention, causal, or with a bias."""
    import torch

    q, k, v = torch_qkv(shape)
    added = dict(is_causal=True) if bias is None else dict(attn_mask=torch.from_numpy(np.array(bias)))

    def run():
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **added).sum().item()

    return run


def flex(shape: Shape, window: int):
    """PyTorch's FlexAttention, compiled, with a sliding window. Forward only: on CPUs it refuses the backward."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = torch_qkv(shape)
    blocks = create_block_mask(
        lambda b, h, i, j: (i - j).abs() <= window, B=None, H=None, Q_LEN=shape.T, KV_LEN=shape.S, device="cpu"
    )
    compiled = torch.compile(flex_attention)

    def run():
        with torch.no_grad():
            return compiled(q, k, v, block_mask=blocks).sum().item()

    return run


def hf_longformer(shape: Shape, window: int, *, backward: bool = False):
    """(whole, projections): Hugging Face's LongformerSelfAttention, and the part of it that is not attention."""
    import torch
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    size = shape.N * shape.H
    config = LongformerConfig(
        hidden_size=size, num_attention_heads=shape.N, attention_window=[2 * window], attention_probs_dropout_prob=0.0
    )
    module = LongformerSelfAttention(config, layer_id=0).eval()
    hidden = torch.randn(shape.B, shape.T, size, requires_grad=backward)
    kinds = torch.zeros(shape.B, shape.T)
    flags = dict(is_index_masked=kinds < 0, is_index_global_attn=kinds > 0, is_global_attn=False)

    def attend():
        return module(hidden, attention_mask=kinds, **flags)[0]

    def project():
        return module.query(hidden) + module.key(hidden) + module.value(hidden)

    return _torch_runs(backward, hidden, attend, project)


def hf_big_bird(shape: Shape, block: int, r: int):
    """(whole, projections): Hugging Face's BigBird block-sparse attention, and the part that is not attention."""
    import torch
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    size = shape.N * shape.H
    config = BigBirdConfig(
        hidden_size=size,
        num_attention_heads=shape.N,
        block_size=block,
        num_random_blocks=r,
        max_position_embeddings=shape.T,
    )
    module = BigBirdBlockSparseAttention(config, seed=0).train()
    hidden = torch.randn(shape.B, shape.T, size)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(shape.B, shape.T), block)
    masks = dict(band_mask=band, from_mask=rows, to_mask=columns, from_blocked_mask=blocked, to_blocked_mask=blocked)

    def attend():
        return module(hidden, **masks)[0]

    def project():
        return module.query(hidden) + module.key(hidden) + module.value(hidden)

    return _torch_runs(False, hidden, attend, project)


def _torch_runs(backward: bool, hidden, *functions):
    import torch

    def runner(function):
        def run():
            with torch.set_grad_enabled(backward):
                out = function().sum()
                if backward:
                    hidden.grad = None
                    out.backward()
                return out.item()

        return run

    return [runner(function) for function in functions]
