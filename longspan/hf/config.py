"""`config.json` and our configs: each is made from the other."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from longspan.models.decoders.rope import unknown_rope_keys
from longspan.models.families import FAMILIES, UNSUPPORTED
from longspan.models.family import Family

# Keys of a larger model's config that apply to all its parts.
SHARED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
# Arguments of `load` that are not keys of `config.json`.
LOAD_ARGUMENTS = ("dtype", "num_labels", "param_dtype", "random_blocks", "task")


class ConfigContent(NamedTuple):
    """The content of a `config.json` for one model, before a config is made from it."""

    raw: Mapping[str, Any]  # the model's part of the file
    family: Family
    where: str  # the file and the keys that `load` overrides, for messages
    architectures: list[str]  # the names of the saved model classes

    @property
    def complete(self) -> dict[str, Any]:
        """The content with Hugging Face's defaults for missing keys."""
        return {**self.family.defaults, **self.raw}

    @property
    def is_mxfp4(self) -> bool:
        """Whether weights are in MXFP4, which families refuse unless it can be read."""
        quantization = self.raw.get("quantization_config")
        return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


def read_content(directory: Path, overrides: Mapping[str, Any] | None = None) -> ConfigContent:
    """The content of the `config.json` in a directory, with some keys overridden."""
    path = directory / "config.json"
    content = _content(read_object(path), str(path))
    if not overrides:
        return content
    return _override(content, overrides)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{path} is not JSON ({error}). Download or save it again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must contain a JSON object, {{...}}, but contains a {type(content).__name__}. Download or save it "
            "again."
        )
    return content


def from_json(raw: Mapping[str, Any], *, where: str = "config.json", **changes) -> Any:
    """The config for the content of a `config.json`, with the changes that the family has fields for."""
    return config_of(_content(raw, where), **changes)


def config_of(content: ConfigContent, **changes) -> Any:
    """The config for a content, with the changes that the family has fields for."""
    raw, family, where, _ = content
    complete = content.complete
    fields = _shared_fields(family.config)
    _refuse_nulls(raw, family.config, where)
    values = {field: complete[field] for field in fields if complete.get(field) is not None}
    values |= family.read(complete, where)
    if has_labels(family.config):
        values["num_labels"] = number_of_labels(raw, where)
    known_keys = fields | {"model_type", "architectures", "num_labels", *family.renamed_keys}
    extra = {key: value for key, value in raw.items() if key not in known_keys}
    _refuse_unknown(extra, raw, family, where)
    values["extra"] = json.dumps(extra)
    try:
        config = family.config(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a valid config of a {family.model_type} model: {error}") from error
    ours = {f.name for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if k in ours})


def to_json(config: Any, architecture: str) -> dict[str, Any]:
    """The content of a `config.json`, including the keys in the config's `extra`."""
    raw = json.loads(config.extra)
    raw |= dict(model_type=config.model_type, architectures=[architecture])
    raw |= {name: getattr(config, name) for name in sorted(_shared_fields(type(config)))}
    raw |= config.family.write(config)
    if has_labels(type(config)) and len(raw.get("id2label") or "12") != config.num_labels:
        raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
        raw["label2id"] = {f"LABEL_{i}": i for i in range(config.num_labels)}
    return raw


def has_labels(config: type[Any]) -> bool:
    """Whether models with this config can have a classification head."""
    return any(f.name == "num_labels" for f in dataclasses.fields(config))


def number_of_labels(raw: Mapping[str, Any], where: str) -> Any:
    """The number of labels: of those in `id2label`, otherwise `num_labels`, otherwise 2."""
    labels = raw.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise ValueError(f"{where} has id2label={labels!r:.200}, which must be an object that maps numbers to labels.")
    if labels:
        return len(labels)
    count = raw.get("num_labels")
    if count is None:
        return 2
    return count


def _content(raw: Mapping[str, Any], where: str) -> ConfigContent:
    names: Any = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{where} has architectures={names!r:.200}, which must be a list of names.")
    part, family = _model_part(raw, where)
    return ConfigContent(_respelled(part, family, where), family, where, names or [])


def _respelled(raw: Mapping[str, Any], family: Family, where: str) -> Mapping[str, Any]:
    """The content with Hugging Face's keys for those of another repository."""
    names = {key: family.other_spellings.get(key, key) for key in raw}
    for key, name in names.items():
        if key != name and name in raw:
            raise ValueError(f"{where} has both {key} and {name}, two spellings of one setting. Remove one of them.")
    return {names[key]: value for key, value in raw.items()}


