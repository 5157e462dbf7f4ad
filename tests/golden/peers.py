"""Tiny Hugging Face models and the inputs on which we compare with them. Needs torch and transformers to run them."""

import dataclasses
from collections.abc import Iterator

import numpy as np

# Weights are wide: with the usual 0.02, attention is nearly uniform, and a wrong mask is hidden by rounding.
STD = 0.4
PRE_NORM_STD = 0.3  # at 0.4, seven layers without norms after them amplify rounding to 2e-5
PAD = {"bert": 0, "roberta": 1, "longformer": 1, "big_bird": 0, "modernbert": 0, "modernbert_biased": 0,
       "eurobert": 0, "eurobert_biased": 0, "nomic_bert": 0, "gte": 1, "jina_embeddings_v3": 1,
       "embedding_gemma": 0}  # fmt: skip
SEP = 4
TINY = dict(
    vocab_size=23, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=20,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=71, type_vocab_size=2,
    sep_token_id=SEP,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
CONFIGS = {
    "bert": dict(hidden_act="gelu"),
    "roberta": dict(hidden_act="gelu_new", layer_norm_eps=1e-5),
    "longformer": dict(attention_window=[4, 8], layer_norm_eps=1e-5),
    "big_bird": dict(block_size=4, num_random_blocks=2, rescale_embeddings=True),
    "modernbert": dict(num_hidden_layers=7, intermediate_size=6, local_attention=6),
    # Every switch: biases, the other activations, an odd window, YaRN for one kind of layer, irregular layers.
    "modernbert_biased": dict(
        num_hidden_layers=4, intermediate_size=6, local_attention=5, attention_bias=True, mlp_bias=True, norm_bias=True,
        classifier_bias=True, decoder_bias=False, hidden_activation="silu", classifier_activation="tanh",
        classifier_pooling="mean", layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2],
        rope_parameters=dict(
            full_attention=dict(YARN, rope_theta=300.0),
            sliding_attention=dict(rope_type="default", rope_theta=50.0),
        ),
    ),
    "eurobert": dict(num_hidden_layers=2, num_key_value_heads=1, rope_parameters=dict(rope_theta=50.0)),
    "eurobert_biased": dict(
        num_hidden_layers=2, attention_bias=True, mlp_bias=True, classifier_pooling="mean", hidden_act="gelu",
        tie_word_embeddings=True, rope_scaling=dict(YARN), rope_theta=300.0,
    ),
    "nomic_bert": dict(hidden_act="silu", rope_parameters=dict(rope_theta=50.0)),
    "gte": dict(type_vocab_size=0, hidden_act="gelu_new", rope_scaling=dict(YARN), rope_theta=300.0),
    "jina_embeddings_v3": dict(hidden_act="silu", layer_norm_eps=1e-5, rope_parameters=dict(rope_theta=50.0)),
    # An odd window, whose half is 3; heads of another size than hidden_size / num_attention_heads.
    "embedding_gemma": dict(
        use_bidirectional_attention=True, num_hidden_layers=3, num_key_value_heads=1, head_dim=6, intermediate_size=7,
        query_pre_attn_scalar=5, sliding_window=7, sliding_window_pattern=2,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=300.0, factor=3.0),
            sliding_attention=dict(rope_type="default", rope_theta=50.0),
        ),
    ),
}  # fmt: skip
KINDS = {"bert": "Bert", "roberta": "Roberta", "longformer": "Longformer", "big_bird": "BigBird",
         "modernbert": "ModernBert", "modernbert_biased": "ModernBert", "eurobert": "EuroBert",
         "eurobert_biased": "EuroBert", "nomic_bert": "NomicBert", "gte": "Gte",
         "jina_embeddings_v3": "JinaEmbeddingsV3", "embedding_gemma": "Gemma3Text"}  # fmt: skip
