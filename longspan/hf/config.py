"""`config.json` ⇄ our configs."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.models.families import FAMILIES


def read_config(directory: Path, **changes) -> tuple[Any, list[str]]:
    """The config in a directory, and the names of the model classes it was saved from."""
    raw = json.loads((directory / "config.json").read_text("utf-8"))
    return from_json(raw, where=f"{directory / 'config.json'}", **changes), list(raw.get("architectures") or [])


def from_json(raw: Mapping[str, Any], *, where: str = "config.json", **changes) -> Any:
    """The config that the content of a `config.json` describes, with the changes that mean something to its family."""
    known = {family.model_type: family for family in FAMILIES}
    name = raw.get("model_type")
    if name not in known:
        raise ValueError(f"{where} has model_type={name!r}. Longspan knows {', '.join(map(repr, sorted(known)))}.")
    family = known[name]
    content = {**family.defaults, **raw}
    fields = _shared_fields(family.config)
    values = {name: content[name] for name in fields if content.get(name) is not None} | family.read(content, where)
    values["num_labels"] = len(raw["id2label"]) if raw.get("id2label") else raw.get("num_labels") or 2
    read = fields | {"model_type", "architectures", "num_labels", *family.spelled_otherwise}
    values["extra"] = json.dumps({k: v for k, v in raw.items() if k not in read})
    ours = {f.name for f in dataclasses.fields(family.config)}
    return family.config(**values | {k: v for k, v in changes.items() if k in ours})


def to_json(config: Any, architecture: str) -> dict[str, Any]:
    """The content of a `config.json`, with what another one held besides."""
    raw = json.loads(config.extra)
    raw |= dict(model_type=config.model_type, architectures=[architecture])
    raw |= {name: getattr(config, name) for name in sorted(_shared_fields(type(config)))}
    raw |= config.family.write(config)
    if len(raw.get("id2label") or "12") != config.num_labels:
        raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
        raw["label2id"] = {f"LABEL_{i}": i for i in range(config.num_labels)}
    return raw


def _shared_fields(config: type[Any]) -> set[str]:
    """The fields that a `config.json` has under the same names."""
    return {f.name for f in dataclasses.fields(config) if f.metadata.get("in_json", True)}
