"""Tiny Hugging Face decoders and the inputs on which we compare with them. Needs torch and transformers to run them.

Weights are not stored. They are drawn by tensor name, from a NumPy generator whose stream never changes.
"""

import json
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "decoders"
VOCAB, WINDOW, T = 29, 5, 37  # seven windows
LENGTHS = (37, 23)
NEW = 13  # tokens of an answer
TINY = dict(
    vocab_size=VOCAB, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
    intermediate_size=20, max_position_embeddings=71, pad_token_id=None, bos_token_id=None, eos_token_id=3,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope", rope_theta=100.0, partial_rotary_factor=1.0, short_factor=[1.1, 1.7, 2.0],
    long_factor=[3.0, 9.0, 4.0],
)  # fmt: skip
MINISTRAL3 = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    original_max_position_embeddings=8,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.5,
)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16, truncate=False)
# Name of the golden file -> name of Hugging Face's classes, and what differs from TINY.
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))),
    "llama3": ("Llama", dict(
        rope_parameters=LLAMA3, head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        hidden_act="gelu",
    )),
    "llama_dynamic": ("Llama", dict(
        rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=3.0), max_position_embeddings=16,
    )),
    "mistral": ("Mistral", dict(sliding_window=WINDOW)),
    "mistral_full": ("Mistral", dict(
        sliding_window=None, head_dim=10,
        rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16),
    )),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "qwen2_full": ("Qwen2", dict(sliding_window=WINDOW, max_window_layers=1, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=10, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)),
    "qwen3_bias": ("Qwen3", dict(head_dim=8, attention_bias=True)),
    "gemma2": ("Gemma2", dict(
        num_hidden_layers=5, head_dim=10, query_pre_attn_scalar=7, sliding_window=WINDOW, attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    )),
    "gemma3_text": ("Gemma3Text", dict(
        num_hidden_layers=11, sliding_window_pattern=3, head_dim=10, query_pre_attn_scalar=7, sliding_window=WINDOW,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
    )),
    "phi3": ("Phi3", dict(sliding_window=WINDOW)),
    "phi3_long": ("Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=16)),
    "phi3_short": ("Phi3", dict(
        rope_parameters=LONGROPE | dict(partial_rotary_factor=0.7, short_factor=[1.1, 1.7], long_factor=[3.0, 9.0]),
        original_max_position_embeddings=64,
    )),
    "smollm3": ("SmolLM3", dict(
        no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=WINDOW,
        rope_parameters=dict(rope_type="default", rope_theta=100.0), attention_bias=True, mlp_bias=True,
    )),
    "olmo2": ("Olmo2", dict(attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=100.0))),
    "olmo3": ("Olmo3", dict(
        num_hidden_layers=4, sliding_window=WINDOW,
        rope_parameters=dict(
            full_attention=dict(
                rope_type="yarn", rope_theta=100.0, factor=4.0, attention_factor=1.2,
                original_max_position_embeddings=16,
            ),
            sliding_attention=dict(rope_type="default", rope_theta=500000.0),
        ),
    )),
    "granite": ("Granite", dict(
        embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=5.0,
        rope_parameters=dict(rope_type="default", rope_theta=100.0), tie_word_embeddings=True,
    )),
    "ministral": ("Ministral", dict(
        head_dim=10, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )),
    "ministral3": ("Ministral3", dict(head_dim=10, sliding_window=None, rope_parameters=MINISTRAL3)),
    "mixtral": ("Mixtral", dict(sliding_window=WINDOW, head_dim=10, num_local_experts=5)),
    "qwen3_moe": ("Qwen3Moe", dict(
        head_dim=10, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=12, mlp_only_layers=[1],
    )),
    "qwen3_moe_sliding": ("Qwen3Moe", dict(
        head_dim=8, use_sliding_window=True, sliding_window=WINDOW, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=28, norm_topk_prob=True, decoder_sparse_step=2, attention_bias=True,
    )),
    "gpt_oss": ("GptOss", dict(
        head_dim=10, sliding_window=WINDOW, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=1.5,
        swiglu_alpha=1.3, rope_parameters=YARN,
    )),
}  # fmt: skip