# Families that rotate queries and keys: their outputs at padding are meaningless, and are not compared.
PRE_NORM = ("modernbert", "modernbert_biased", "eurobert", "eurobert_biased", "embedding_gemma")
ROTARY = (*PRE_NORM, "nomic_bert", "gte", "jina_embeddings_v3")
RENAMED = ("nomic_bert", "gte", "jina_embeddings_v3")  # families whose files have other names than their modules
# Keys of `TINY` that a family's config does not have.
NO_TYPES = ("type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob")
NOT_IN: dict[str, tuple[str, ...]] = {**dict.fromkeys(PRE_NORM, NO_TYPES), "gte": ("type_vocab_size",)}
# The length at which the random blocks are drawn from the first 1024 tokens, and may repeat the last block.
LEGACY = dict(block_size=64, num_random_blocks=3, hidden_size=4, num_attention_heads=2, intermediate_size=6,
              vocab_size=7, max_position_embeddings=1536)  # fmt: skip
TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
LABELS = {"ForSequenceClassification": 3, "ForTokenClassification": 5}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a model: its inputs by name, and the mode of Hugging Face's model."""

    name: str
    inputs: dict[str, np.ndarray]
    training: bool = False  # BigBird draws random blocks only in training mode
    full: bool = False  # BigBird: attention_type="original_full"


def names() -> list[str]:
    """All golden models: a family and a task, and BigBird at 1024 tokens."""
    return [f"{family}{task}" for family in CONFIGS for task in tasks_of(family)] + ["big_bird1024"]


def tasks_of(family: str) -> tuple[str, ...]:
    counts = {"modernbert_biased": 3, "eurobert": 4, "eurobert_biased": 3, "nomic_bert": 4, "gte": 4}
    counts |= {"embedding_gemma": 1}
    return TASKS[: counts.get(family, 5)]


def family_and_task(name: str) -> tuple[str, str]:
    family = max((f for f in CONFIGS if name.startswith(f)), key=len)
    task = name.removeprefix(family)
    return family, task if task in TASKS else "Model"


def make_model(name: str):
    import torch
    import transformers

    family, task = family_and_task(name)
    kind = KINDS[family]
    tiny = {key: value for key, value in TINY.items() if key not in NOT_IN.get(family, ())}
    numbers = {**tiny, **CONFIGS[family], **(LEGACY if name.endswith("1024") else {})}
    if family in ROTARY and task != "Model":  # heads need no deep encoder
        numbers["num_hidden_layers"] = 2
        if "layer_types" in numbers:
            numbers["layer_types"] = numbers["layer_types"][:2]
    config = getattr(transformers, kind + "Config")(**numbers, pad_token_id=PAD[family], num_labels=LABELS.get(task, 2))
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, kind + task)(config)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.normal_(0.0, PRE_NORM_STD if family in PRE_NORM else STD)
            if "norm" in key.lower() and key.endswith("weight") and family != "embedding_gemma":  # its norms add 1
                p.add_(1.0)
    return model.eval()


def cases(name: str) -> Iterator[Case]:
    family, task = family_and_task(name)
    rng = np.random.default_rng(sum(map(ord, name)))
    if name.endswith("1024"):
        ids = rng.integers(1, LEGACY["vocab_size"], (1, 1024))
        mask = np.ones_like(ids)
        mask[:, 1010:] = 0
        yield Case("trained", dict(input_ids=ids, attention_mask=mask), training=True)
    elif task != "Model":
        yield from _task_cases(family, task, rng)
    else:
        yield from _padding_cases(family, rng)
        yield from {"longformer": _global_cases, "big_bird": _block_cases}.get(family, _nothing)(rng)


