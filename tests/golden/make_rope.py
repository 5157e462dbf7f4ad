"""Writes rope.json: the frequencies of Hugging Face's RoPE types in both spellings, and arrays rotated with them.

Needs torch and transformers, which longspan does not depend on: run it in another environment.

    python tests/golden/make_rope.py
"""

import json
from pathlib import Path

import numpy as np

SHORT = [1.0, 1.08, 1.1, 1.13, 1.28, 1.31, 1.45, 1.77]
LONG = [1.07, 1.12, 2.9, 8.5, 21.25, 40.0, 55.1, 64.2]
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def new(rope_type, theta=10000.0, **fields):
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=theta, **fields))


def old(rope_type, theta=10000.0, name="type", partial=None, **fields):
    beside = {} if partial is None else dict(partial_rotary_factor=partial)
    return dict(rope_theta=theta, **beside, rope_scaling={name: rope_type, **fields})


# (what a config.json says, head_dim, max_position_embeddings, seq_len)
CASES = [
    (new("default"), 64, 2048, None),
    (new("default", 1e6, partial_rotary_factor=0.75), 96, 4096, None),
    (dict(rope_theta=500000.0, rope_scaling=None), 128, 8192, None),
    (dict(rope_theta=123456.789, partial_rotary_factor=0.4, rope_scaling=None), 80, 2048, None),
    (new("linear", 1e6, factor=8.0), 256, 131072, None),
    (old("linear", factor=2.5), 16, 2048, None),
    (new("dynamic", factor=2.0), 64, 2048, None),
    (new("dynamic", factor=2.0), 64, 2048, 700),
    (new("dynamic", factor=2.0, partial_rotary_factor=0.5), 64, 2048, 9001),
    (old("dynamic", factor=4.0), 16, 2048, 2049),
    (new("llama3", 500000.0, **LLAMA3), 128, 131072, None),
    (old("llama3", 500000.0, name="rope_type", **LLAMA3), 64, 131072, None),
    (new("yarn", 150000.0, factor=32.0, truncate=False, original_max_position_embeddings=4096), 64, 131072, None),
    (new("yarn", factor=None, original_max_position_embeddings=4096), 16, 32768, None),
    (new("yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25), 16, 2048, None),
    (new("yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.8, original_max_position_embeddings=512), 64, 20480, None),
    (new("yarn", factor=0.5, original_max_position_embeddings=512), 8, 256, None),
    (old("yarn", 1e6, factor=4.0, original_max_position_embeddings=32768), 128, 32768, None),
    (new("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=4096), 16, 131072, None),
    (new("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=4096), 16, 131072, 4096),
    (new("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=4096), 16, 131072, 4097),
    (new("longrope", short_factor=SHORT, long_factor=LONG, factor=3.0), 16, 4096, None),
    (new("longrope", short_factor=SHORT, long_factor=LONG, attention_factor=1.5), 16, 4096, 5000),
    (old("longrope", partial=0.5, short_factor=SHORT, long_factor=LONG), 32, 4096, 4097),
    (new("proportional", 1e6, partial_rotary_factor=0.25), 64, 4096, None),
]
POSITIONS = [0, 1, 2, 511, 4096, 65537, 999_999, 1_000_000]


def main():
    frequencies = [json.dumps([*case, *hugging_face_frequencies(*case)]) for case in CASES]
    rotations = [json.dumps([kind, *hugging_face_rotation(kind)]) for kind in ("half", "interleaved")]
    lines = [f'"{name}": [\n' + ",\n".join(values) + "\n]" for name, values in
             (("frequencies", frequencies), ("rotations", rotations))]  # fmt: skip
    Path(__file__).with_name("rope.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def hugging_face_frequencies(parameters, head_dim, max_position_embeddings, seq_len):
    """(inv_freq, attention_factor) of a config with the parameters as in a checkpoint."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    sizes = dict(hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=max_position_embeddings)
    config = LlamaConfig(**sizes, **json.loads(json.dumps(parameters)))
    kind = config.rope_parameters["rope_type"]
    default = Phi3RotaryEmbedding.compute_default_rope_parameters  # Llama's ignores `partial_rotary_factor`
    inv_freq, factor = ROPE_INIT_FUNCTIONS.get(kind, default)(config, seq_len=seq_len)
    return inv_freq.tolist(), factor


def rotated_arrays():
    """x [B, T, N, H], positions [T] and frequencies [D/2] for a rotation."""
    x = np.random.default_rng(0).normal(size=(2, len(POSITIONS), 3, 10)).astype(np.float32)
    inv_freq = np.asarray([1.0, 0.1, 0.0625, 0.00390625], np.float32)
    return x, np.asarray(POSITIONS, np.int32), inv_freq


def hugging_face_rotation(kind, factor=1.25):
    """(attention_factor, the rotated `x`); interleaved, only the first eight features are rotated."""
    import torch
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as half

    x, positions, inv_freq = map(torch.from_numpy, rotated_arrays())
    angles = positions[None, :, None].float() * inv_freq
    if kind == "half":
        angles, rotate = torch.cat((angles, angles), dim=-1), half
    else:
        angles, rotate = torch.repeat_interleave(angles, 2, dim=-1), interleaved
    cos, sin = angles.cos() * factor, angles.sin() * factor
    turned = x[..., :8].transpose(1, 2)
    turned = rotate(turned, turned, cos, sin)[0].transpose(1, 2)
    return factor, torch.cat((turned, x[..., 8:]), dim=-1).tolist()


if __name__ == "__main__":
    main()