# Its experts are in MXFP4, in groups of 32 numbers.
MXFP4 = "gpt_oss_mxfp4"
MXFP4_SIZES = dict(
    hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=8, sliding_window=WINDOW, num_local_experts=3,
    num_experts_per_tok=2, rope_parameters=YARN,
)  # fmt: skip

# Their rotations depend on the length, and Hugging Face's cached pass disagrees with its full pass.
BY_LENGTH = ("llama_dynamic", "phi3_long", "phi3_short")

# Their golden files also have hidden states.
WITH_HIDDEN_STATES = ("qwen3",)

# The text parts of multimodal models, whose files have other names: the name in `MODELS` of the same text model, what
# differs from it, what differs from `EYES`, and the other keys of the config.
VISIONS: dict[str, tuple[str, dict, dict, dict]] = {
    "gemma3": ("gemma3_text", {}, dict(hidden_size=6, vision_use_head=False), dict(mm_tokens_per_image=4)),
    "mistral3": (
        "ministral3", dict(model_type="ministral3"), dict(model_type="pixtral", head_dim=4),
        dict(tie_word_embeddings=False),
    ),
}  # fmt: skip
EYES = dict(hidden_size=8, intermediate_size=4, num_attention_heads=2, num_hidden_layers=1, image_size=8, patch_size=4)


def weights(shapes: dict[str, list[int]], model_type: str) -> dict[str, np.ndarray]:
    """Wide weights: with the usual 0.02, attention is nearly uniform, and a wrong mask is hidden by rounding."""
    arrays = {}
    for name, shape in shapes.items():
        rng = np.random.RandomState(zlib.crc32(name.encode()))
        if name.endswith(("_blocks", "_scales")):  # of MXFP4: any 4 bits, and exponents from -6 to -2
            arrays[name] = rng.randint(*((0, 256) if name.endswith("_blocks") else (121, 126)), shape).astype(np.uint8)
            continue
        draw = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            array = 0.3 * np.tanh(draw) + (0.0 if model_type.startswith("gemma") else 1.0)
        else:
            array = draw * (0.7 if "embed_tokens" in name else 0.3)
        arrays[name] = array.astype(np.float32)
    return arrays