def _padding_cases(family: str, rng) -> Iterator[Case]:
    lengths = {"big_bird": (37, 13), "modernbert": (37,), "modernbert_biased": (37,), "embedding_gemma": (23,)}
    for T in lengths.get(family, (13,)):
        ids = _ids(family, rng, 3, T)
        mask = np.ones((3, T), np.int64)
        yield Case(f"plain{T}", dict(input_ids=ids))
        kinds = ("right", "left", "holes") if family in ROTARY else ("right", "left", "holes", "empty_row")
        for kind in kinds:
            padded, m = ids.copy(), mask.copy()
            if kind == "right":
                m[1, T - 5 :], m[2, 3:] = 0, 0
            elif kind == "left":
                m[1, :4], m[2, : T - 2] = 0, 0
            elif kind == "holes":
                m = (rng.random((3, T)) < 0.6).astype(np.int64)
                m[:, 2] = 1
            else:
                m[1] = 0
            if kind != "holes":
                padded[m == 0] = PAD[family]
            yield Case(f"{kind}{T}", dict(input_ids=padded, attention_mask=m))
    ids = _ids(family, rng, 3, 13)
    if "type_vocab_size" not in NOT_IN.get(family, ()):
        yield Case("token_types", dict(input_ids=ids, token_type_ids=rng.integers(0, 2, ids.shape)))
    yield Case("positions", dict(input_ids=ids, position_ids=rng.integers(2, 60, ids.shape)))
    if family in ROTARY and not family.startswith("modernbert"):
        return
    embeds = rng.normal(size=(3, 13, TINY["hidden_size"])).astype(np.float32)
    yield Case("embeds", dict(inputs_embeds=embeds, attention_mask=(ids % 4 != 0).astype(np.int64)))
    yield Case("one_token", dict(input_ids=_ids(family, rng, 2, 1)))


def _global_cases(rng) -> Iterator[Case]:
    for T in (3, 31):
        ids, first, last = _ids("longformer", rng, 2, T), np.zeros((2, T), np.int64), np.zeros((2, T), np.int64)
        first[:, 0], last[:, -1] = 1, 1
        yield Case(f"global_none{T}", dict(input_ids=ids, global_attention_mask=np.zeros_like(ids)))
        yield Case(f"global_first{T}", dict(input_ids=ids, global_attention_mask=first))
        yield Case(f"global_late{T}", dict(input_ids=ids, global_attention_mask=last))
        yield Case(f"global_all{T}", dict(input_ids=ids, global_attention_mask=np.ones_like(ids)))
    ids, mask = _ids("longformer", rng, 3, 32), (rng.random((3, 32)) < 0.7).astype(np.int64)
    some = (rng.random((3, 32)) < 0.3).astype(np.int64)
    some[1] = 0
    yield Case("global_mixed", dict(input_ids=ids, attention_mask=mask, global_attention_mask=some))


def _block_cases(rng) -> Iterator[Case]:
    for T in (37, 40, 64):
        ids = _ids("big_bird", rng, 2, T)
        mask = np.ones_like(ids)
        mask[1, T - 7 :] = 0
        yield Case(f"trained{T}", dict(input_ids=ids, attention_mask=mask), training=True)
    ids = _ids("big_bird", rng, 2, 37)
    yield Case("holes_trained", dict(input_ids=ids, attention_mask=(ids % 3 != 0).astype(np.int64)), training=True)
    yield Case("last_fallback", dict(input_ids=_ids("big_bird", rng, 2, 36)), training=True)
    yield Case("full37", dict(input_ids=ids, attention_mask=(ids % 3 != 0).astype(np.int64)), full=True)


def _task_cases(family: str, task: str, rng) -> Iterator[Case]:
    T = 42 if family == "big_bird" else 17
    ids = _ids(family, rng, 2, T)
    mask = np.ones_like(ids)
    mask[1, T - 3 :], ids[1, T - 3 :] = 0, PAD[family]
    if task == "ForQuestionAnswering":
        # Three separators: question, separator, separator, text, separator.
        ids[0, [5, 6, T - 1]], ids[1, [3, 4, T - 4]] = SEP, SEP
    yield Case("task", dict(input_ids=ids, attention_mask=mask), training=family == "big_bird")
    if family == "modernbert_biased" and task == "ForSequenceClassification":
        yield Case("left", dict(input_ids=ids[:, ::-1].copy(), attention_mask=mask[:, ::-1].copy()))


def _nothing(rng) -> Iterator[Case]:
    yield from ()


def _ids(family: str, rng, B: int, T: int) -> np.ndarray:
    return rng.integers(SEP + 1, TINY["vocab_size"], (B, T))


