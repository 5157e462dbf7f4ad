"""What the files of a sentence-transformers directory say that `longspan encode` does not run.

`modules.json` lists the modules that make a vector of a text: a Transformer, a Pooling, perhaps Dense and Normalize.
Each has a folder with a config. `encode` runs a Transformer in the directory itself, and pools by the mean or the first
token; everything else is reported, by file.
"""

import json
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

PACKAGE = "sentence_transformers."  # its modules have moved more than once: only the last word of a type is stable
FOLDER = re.compile(r"\d+_[A-Z]\w*")  # such as 1_Pooling
TRANSFORMER_CONFIGS = "sentence_*_config.json"  # sentence_bert_config.json; older ones name other models
MODE = "pooling_mode_"
# In the order in which several are concatenated.
MODES = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}
MODES |= {"weightedmean_tokens": "weightedmean", "lasttoken": "lasttoken"}


class Modules(NamedTuple):
    """What a directory says. `ignored` are sentences, each of which begins with a file's name."""

    ignored: list[str]
    pooling: tuple[str, ...] = ("mean",)
    pooling_file: str = ""
    max_seq_length: int | None = None
    length_file: str = ""

    def not_run(self, pooling: str, max_tokens: int | None) -> list[str]:
        """What is not run where tokens are pooled like this and texts may have so many tokens (None: not known yet)."""
        found = list(self.ignored)
        if self.pooling_file and self.pooling != (pooling,):
            found.append(f"{self.pooling_file} says {' and '.join(self.pooling)} pooling, not {pooling}")
        most = self.max_seq_length
        if max_tokens is not None and most is not None and most < max_tokens:
            found.append(f"{self.length_file} cuts texts at {most:,} tokens, where the encoder takes {max_tokens:,}")
        return found


def modules_of(directory: Path) -> Modules:
    """What a directory's module files say; for a directory without any, mean pooling and nothing else.

    Raises:
        ValueError: a file is not JSON, or holds something else than such files do.
    """
    path = directory / "modules.json"
    if not path.exists():
        pooling, ignored = _without_list(directory)
    else:
        pooling, ignored = _listed(directory, path)
    modes, file = ("mean",), ""
    if pooling is not None:
        file = f"{pooling}/config.json"
        modes = _modes(directory / file)
    length, length_file, lower = _transformer(directory, path.exists())
    return Modules(ignored + lower + _settings(directory), modes, file, length, length_file)


def _listed(directory: Path, path: Path) -> tuple[str | None, list[str]]:
    """The folder of the Pooling, and what else modules.json lists."""
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
            ignored.append(f"modules.json lists {kind}" + (f" ({folder})" if folder else ""))
    if not modules or _kind(modules[0]["type"]) != "Transformer":
        ignored.append("modules.json does not begin with a Transformer")
    if pooling is None:
        ignored.append("modules.json lists no Pooling after the Transformer")
    return pooling, ignored


def _kind(name: str) -> str:
    """The class of a module: its last word, or all of it where it is somebody else's."""
    return name.rpartition(".")[2] if name.startswith(PACKAGE) else name


def _check_inside(directory: Path, file: Path, folder: str) -> None:
    """A module's folder is in the directory; no other is opened."""
    paths = PurePosixPath(folder), PureWindowsPath(folder)
    outside = any(path.anchor or ".." in path.parts for path in paths) or "\0" in folder
    if outside or not (directory / folder).resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"{file} names the folder {folder!r}, which is outside of the directory, and is not opened.")


def _without_list(directory: Path) -> tuple[str | None, list[str]]:
    """The same for a directory that has folders of modules, but lost the list of them."""
    names = sorted(path.name for path in directory.iterdir() if FOLDER.fullmatch(path.name) and path.is_dir())
    poolings = [name for name in names if name.endswith("_Pooling") and (directory / name / "config.json").exists()]
    others = [name for name in names if name not in poolings[:1] and not name.endswith("_Transformer")]
    ignored = [f"{name} is a module's folder, and modules.json is missing" for name in others]
    return (poolings[0] if poolings else None), ignored


def _modes(path: Path) -> tuple[str, ...]:
    """How a Pooling pools: several modes are concatenated."""
    if not path.exists():
        raise ValueError(f"{path} is missing, and modules.json needs it. Download or save the directory again.")
    config = _json(path, dict)
    named = config.get("pooling_mode")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path}: 'pooling_mode' must be a name or a list of names, got {str(named)[:80]}.")
        return tuple(names)
    flags = {f"{MODE}mean_tokens": True} | {key: value for key, value in config.items() if key.startswith(MODE)}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {key!r} must be true or false, got {str(value)[:80]}.")
    chosen = {key.removeprefix(MODE) for key, value in flags.items() if value}
    known = [name for mode, name in MODES.items() if mode in chosen]
    return (*known, *sorted(chosen - MODES.keys())) or ("mean",)


def _transformer(directory: Path, listed: bool) -> tuple[int | None, str, list[str]]:
    """The most tokens of a text with the file that says so, and what else that file does to texts."""
    for path in sorted(directory.glob(TRANSFORMER_CONFIGS)):
        config = _json(path, dict)
        lower = [f"{path.name} makes texts lower case"] if config.get("do_lower_case") else []
        length = _length(path, config, "max_seq_length")
        if length is not None or lower:
            return length, path.name, lower
    path = directory / "tokenizer_config.json"
    if listed and path.exists():  # sentence-transformers asks the tokenizer
        return _length(path, _json(path, dict), "model_max_length"), path.name, []
    return None, "", []


def _length(path: Path, config: dict[str, Any], key: str) -> int | None:
    length = config.get(key)
    if length is None:
        return None
    whole = isinstance(length, float) and length.is_integer()  # 1e30 means none
    if not (type(length) is int or whole) or length < 1:
        raise ValueError(f"{path}: {key!r} must be a number of tokens, at least 1, got {str(length)[:80]}.")
    return int(length)


def _settings(directory: Path) -> list[str]:
    """What config_sentence_transformers.json does to every text or vector."""
    path = directory / "config_sentence_transformers.json"
    if not path.exists():
        return []
    config, found = _json(path, dict), []
    kind, name, size = (config.get(key) for key in ("model_type", "default_prompt_name", "truncate_dim"))
    if kind not in (None, "SentenceTransformer"):
        found.append(f"{path.name} says that this is a {str(kind)[:80]}")
    if name is not None:
        prompts = config.get("prompts") or {}
        if not isinstance(prompts, dict) or not isinstance(name, str) or not isinstance(prompts.get(name), str):
            raise ValueError(f"{path}: 'default_prompt_name' must be one of its 'prompts', got {str(name)[:80]}.")
        if prompts[name]:
            found.append(f"{path.name} puts the prompt {prompts[name][:80]!r} before every text")
    if size is not None:
        found.append(f"{path.name} keeps the first {str(size)[:80]} numbers of a vector")
    return found


def _json(path: Path, kind: type) -> Any:
    """The content of a file, an object or a list."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON. Download or save it again.") from error
    if not isinstance(content, kind):
        wanted = "a list" if kind is list else "an object"
        raise ValueError(f"{path} must hold {wanted}, got {str(content)[:80]}.")
    return content