def packed(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The shapes of the same file with experts in MXFP4."""
    found = {}
    for name, shape in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            found |= {f"{name}_blocks": [experts, outputs, inputs // 32, 16]}
            found |= {f"{name}_scales": [experts, outputs, inputs // 32]}
        else:
            found[name] = shape
    return found


def cases() -> dict[str, dict[str, np.ndarray]]:
    """Ragged batches, padded on the right and on the left."""
    rng = np.random.RandomState(0)
    found = {}
    for side in ("right", "left"):
        ids, mask = rng.randint(4, VOCAB, (2, T)), np.zeros((2, T), np.int64)
        for row, length in enumerate(LENGTHS):
            mask[row, slice(0, length) if side == "right" else slice(T - length, T)] = 1
        found[side] = dict(input_ids=ids * mask, attention_mask=mask)
    return found


def version_4(config: dict) -> dict:
    """The same config in the spelling of transformers 4."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")} | dict(torch_dtype="float32")
    if config["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    rope, word = dict(config["rope_parameters"]), "type"
    if "full_attention" in rope:
        if config["model_type"] == "gemma3_text":
            old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope, word = dict(rope["full_attention"]), "rope_type"
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if old["rope_scaling"]:
        rope[word] = rope.pop("rope_type")
    return old


def write(directory: Path, config: dict, arrays: dict[str, np.ndarray]) -> Path:
    """A checkpoint as `save_pretrained` writes it."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def hugging_face(directory: Path):
    """Hugging Face's model of a directory."""
    import transformers

    config = json.loads((directory / "config.json").read_text())
    (architecture,) = config["architectures"]
    # Eager: the other implementations have no soft caps.
    options: dict = dict(attn_implementation="eager")
    if "quantization_config" in config:
        options |= dict(quantization_config=transformers.Mxfp4Config(dequantize=True))
    return getattr(transformers, architecture).from_pretrained(directory, **options).eval()


def arguments(model, case: dict[str, np.ndarray]) -> dict:
    """The arguments of a call. A Ministral 3 reads positions, which a call counts from the row's padding on."""
    import torch

    given = {k: torch.from_numpy(v) for k, v in case.items()}
    if model.config.get_text_config().model_type == "ministral3":  # as Hugging Face's `generate` counts them
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return given


def run(model, case: dict[str, np.ndarray]) -> np.ndarray:
    """The logits [tokens, vocab_size] of all tokens that are not padding."""
    import torch

    with torch.no_grad():
        logits = model(**arguments(model, case), use_cache=False).logits.numpy()
    return logits[case["attention_mask"].astype(bool)]


def hidden_states(model, case: dict[str, np.ndarray]) -> np.ndarray:
    """The body's output [tokens, hidden_size] for all tokens that are not padding: after the last norm."""
    import torch

    with torch.no_grad():
        output = model.base_model(**arguments(model, case), use_cache=False)
    return output.last_hidden_state.numpy()[case["attention_mask"].astype(bool)]


def prompts() -> list[np.ndarray]:
    """The rows of a batch without their padding."""
    case = cases()["right"]
    return [row[mask.astype(bool)] for row, mask in zip(case["input_ids"], case["attention_mask"], strict=True)]


def answer(model, prompt: np.ndarray) -> np.ndarray:
    """The most likely `NEW` tokens after a prompt, each by a full pass at the final length.

    So frequencies that depend on the length are the same for all tokens. Each token must win by more than rounding.
    """
    ids = np.concatenate([prompt, np.zeros(NEW, prompt.dtype)])
    for at in range(len(prompt), len(ids)):
        logits = run(model, dict(input_ids=ids[None], attention_mask=np.ones((1, len(ids)), np.int64)))[at - 1]
        second, best = np.sort(logits)[-2:]
        assert best - second > 1e-4 * np.abs(logits).max(), (best, second)
        ids[at] = np.argmax(logits)
    return ids[len(prompt) :]


def cached_answer(model, prompt: np.ndarray) -> np.ndarray:
    """The answers of Hugging Face's `generate`."""
    import torch

    ids = torch.from_numpy(prompt[None])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    return found[0, len(prompt) :].numpy()


def gradients(model, case: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradient of the loss below, by name in a file: its inner product with the weights, and its norm."""
    import torch

    logits = model(**arguments(model, case), use_cache=False).logits
    (logits * torch.from_numpy(cotangent(case))).sum().backward()
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: part for stack, grad in found.items() for name, part in experts_of(stack, grad).items()}
    return {name: summary(found[name], arrays[name]) for name in arrays if name in found}


def experts_of(name: str, stack: np.ndarray) -> dict[str, np.ndarray]:
    """The parts of a parameter with all experts of a layer, under the names of the experts' tensors in a file."""
    layer, _, matrix = name.partition(".mlp.experts.")
    parts: dict[str, np.ndarray] = {}
    if matrix == "down_proj":
        parts = dict(w2=stack, down_proj=stack)
    if matrix == "gate_up_proj":
        gate, up = np.split(stack, 2, axis=1)
        parts = dict(w1=gate, w3=up, gate_proj=gate, up_proj=up)
    found = {}
    for part, grads in parts.items():
        block = "block_sparse_moe" if part.startswith("w") else "mlp"
        found |= {f"{layer}.{block}.experts.{number}.{part}.weight": grad for number, grad in enumerate(grads)}
    renamed = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    return found | {renamed: stack}


def cotangent(case: dict[str, np.ndarray]) -> np.ndarray:
    """The cotangent of the logits: the loss is their inner product with it."""
    draw = np.random.RandomState(7).standard_normal((*case["input_ids"].shape, VOCAB))
    return (draw * case["attention_mask"][..., None]).astype(np.float32)


def summary(gradient: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Two numbers instead of an array: its component along a direction, and its norm."""
    direction = np.random.RandomState(11).standard_normal(weight.shape)
    gradient = gradient.astype(np.float64)
    return np.array([np.sum(gradient * direction), np.linalg.norm(gradient)])