def _model_part(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Family]:
    """The part of a `config.json` that belongs to a model of ours, which may be inside a larger one, and its family."""
    name: Any = raw.get("model_type")
    for family in FAMILIES:
        if family.describes(raw):
            return raw, family
    inside = [family for family in FAMILIES if isinstance(name, str) and name in family.inside]
    if inside:
        return _inner_part(raw, inside, where)
    if isinstance(name, str) and name in UNSUPPORTED:
        raise ValueError(
            f"{where} has model_type={name!r}, which Longspan does not support. It lacks {UNSUPPORTED[name]}. Load a "
            "checkpoint of another type."
        )
    known = sorted({name for family in FAMILIES for name in (family.model_type, *family.inside)})
    raise ValueError(
        f"{where} has model_type={name!r:.200}, but Longspan supports {', '.join(map(repr, known))}. Load a checkpoint "
        "of one of these types. If this checkpoint has the layers and the tensor names of one of these types, set "
        "`model_type` in config.json to the name of that type. CONTRIBUTING.md explains in 'Adding a model family' how "
        "to add another type."
    )


def _inner_part(raw: Mapping[str, Any], families: list[Family], where: str) -> tuple[Mapping[str, Any], Family]:
    """The part of a larger model's `config.json` that belongs to a model of one of these families, and its family."""
    key = families[0].inside[raw["model_type"]]
    inner: Any = raw.get(key)
    if not isinstance(inner, dict):
        raise ValueError(f"{where} has {key}={inner!r:.200}, which must be an object.")
    types = {family.model_type: family for family in families}
    name: Any = inner.get("model_type")
    if name is None:
        name = families[0].model_type
    if not isinstance(name, str) or name not in types:
        raise ValueError(
            f"{where} has {key}.model_type={name!r:.200}, but Longspan supports {', '.join(map(repr, types))} inside "
            f"of a {raw['model_type']}. Load a checkpoint with one of these models."
        )
    shared = {key: raw[key] for key in SHARED_KEYS if key in raw}
    # In Hugging Face the larger model, not its part, decides whether the logits are computed with the embeddings.
    ties = raw.get("tie_word_embeddings", True)
    return {**shared, **inner, "model_type": name, "tie_word_embeddings": ties}, types[name]


def _override(content: ConfigContent, overrides: Mapping[str, Any]) -> ConfigContent:
    """The content with the keys that a caller of `load` overrides."""
    family = content.family
    known = _shared_fields(family.config) | set(family.renamed_keys)
    unknown = [key for key in overrides if key not in known]
    if unknown:
        arguments = [key for key in unknown if key in LOAD_ARGUMENTS]
        hint = f" `{arguments[0]}` is an argument of `hf.load`." if arguments else ""
        raise ValueError(
            f"`config` has {', '.join(map(repr, unknown))}, which a {family.model_type} model does not read from "
            f"config.json.{hint} The model reads {', '.join(sorted(known))}."
        )
    where = f"{content.where} with config={dict(overrides)!r:.200}"
    return content._replace(raw=family.override(content.raw, overrides, where), where=where)


def _shared_fields(config: type[Any]) -> set[str]:
    """The fields that have the same names in a `config.json`."""
    return {f.name for f in dataclasses.fields(config) if f.metadata.get("in_json", True)}


def _refuse_unknown(extra: Mapping[str, Any], raw: Mapping[str, Any], family: Family, where: str) -> None:
    """Raises for keys that may change the model, in families that list all others."""
    if family.ignored_keys is None:
        return
    unknown = sorted(set(extra) - family.ignored_keys) + unknown_rope_keys(raw, family.rope_keys)
    if unknown:
        raise ValueError(
            f"{where} has {', '.join(map(repr, unknown))}, which Longspan does not know in a {family.model_type}. Such "
            "a key may change the outputs. If it does not, remove it from config.json."
        )


def _refuse_nulls(raw: Mapping[str, Any], config: type[Any], where: str) -> None:
    """Raises for a null in a key that cannot be null."""
    for f in dataclasses.fields(config):
        nullable = f.metadata.get("null", False) or type(None) in get_args(f.type)
        if f.name in raw and raw[f.name] is None and f.metadata.get("in_json", True) and not nullable:
            raise ValueError(
                f"{where} has {f.name}=null, which a {config.model_type} does not allow. Give a value, or leave the "
                "key out to get Hugging Face's default."
            )
