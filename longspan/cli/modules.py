"""The settings of a sentence-transformers directory that `longspan encode` does not support.

`modules.json` lists the modules that compute the vector of a text: a Transformer, a Pooling, and possibly Dense and
Normalize. Each has a folder with a config. `encode` runs a Transformer in the directory itself, and pools by the mean
or the first token. All other settings are reported with their files.
"""

import json
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

PACKAGE = "sentence_transformers."  # its modules moved between releases: only the last word of a type is stable
FOLDER = re.compile(r"\d+_[A-Z]\w*")  # such as 1_Pooling
TRANSFORMER_CONFIGS = "sentence_*_config.json"  # sentence_bert_config.json; older files have other models' names
MODE = "pooling_mode_"
# Modes by key, in the order in which sentence-transformers concatenates several.
MODES = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}
MODES |= {"weightedmean_tokens": "weightedmean", "lasttoken": "lasttoken"}


class Modules(NamedTuple):
    """The settings of a directory. `ignored` are clauses about unsupported ones, each starting with a file's name."""

    ignored: list[str]
    pooling: tuple[str, ...] = ("mean",)
    pooling_file: str = ""
    max_seq_length: int | None = None
    length_file: str = ""

    def not_run(self, pooling: str, max_tokens: int | None) -> list[str]:
        """Clauses about settings that differ from this pooling and this maximum length (None: not yet known)."""
        found = list(self.ignored)
        if self.pooling_file and self.pooling != (pooling,):
            found.append(f"{self.pooling_file} sets {' and '.join(self.pooling)} pooling, not {pooling}")
        limit = self.max_seq_length
        if max_tokens is not None and limit is not None and limit < max_tokens:
            found.append(
                f"{self.length_file} truncates texts to {limit:,} tokens, but the encoder takes {max_tokens:,}"
            )
        return found


def modules_of(directory: Path) -> Modules:
    """Reads the module files of a directory; without any, the settings are mean pooling.

    Raises:
        ValueError: a file is not JSON, or does not have the form of such a file.
    """
    path = directory / "modules.json"
    if path.exists():
        pooling, ignored = _listed(directory, path)
    else:
        pooling, ignored = _without_list(directory)
    modes, file = ("mean",), ""
    if pooling is not None:
        file = f"{pooling}/config.json"
        modes = _modes(directory / file)
    length, length_file, lower = _transformer(directory, path.exists())
    return Modules(ignored + lower + _settings(directory), modes, file, length, length_file)


def _listed(directory: Path, path: Path) -> tuple[str | None, list[str]]:
    """The folder of the Pooling, and clauses about unsupported modules in modules.json."""
    modules = _json(path, list)
    for module in modules:
        if not (isinstance(module, dict) and all(isinstance(module.get(key), str) for key in ("path", "type"))):
            raise ValueError(f"{path} must list objects with the strings 'path' and 'type', got {str(module)[:80]}.")
    if all(type(module.get("idx")) is int for module in modules):
        modules = sorted(modules, key=lambda module: module["idx"])
    for module in modules:
        _check_inside(directory, path, module["path"])
    pooling, ignored = None, []
    for place, module in enumerate(modules):
        kind, folder = _kind(module["type"]), module["path"]
        if kind == "Transformer" and place == 0:
            if folder not in ("", "."):
                ignored.append(f"modules.json has its Transformer in {folder}, not in the directory itself")
        elif kind == "Pooling" and place == 1:
            pooling = folder
        else:
            if folder:
                kind = f"{kind} ({folder})"
            ignored.append(f"modules.json lists {kind}")
    if not modules or _kind(modules[0]["type"]) != "Transformer":
        ignored.append("modules.json does not begin with a Transformer")
    if pooling is None:
        ignored.append("modules.json lists no Pooling after the Transformer")
    return pooling, ignored


def _kind(name: str) -> str:
    """The class name of a module of sentence-transformers; the full name of any other module."""
    if name.startswith(PACKAGE):
        return name.rpartition(".")[2]
    return name


def _check_inside(directory: Path, file: Path, folder: str) -> None:
    """Refuses a module's folder outside of the directory."""
    paths = PurePosixPath(folder), PureWindowsPath(folder)
    outside = any(path.anchor or ".." in path.parts for path in paths) or "\0" in folder
    if outside or not (directory / folder).resolve().is_relative_to(directory.resolve()):
        raise ValueError(
            f"{file} names the folder {folder!r}, which is outside of the directory. Such a folder is not opened."
        )


