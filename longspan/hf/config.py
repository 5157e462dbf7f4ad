"""`config.json` ⇄ our configs."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.models import BertConfig, BigBirdConfig, LongformerConfig
from longspan.models.config import CONFIGS

# Where a `config.json` leaves a number out, it means Hugging Face's default, which is not always the base model's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": dict(max_position_embeddings=512, type_vocab_size=2, layer_norm_eps=1e-12),
    "longformer": dict(
        vocab_size=30522, max_position_embeddings=512, type_vocab_size=2, layer_norm_eps=1e-12, attention_window=512
    ),
    "big_bird": {},
}
# Ours alone, or spelled differently there.
_NOT_IN_JSON = {"extra", "num_labels", "window", "random_blocks"}


def read_config(directory: Path, **changes) -> tuple[BertConfig, list[str]]:
    """The config in a directory, and the names of the model classes it was saved from."""
    raw = json.loads((directory / "config.json").read_text("utf-8"))
    return from_json(raw, where=f"{directory / 'config.json'}", **changes), list(raw.get("architectures") or [])


def from_json(raw: Mapping[str, Any], *, where: str = "config.json", **changes) -> BertConfig:
    """The config that the content of a `config.json` describes."""
    family = raw.get("model_type")
    if family not in CONFIGS:
        raise ValueError(f"{where} has model_type={family!r}. Longspan knows {', '.join(map(repr, sorted(CONFIGS)))}.")
    _refuse_decoders(raw, where)
    kind = CONFIGS[family]
    fields = {f.name for f in dataclasses.fields(kind)} - _NOT_IN_JSON
    known = {**_DEFAULTS[family], **raw}
    values = {name: known[name] for name in fields if known.get(name) is not None}
    values["num_labels"] = len(raw["id2label"]) if raw.get("id2label") else raw.get("num_labels") or 2
    if kind is LongformerConfig:
        values["window"] = _one_sided(known["attention_window"], where)
    unread = fields | {"model_type", "architectures", "attention_window", "num_labels"}
    values["extra"] = json.dumps({k: v for k, v in raw.items() if k not in unread})
    if kind is not BigBirdConfig:
        changes.pop("random_blocks", None)
    return kind(**{**values, **changes})


def to_json(config: BertConfig, architecture: str) -> dict[str, Any]:
    """The content of a `config.json`, with what another one held besides."""
    raw = json.loads(config.extra)
    fields = {f.name for f in dataclasses.fields(config)} - _NOT_IN_JSON
    raw |= dict(model_type=config.model_type, architectures=[architecture])
    raw |= {name: getattr(config, name) for name in sorted(fields)}
    if isinstance(config, LongformerConfig):
        if min(config.windows) < 1:
            raise ValueError(
                f"window={config.window!r}: Hugging Face's `attention_window` cannot be 0. Save a model whose windows "
                "are at least 1."
            )
        raw["attention_window"] = [2 * w for w in config.windows]
    if len(raw.get("id2label") or "12") != config.num_labels:
        raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
        raw["label2id"] = {f"LABEL_{i}": i for i in range(config.num_labels)}
    return raw


def _one_sided(attention_window: int | list[int], where: str) -> int | tuple[int, ...]:
    """Hugging Face counts the keys of a window on both sides."""
    windows = [attention_window] if isinstance(attention_window, int) else attention_window
    if any(w % 2 for w in windows):
        raise ValueError(f"{where} has attention_window={attention_window!r}, which must be even: half on each side.")
    return windows[0] // 2 if isinstance(attention_window, int) else tuple(w // 2 for w in windows)


def _refuse_decoders(raw: Mapping[str, Any], where: str) -> None:
    for name in ("is_decoder", "add_cross_attention"):
        if raw.get(name):
            raise ValueError(f"{where} has {name}=true. Longspan has encoders only: set it to false if it is one.")
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ValueError(f"{where} has position_embedding_type={kind!r}. Longspan knows 'absolute' only.")