def run(model, case: Case, gradients: bool) -> dict[str, np.ndarray]:
    """A model's outputs as `output.x`; the cotangents of a random loss as `cotangent.x`, its gradients as `grad.x`."""
    import torch

    model.train(case.training)
    body = getattr(model, model.base_model_prefix, model)
    if hasattr(body, "set_attention_type"):
        # Set again for each call: a short input switches the model to full attention permanently.
        body.set_attention_type("original_full" if case.full else "block_sparse")
    outputs = model(**{k: torch.from_numpy(v) for k, v in case.inputs.items()})
    found = {k: v for k, v in outputs.items() if k in FIELDS}
    arrays = {f"output.{k}": v.detach().numpy() for k, v in found.items()}
    if gradients:
        generator = torch.Generator().manual_seed(7)
        cotangents = {k: torch.randn(v.shape, generator=generator) for k, v in found.items()}
        valid = case.inputs.get("attention_mask")
        family = next(f for f in sorted(KINDS, key=len) if type(model).__name__.startswith(KINDS[f]))
        if family in ROTARY and valid is not None:
            for key, c in cotangents.items():
                if c.shape[:2] == valid.shape:
                    c[torch.from_numpy(valid == 0)] = 0
                elif key == "pooler_output":
                    c[torch.from_numpy(valid[:, 0] == 0)] = 0
        model.zero_grad()
        sum((found[k] * c).sum() for k, c in cotangents.items()).backward()
        arrays |= {f"cotangent.{k}": c.numpy() for k, c in cotangents.items()}
        if family in RENAMED:
            arrays |= _gradients_by_file_names(model)
        else:
            arrays |= {f"grad.{k}": p.grad.numpy().copy() for k, p in model.named_parameters() if p.grad is not None}
    return arrays


def _gradients_by_file_names(model) -> dict[str, np.ndarray]:
    """The gradients of a model whose parameters have other names, and other shapes, in its files."""
    import copy
    import tempfile

    import torch
    from safetensors.numpy import load_file

    bearer = copy.deepcopy(model)
    with torch.no_grad():
        for ours, theirs in zip(bearer.parameters(), model.parameters(), strict=True):
            ours.copy_(torch.zeros_like(ours) if theirs.grad is None else theirs.grad)
    with tempfile.TemporaryDirectory() as directory:
        bearer.save_pretrained(directory)
        return {f"grad.{key}": value for key, value in load_file(f"{directory}/model.safetensors").items()}


# Spellings of rotary parameters, windows and layers in a `config.json`, which versions 4 and 5 write differently.
LINEAR = dict(type="linear", factor=2.0)
ONE_SET: list[dict] = [
    {},
    dict(rope_theta=77.0),
    dict(rope_scaling=LINEAR, rope_theta=77.0),
    dict(rope_scaling=YARN),
    dict(rope_scaling=None, rope_parameters=dict(rope_theta=3.0), rope_theta=9.0),
    dict(rope_parameters=dict(YARN, attention_factor=1.5, rope_theta=9.0)),
    dict(rope_parameters=dict(rope_type="yarn", factor=2.0)),
]
SPELLINGS: dict[str, list[dict]] = {
    "modernbert": [
        {},
        dict(global_rope_theta=500.0, local_rope_theta=70.0, global_attn_every_n_layers=2, local_attention=9),
        dict(global_rope_theta=500.0, rope_theta=3.0, sliding_window=5, local_attention=128, hidden_act="relu"),
        dict(rope_scaling=YARN, local_rope_theta=70.0),
        dict(rope_scaling=dict(rope_type="linear", factor=3.0), global_rope_theta=500.0),
        dict(rope_scaling={}, rope_parameters=None, layer_types=None, global_attn_every_n_layers=1),
        dict(rope_parameters=dict(full_attention=dict(YARN, rope_theta=300.0)), local_rope_theta=70.0),
        dict(rope_parameters=dict(sliding_attention=dict(YARN, attention_factor=1.5)), global_rope_theta=500.0),
        dict(rope_parameters=dict(full_attention=dict(type="linear", factor=2.0)), layer_types=["full_attention"] * 6),
        dict(rope_parameters=dict(full_attention=dict(rope_type="yarn", factor=2.0, beta_fast=8, beta_slow=2))),
        dict(local_attention=1, layer_types=["sliding_attention"] * 5 + ["full_attention"]),
    ],
    "eurobert": ONE_SET,
    "nomic_bert": ONE_SET,
    "gte": ONE_SET[:3],
    "jina_embeddings_v3": ONE_SET[:3],
    "embedding_gemma": [
        {},
        dict(rope_theta=500.0, rope_local_base_freq=70.0, sliding_window_pattern=2, sliding_window=10),
        dict(rope_scaling=dict(rope_type="linear", factor=3.0), sliding_window=257),
        dict(rope_scaling=YARN, rope_theta=500.0, sliding_window=1),
        dict(rope_parameters=dict(full_attention=dict(YARN, rope_theta=300.0)), sliding_window=0),
        dict(rope_parameters=dict(sliding_attention=dict(rope_theta=70.0)), layer_types=["full_attention"] * 6),
    ],
}
# The keys of a family whose name is not its `model_type`.
SELECTED = {
    "embedding_gemma": dict(
        model_type="gemma3_text", use_bidirectional_attention=True, num_key_value_heads=1, head_dim=6
    ),
}


