"""Writes bigbird_random_blocks.json: the random blocks that Hugging Face's BigBird draws in training mode.

Needs torch and transformers, which are no dependencies of longspan: run it in an environment of their own.

    python tests/golden/make_bigbird_random_blocks.py
"""

import json
from pathlib import Path

# (seq_len, block_size, num_random_blocks, num_heads, seed, max_seq_len)
CASES = [
    (1024, 64, 3, 2, 0, 4096),  # legacy lengths: drawn for the maximum length, then truncated
    (1024, 64, 3, 3, 11, 1024),
    (1024, 32, 2, 1, 5, 4096),
    (3072, 64, 3, 1, 7, 4096),
    (4096, 64, 3, 2, 3, 4096),
    (4096, 128, 1, 2, 1, 4096),
    (768, 64, 3, 2, 0, 4096),  # generated plans, from the shortest length
    (832, 64, 3, 3, 4, 4096),
    (640, 64, 2, 2, 9, 512),
    (2048, 64, 3, 2, 2, 4096),
    (36, 3, 1, 5, 6, 4096),
    (96, 8, 3, 2, 8, 128),
]


def main():
    lines = [json.dumps([*case, hugging_face_blocks(*case)], separators=(",", ":")) for case in CASES]
    Path(__file__).with_name("bigbird_random_blocks.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


class Drawn(Exception):
    pass


def hugging_face_blocks(seq_len, block_size, num_random_blocks, num_heads, seed, max_seq_len):
    """`rand_attn` of each head, captured in Hugging Face's forward pass."""
    import torch
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    config = BigBirdConfig(
        hidden_size=num_heads,
        num_attention_heads=num_heads,
        block_size=block_size,
        num_random_blocks=num_random_blocks,
        max_position_embeddings=max_seq_len,
    )
    module = BigBirdBlockSparseAttention(config, seed=seed).train()

    def catch(from_mask, to_mask, rand_attn, *_):
        raise Drawn(rand_attn[0].tolist())

    module._create_rand_mask_from_inputs = catch
    blocks = seq_len // block_size
    mask = torch.ones(1, blocks, block_size)
    try:
        module(
            torch.zeros(1, seq_len, num_heads),
            band_mask=torch.ones(1, 1, blocks - 4, block_size, 3 * block_size),
            from_mask=mask.view(1, 1, seq_len, 1),
            to_mask=mask.view(1, 1, 1, seq_len),
            from_blocked_mask=mask,
            to_blocked_mask=mask,
        )
    except Drawn as drawn:
        return drawn.args[0]
    raise AssertionError("Hugging Face's forward pass has drawn no blocks")


if __name__ == "__main__":
    main()
