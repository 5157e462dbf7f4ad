"""`config.json` ⇄ our configs."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from longspan.models.families import FAMILIES
from longspan.models.family import Family

# What a larger model's config says of all of its parts.
OF_ALL_PARTS = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")
# What `load` takes as arguments of its own.
ARGUMENTS = ("dtype", "num_labels", "param_dtype", "random_blocks", "task")


class Content(NamedTuple):
    """What a `config.json` says of one model, before a config is made of it."""

    raw: Mapping[str, Any]  # its own part of the file
    family: Family
    where: str  # the file, and what `load` changed of it, for messages
    architectures: list[str]  # the names of the model classes it was saved from

    @property
    def complete(self) -> dict[str, Any]:
        """The content with what Hugging Face means by keys that a file leaves out."""
        return {**self.family.defaults, **self.raw}


def read_content(directory: Path, overrides: Mapping[str, Any] | None = None) -> Content:
    """The content of the `config.json` in a directory, with some keys overridden."""
    path = directory / "config.json"
    content = _content(read_object(path), str(path))
    return content if not overrides else _overridden(content, overrides)


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
    return config_of(_content(raw, where), **changes)


def config_of(content: Content, **changes) -> Any:
    """The config of a content, with the changes that mean something to its family."""
    raw, family, where, _ = content
    complete = content.complete
    fields = _shared_fields(family.config)
    _refuse_nulls(raw, family.config, where)
    values = {field: complete[field] for field in fields if complete.get(field) is not None}
    values |= family.read(complete, where)
    if has_labels(family.config):
        values["num_labels"] = number_of_labels(raw, where)
    read = fields | {"model_type", "architectures", "num_labels", *family.spelled_otherwise}
    values["extra"] = json.dumps({k: v for k, v in raw.items() if k not in read})
    try:
        config = family.config(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} makes no {family.model_type} model: {error}") from error
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


def has_labels(config: type[Any]) -> bool:
    """Whether models of this config may have a head with labels."""
    return any(f.name == "num_labels" for f in dataclasses.fields(config))


def number_of_labels(raw: Mapping[str, Any], where: str) -> Any:
    """The labels of a head, by their names, or else by their number."""
    labels = raw.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise ValueError(f"{where} has id2label={labels!r:.200}, which must be an object from numbers to labels.")
    count = raw.get("num_labels")
    return len(labels) if labels else 2 if count is None else count


def _content(raw: Mapping[str, Any], where: str) -> Content:
    names: Any = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{where} has architectures={names!r:.200}, which must be a list of names.")
    own, family = _own_part(raw, where)
    return Content(own, family, where, names or [])


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
    raise ValueError(
        f"{where} has model_type={name!r:.200}. Longspan knows {', '.join(map(repr, known))}. Load a checkpoint of one "
        "of these. If this checkpoint has the layers and the tensor names of one of them, set `model_type` to it in "
        'config.json; CONTRIBUTING.md, "Adding a model family", says how another one is added.'
    )


def _overridden(content: Content, overrides: Mapping[str, Any]) -> Content:
    """The content with keys that a caller of `load` gave, as if the file had them."""
    family = content.family
    known = _shared_fields(family.config) | set(family.spelled_otherwise)
    unknown = [key for key in overrides if key not in known]
    if unknown:
        own = [key for key in unknown if key in ARGUMENTS]
        hint = f" `{own[0]}` is an argument of `hf.load` itself." if own else ""
        raise ValueError(
            f"`config` has {', '.join(map(repr, unknown))}, which a {family.model_type} does not read from config.json."
            f"{hint} It reads {', '.join(sorted(known))}."
        )
    where = f"{content.where} with config={dict(overrides)!r:.200}"
    return content._replace(raw=family.override(content.raw, overrides, where), where=where)


def _shared_fields(config: type[Any]) -> set[str]:
    """The fields that a `config.json` has under the same names."""
    return {f.name for f in dataclasses.fields(config) if f.metadata.get("in_json", True)}


def _refuse_nulls(raw: Mapping[str, Any], config: type[Any], where: str) -> None:
    """Raises for a null where Hugging Face has no meaning for it."""
    for f in dataclasses.fields(config):
        nullable = f.metadata.get("null", False) or type(None) in get_args(f.type)
        if f.name in raw and raw[f.name] is None and f.metadata.get("in_json", True) and not nullable:
            raise ValueError(
                f"{where} has {f.name}=null, which means nothing in a {config.model_type}. Give a value, or leave the "
                "key out: that means Hugging Face's default."
            )