def written(family: str, raw: dict) -> dict:
    """A `config.json` of a family with these keys."""
    return {"model_type": family, **SELECTED.get(family, {}), **SPELLED, **raw}


SPELLED = dict(hidden_size=24, num_attention_heads=2, num_hidden_layers=6, intermediate_size=8, vocab_size=23,
               max_position_embeddings=64, pad_token_id=0)  # fmt: skip


def spelled(family: str, raw: dict) -> dict:
    """Hugging Face's frequencies and window by kind of layer, and the kinds, for a `config.json` with these keys."""
    import copy

    import transformers

    keys = {key: value for key, value in written(family, raw).items() if key != "model_type"}
    config = getattr(transformers, KINDS[family] + "Config")(**copy.deepcopy(keys))
    module = getattr(transformers, KINDS[family] + "Model")(config).rotary_emb
    if not hasattr(config, "layer_types"):
        kinds, only = (
            ["full_attention"] * config.num_hidden_layers,
            [module.inv_freq.tolist(), module.attention_scaling],
        )
        return {"kinds": kinds, "window": None, "full_attention": only}
    window = config.sliding_window - 1 if family == "embedding_gemma" else config.local_attention // 2
    found: dict = {"kinds": config.layer_types, "window": window}
    for kind in dict.fromkeys(config.layer_types):
        frequencies = getattr(module, f"{kind}_inv_freq").tolist()
        found[kind] = [frequencies, float(getattr(module, f"{kind}_attention_scaling"))]
    return found


FIELDS = ("last_hidden_state", "pooler_output", "logits", "start_logits", "end_logits")
# In each encoder, the case whose gradients are compared too; with a head, the only case.
GRADIENTS = {"bert": "holes13", "roberta": "left13", "longformer": "global_mixed", "big_bird": "holes_trained",
             "modernbert": "left37", "modernbert_biased": "holes37", "eurobert": "left13", "eurobert_biased": "holes13",
             "nomic_bert": "left13", "gte": "holes13", "jina_embeddings_v3": "left13",
             "embedding_gemma": "left23"}  # fmt: skip


def has_gradients(name: str, case: Case) -> bool:
    family, task = family_and_task(name)
    if (
        family in ROTARY
    ):  # small files: the layers of the other heads have gradients in the files of ModernBERT and BERT
        tasks = ("Model", "ForSequenceClassification", *(["ForMaskedLM"] if family.startswith("modernbert") else []))
        return case.name in (GRADIENTS[family], "task") and task in tasks
    return task != "Model" or case.name in (GRADIENTS[family], "empty_row13", "empty_row37")
