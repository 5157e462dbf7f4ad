"""`config.json` ⇄ our configs."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.models._family import Family
from longspan.models.families import FAMILIES

# What a larger model's config says of all of its parts.
OF_ALL_PARTS = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")


def read_config(directory: Path, **changes) -> tuple[Any, list[str]]:
    """The config in a directory, and the names of the model classes it was saved from."""
    path = directory / "config.json"
    raw = read_object(path)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{path} has architectures={architectures!r}, which must be a list of names.")
    return from_json(raw, where=str(path), **changes), architectures


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise ValueError(f"{path} is not JSON ({error}). Download or save it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, {{...}}, but holds a {type(content).__name__}.")
    return content


def from_json(raw: Mapping[str, Any], *, where: str = "config.json", **changes) -> Any:
    """The config that the content of a `config.json` describes, with the changes that mean something to its family."""
    raw, family = _own_part(raw, where)
    name = family.model_type
    content = {**family.defaults, **raw}
    fields = _shared_fields(family.config)
    values = {field: content[field] for field in fields if content.get(field) is not None}
    values |= family.read(content, where)
    if has_labels(family.config):
        values["num_labels"] = _number_of_labels(raw, where)
    read = fields | {"model_type", "architectures", "num_labels", *family.spelled_otherwise}
    values["extra"] = json.dumps({k: v for k, v in raw.items() if k not in read})
    try:
        config = family.config(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} makes no {name} model: {error}") from error
    ours = {f.name for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if k in ours})


def to_json(config: Any, architecture: str) -> dict[str, Any]:
    """The content of a `config.json`, with what another one held besides."""
    raw = json.loads(config.extra)
    raw |= dict(model_type=config.model_type, architectures=[architecture])
    raw |= {name: getattr(config, name) for name in sorted(_shared_fields(type(config)))}
    raw |= config.family.write(config)
    if has_labels(type(config)) and len(raw.get("id2label") or "12") != config.num_labels:
        raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
        raw["label2id"] = {f"LABEL_{i}": i for i in range(config.num_labels)}
    return raw


def _own_part(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Family]:
    """The family of a `config.json`, and what of it is its own, if it is one of a larger model."""
    name: Any = raw.get("model_type")
    for family in FAMILIES:
        if name == family.model_type:
            return raw, family
        if isinstance(name, str) and name in family.inside:
            inner = raw.get(family.inside[name])
            if not isinstance(inner, dict):
                raise ValueError(f"{where} has {family.inside[name]}={inner!r:.200}, which must be an object.")
            return {**{key: raw[key] for key in OF_ALL_PARTS if key in raw}, **inner}, family
    known = sorted(name for family in FAMILIES for name in (family.model_type, *family.inside))
    raise ValueError(f"{where} has model_type={name!r}. Longspan knows {', '.join(map(repr, known))}.")


def has_labels(config: type[Any]) -> bool:
    """Whether models of this config may have a head with labels."""
    return any(f.name == "num_labels" for f in dataclasses.fields(config))


def _shared_fields(config: type[Any]) -> set[str]:
    """The fields that a `config.json` has under the same names."""
    return {f.name for f in dataclasses.fields(config) if f.metadata.get("in_json", True)}


def _number_of_labels(raw: Mapping[str, Any], where: str) -> Any:
    labels = raw.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise ValueError(f"{where} has id2label={labels!r}, which must be an object from numbers to labels.")
    return len(labels) if labels else raw.get("num_labels") or 2
