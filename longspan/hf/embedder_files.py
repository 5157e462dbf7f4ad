"""The files that `save` writes with the model of an `Embedder`, for sentence-transformers and for `load_embedder`."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from longspan.hf.sentence_modules import ACTIVATIONS, LIST, MODE, OLD_MODES, SETTINGS, TRANSFORMER_CONFIG
from longspan.hf.tokenizer_files import TOKENIZER_FILES, checked_tokenizer, has_tokenizer, tokenizer_content
from longspan.models import DenseLayer, Embedder, Normalize, Pooling

TYPE = "sentence_transformers.models."  # of the modules, in the spelling that all releases read


def module_files(embedder: Embedder) -> dict[str, bytes | None]:
    """`modules.json`, and the configs and weights of the modules."""
    entries: list[dict[str, Any]] = [dict(idx=0, name="0", path="", type=f"{TYPE}Transformer")]
    files: dict[str, bytes | None] = {}
    for number, module in enumerate(embedder.modules, start=1):
        kind = {Pooling: "Pooling", DenseLayer: "Dense", Normalize: "Normalize"}[type(module)]
        folder = f"{number}_{kind}"
        entries.append(dict(idx=number, name=str(number), path=folder, type=TYPE + kind))
        if isinstance(module, Pooling):
            files[f"{folder}/config.json"] = _json(_pooling(module))
        elif isinstance(module, DenseLayer):
            files[f"{folder}/config.json"] = _json(_dense(module))
            files[f"{folder}/model.safetensors"] = _weights(module)
        else:
            files[f"{folder}/config.json"] = _json({})
    settings: dict[str, Any] = dict(
        model_type="SentenceTransformer",
        prompts=embedder.prompts,
        default_prompt_name=embedder.default_prompt_name,
        similarity_fn_name=embedder.similarity_fn_name,
    )
    if embedder.truncate_dim is not None:
        settings["truncate_dim"] = embedder.truncate_dim
    text = dict(max_seq_length=embedder.max_seq_length, do_lower_case=embedder.do_lower_case)
    return {LIST: _json(entries), SETTINGS: _json(settings), TRANSFORMER_CONFIG: _json(text), **files}


def tokenizer_files(embedder: Embedder, where: Path, tokenizer: str | os.PathLike | None) -> dict[str, bytes | None]:
    """The files of the tokenizer: those of `tokenizer`, of the loaded directory, or of the embedder's object."""
    if tokenizer is None and embedder.source is not None and has_tokenizer(Path(embedder.source)):
        tokenizer = embedder.source
    # All files of another tokenizer go: a mixture of two would be a wrong one.
    old: dict[str, bytes | None] = {name: None for name in TOKENIZER_FILES if (where / name).is_file()}
    if tokenizer is not None:
        return old | tokenizer_content(checked_tokenizer(Path(tokenizer)))
    plain = copy.deepcopy(embedder.tokenizer)
    plain.no_truncation()
    config: dict[str, Any] = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=embedder.max_seq_length,
        truncation_side=embedder.truncation_side,
        pad_token=_pad_token(embedder),
    )
    return old | {"tokenizer.json": plain.to_str(pretty=True).encode(), "tokenizer_config.json": _json(config)}


def _pad_token(embedder: Embedder) -> str:
    """A token to pad batches with. Any token will do, because it is masked."""
    token = embedder.tokenizer.id_to_token(max(0, getattr(embedder.model.config, "pad_token_id", None) or 0))
    if token is None:
        token = next(iter(embedder.tokenizer.get_vocab()))
    return token


def _pooling(module: Pooling) -> dict[str, Any]:
    content: dict[str, Any] = dict(include_prompt=module.include_prompt)
    ordered = tuple(mode for mode in OLD_MODES.values() if mode in module.modes)
    if ordered != module.modes:  # the older keys have no order
        return content | dict(embedding_dimension=module.size, pooling_mode=list(module.modes))
    flags = {MODE + key: mode in module.modes for key, mode in OLD_MODES.items()}
    return content | dict(word_embedding_dimension=module.size, **flags)


def _dense(module: DenseLayer) -> dict[str, Any]:
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[module.activation]
    content: dict[str, Any] = dict(in_features=module.size, out_features=module.out_size)
    content |= dict(bias=module.bias is not None, activation_function=activation)
    if module.adds_input or module.residual is not None:
        content["use_residual"] = True
    return content


def _weights(module: DenseLayer) -> bytes:
    from safetensors.numpy import save

    tensors = {"linear.weight": np.asarray(module.kernel, np.float32).T}
    if module.bias is not None:
        tensors["linear.bias"] = np.asarray(module.bias, np.float32)
    if module.residual is not None:
        tensors["residual.weight"] = np.asarray(module.residual, np.float32).T
    return save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, metadata={"format": "pt"})


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