def _without_list(directory: Path) -> tuple[str | None, list[str]]:
    """Like `_listed`, for a directory with module folders but without modules.json."""
    names = sorted(path.name for path in directory.iterdir() if FOLDER.fullmatch(path.name) and path.is_dir())
    poolings = [name for name in names if name.endswith("_Pooling") and (directory / name / "config.json").exists()]
    others = [name for name in names if name not in poolings[:1] and not name.endswith("_Transformer")]
    ignored = [f"{name} is a module's folder, but modules.json is missing" for name in others]
    return next(iter(poolings), None), ignored


def _modes(path: Path) -> tuple[str, ...]:
    """The modes of a Pooling, whose outputs are concatenated."""
    if not path.exists():
        raise ValueError(f"{path} is missing, but modules.json refers to it. Download or save the directory again.")
    config = _json(path, dict)
    names = config.get("pooling_mode")
    if names is not None:
        if not isinstance(names, list):
            names = [names]
        if not names or not all(isinstance(name, str) for name in names):
            got = str(config["pooling_mode"])[:80]
            raise ValueError(f"{path}: 'pooling_mode' must be a name or a list of names, got {got}.")
        return tuple(names)
    flags = {f"{MODE}mean_tokens": True} | {key: value for key, value in config.items() if key.startswith(MODE)}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {key!r} must be true or false, got {str(value)[:80]}.")
    chosen = {key.removeprefix(MODE) for key, value in flags.items() if value}
    known = [name for mode, name in MODES.items() if mode in chosen]
    return (*known, *sorted(chosen - MODES.keys())) or ("mean",)


def _transformer(directory: Path, listed: bool) -> tuple[int | None, str, list[str]]:
    """The maximum number of tokens, the file that sets it, and clauses about that file's other settings."""
    for path in sorted(directory.glob(TRANSFORMER_CONFIGS)):
        config = _json(path, dict)
        lower = []
        if config.get("do_lower_case"):
            lower.append(f"{path.name} converts texts to lower case")
        length = _length(path, config, "max_seq_length")
        if length is not None or lower:
            return length, path.name, lower
    path = directory / "tokenizer_config.json"
    if listed and path.exists():  # sentence-transformers then uses the tokenizer's limit
        return _length(path, _json(path, dict), "model_max_length"), path.name, []
    return None, "", []


def _length(path: Path, config: dict[str, Any], key: str) -> int | None:
    length = config.get(key)
    if length is None:
        return None
    is_whole = isinstance(length, float) and length.is_integer()  # such as 1e30, which means no limit
    if not (type(length) is int or is_whole) or length < 1:
        raise ValueError(f"{path}: {key!r} must be a number of tokens, at least 1, got {str(length)[:80]}.")
    return int(length)


def _settings(directory: Path) -> list[str]:
    """Clauses about the settings of config_sentence_transformers.json."""
    path = directory / "config_sentence_transformers.json"
    if not path.exists():
        return []
    config, found = _json(path, dict), []
    kind, size = config.get("model_type"), config.get("truncate_dim")
    if kind not in (None, "SentenceTransformer"):
        found.append(f"{path.name} sets the model type {str(kind)[:80]}")
    name = config.get("default_prompt_name")
    if name is not None:
        prompts = config.get("prompts") or {}
        if not isinstance(prompts, dict) or not isinstance(name, str) or not isinstance(prompts.get(name), str):
            raise ValueError(f"{path}: 'default_prompt_name' must be one of its 'prompts', got {str(name)[:80]}.")
        if prompts[name]:
            found.append(f"{path.name} adds the prompt {prompts[name][:80]!r} before every text")
    if size is not None:
        found.append(f"{path.name} truncates vectors to {str(size)[:80]} numbers")
    return found


def _json(path: Path, kind: type) -> Any:
    """The content of a JSON file, which must be a dict or a list as given by `kind`."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON. Download or save it again.") from error
    if not isinstance(content, kind):
        wanted = "a list" if kind is list else "an object"
        raise ValueError(f"{path} must contain {wanted}, got {str(content)[:80]}.")
    return content
