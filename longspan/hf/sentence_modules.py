"""The files of a sentence-transformers directory: `modules.json`, and the configs and weights of the modules.

`modules.json` lists the modules that compute the vector of a text: a Transformer, a Pooling, then any number of Dense
and Normalize. Each has a folder with a config. Everything that Longspan does not compute is an error that names it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from longspan.checks import check_choice
from longspan.hf.config import read_object
from longspan.hf.tensors import DTYPES, open_safetensors
from longspan.hf.tokenizer import length_in
from longspan.models.fields import is_count
from longspan.models.pooling import POOLING_MODES, DenseLayer, Normalize, Pooling

LIST = "modules.json"
SETTINGS = "config_sentence_transformers.json"
PACKAGE = "sentence_transformers."  # its modules moved between releases: only the last word of a type is stable
FOLDER = re.compile(r"\d+_[A-Z]\w*")  # such as 1_Pooling
TRANSFORMER_CONFIG = "sentence_bert_config.json"
TRANSFORMER_CONFIGS = "sentence_*_config.json"  # older files have other models' names
SUPPORTED = "a Transformer, a Pooling, then any number of Dense and Normalize"
IGNORE = "`longspan encode --pooling mean` replaces all modules by the mean of the tokens."
MODE = "pooling_mode_"
# The older keys of the modes, in the order in which several are concatenated.
OLD_MODES = dict(
    zip(("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"),
        POOLING_MODES, strict=True)
)  # fmt: skip
SENTENCE = "sentence_embedding"  # the vector that Dense and Normalize read and write
INPUT_KEYS = ("module_input_name", "module_output_name")
# PyTorch's classes, and our names for them.
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Tanh": "tanh",
}
# Keys of a Transformer's config, and the values that change nothing here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
    "unpad_inputs": (True, False),
    **{key: ({},) for key in ("model_kwargs", "model_args", "config_kwargs", "config_args", "processor_kwargs")},
    **{key: ({},) for key in ("tokenizer_args", "processing_kwargs", "query_expansion")},
}


class SentenceModule(NamedTuple):
    """An entry of `modules.json`."""

    kind: str  # the class of sentence-transformers, or the full name of any other class
    folder: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.folder})" if self.folder else self.kind


class TransformerSettings(NamedTuple):
    """The settings of texts in a Transformer's config."""

    max_seq_length: int | None = None
    lower_case: bool = False


class SentenceSettings(NamedTuple):
    """The settings in `config_sentence_transformers.json`."""

    prompts: dict[str, str]
    default_prompt_name: str | None = None
    similarity_fn_name: str = "cosine"
    truncate_dim: int | None = None


def listed_modules(directory: Path) -> list[SentenceModule] | None:
    """The entries of `modules.json` in the file's order; None without this file. Their kinds are not checked."""
    path = directory / LIST
    if not path.exists():
        return None
    entries = _list_in(path)
    for entry in entries:
        if not (isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("path", "type"))):
            raise ValueError(f"{path} must list objects with the strings 'path' and 'type', got {str(entry)[:80]}.")
    _check_order(path, entries)
    for entry in entries:
        _check_inside(directory, path, entry["path"])
    return [SentenceModule(_kind(entry["type"]), _folder(entry["path"])) for entry in entries]


def check_modules(directory: Path, modules: list[SentenceModule] | None) -> None:
    """Raises for modules that Longspan does not run."""
    if modules is None:
        lost = sorted(path.name for path in directory.iterdir() if FOLDER.fullmatch(path.name) and path.is_dir())
        if lost:
            raise ValueError(
                f"{directory} has {', '.join(lost)}, a folder of a sentence-transformers module, but no {LIST}, which "
                f"lists the modules. Download or save the directory again. {IGNORE}"
            )
        return
    first = (["Transformer"], ["Pooling"])
    expected = [*first, *[["Dense", "Normalize"]] * len(modules)]
    for module, kinds in zip(modules, expected, strict=False):
        if module.kind not in kinds:
            raise ValueError(
                f"{directory / LIST} lists {module} where Longspan supports only {' or '.join(kinds)}. It supports "
                f"{SUPPORTED}. {IGNORE}"
            )
    if len(modules) < len(first):
        raise ValueError(f"{directory / LIST} has {len(modules)} modules. Longspan supports {SUPPORTED}. {IGNORE}")


def read_modules(directory: Path, modules: list[SentenceModule], hidden_size: int) -> tuple[Any, ...]:
    """The modules after the Transformer. Their sizes are compared with each other and with the weights."""
    found, size = [], hidden_size
    for module in modules[1:]:
        where = directory / module.folder
        if module.kind == "Pooling":
            found.append(_pooling(where / "config.json", size))
        elif module.kind == "Dense":
            found.append(_dense(where, size))
        else:
            found.append(_normalize(where / "config.json"))
        size = getattr(found[-1], "out_size", size)
    return tuple(found)


def transformer_settings(folder: Path) -> TransformerSettings:
    """The settings in a Transformer's folder. Settings that would change the model are errors."""
    # sentence-transformers reads sentence_bert_config.json first, whatever the model.
    for path in sorted(folder.glob(TRANSFORMER_CONFIGS), key=lambda path: (path.name != TRANSFORMER_CONFIG, path.name)):
        content = read_object(path)
        lower = content.get("do_lower_case") or False
        if not isinstance(lower, bool):
            raise ValueError(f"{path}: 'do_lower_case' must be true or false, got {str(lower)[:80]}.")
        for key, value in content.items():
            _check_neutral(path, key, value)
        return TransformerSettings(length_in(path, content, "max_seq_length"), lower)
    return TransformerSettings()


def sentence_settings(directory: Path) -> SentenceSettings:
    """The settings of the whole directory."""
    path = directory / SETTINGS
    if not path.exists():
        return SentenceSettings({})
    content = read_object(path)
    kind = content.get("model_type")
    if kind not in (None, "SentenceTransformer"):
        raise ValueError(f"{path} has model_type={str(kind)[:80]!r}, but Longspan supports only 'SentenceTransformer'.")
    prompts = content.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{path}: 'prompts' must be an object of texts, got {str(prompts)[:80]}.")
    texts = {name: text for name, text in prompts.items() if text is not None}
    name = content.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in texts):
        raise ValueError(f"{path}: 'default_prompt_name' must be one of its 'prompts', got {str(name)[:80]}.")
    dim = content.get("truncate_dim")
    if dim is not None and not is_count(dim):
        raise ValueError(f"{path}: 'truncate_dim' must be a number of features, at least 1, got {str(dim)[:80]}.")
    function = content.get("similarity_fn_name")
    if function is None:
        function = "cosine"
    return SentenceSettings(texts, name, function, dim)


def _list_in(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON. Download or save it again.") from error
    if not isinstance(content, list):
        raise ValueError(f"{path} must contain a list, got {str(content)[:80]}.")
    return content


def _check_order(path: Path, entries: list[dict[str, Any]]) -> None:
    """Refuses lists that sentence-transformers reads differently: it ignores `idx`, and keeps one module per name."""
    numbers = [entry["idx"] for entry in entries if type(entry.get("idx")) is int]
    if numbers != sorted(numbers):
        raise ValueError(
            f"{path} lists modules in another order than their 'idx', {numbers}. sentence-transformers runs them in "
            "the order of the list. Sort the list, or correct 'idx'."
        )
    names = [entry["name"] for entry in entries if isinstance(entry.get("name"), str)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path} lists more than one module with the name {name!r:.80}. Give each another name.")


def _folder(path: str) -> str:
    """A module's folder as it is named without `./`; an empty text is the directory itself."""
    folder = str(PurePosixPath(path))
    return "" if folder == "." else folder


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


def _required(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing, but {LIST} refers to it. Download or save the directory again.")
    return read_object(path)


def _pooling(path: Path, size: int) -> Pooling:
    content = _required(path)
    key = "word_embedding_dimension" if "word_embedding_dimension" in content else "embedding_dimension"
    _check_size(path, content, key, size)
    include = content.get("include_prompt", True)
    known = {"word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode"}
    flags = {name: value for name, value in content.items() if name.startswith(MODE)}
    for name in flags:
        if name.removeprefix(MODE) not in OLD_MODES:
            raise ValueError(
                f"{path} has {name!r}, which is not a pooling mode. The modes are "
                f"{', '.join(MODE + mode for mode in OLD_MODES)}."
            )
    for name, value in (*flags.items(), ("include_prompt", include)):
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {name!r} must be true or false, got {str(value)[:80]}.")
    _check_known(path, content, {*known, *flags})
    modes = content.get("pooling_mode")
    if "pooling_mode" not in content:
        return Pooling(size, tuple(_old_modes(flags)) or ("mean",), include)
    names = [modes] if isinstance(modes, str) else modes
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: 'pooling_mode' must be a name or a list of names, got {str(modes)[:80]}.")
    for name in names:
        check_choice(f"{path}: 'pooling_mode'", name, POOLING_MODES)
    return Pooling(size, tuple(names), include)


def _old_modes(flags: dict[str, bool]) -> Iterator[str]:
    for key, mode in OLD_MODES.items():
        if flags.get(MODE + key):
            yield mode


def _dense(folder: Path, size: int) -> DenseLayer:
    path = folder / "config.json"
    content = _required(path)
    known = {"in_features", "out_features", "bias", "activation_function", "use_residual", *INPUT_KEYS}
    _check_known(path, content, known)
    _check_vector(path, content)
    _check_size(path, content, "in_features", size)
    out_size: Any = content.get("out_features")
    has_bias, has_residual = content.get("bias", True), content.get("use_residual") or False
    if not is_count(out_size):
        raise ValueError(f"{path}: 'out_features' must be a number of features, at least 1, got {str(out_size)[:80]}.")
    for name, value in (("bias", has_bias), ("use_residual", has_residual)):
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {name!r} must be true or false, got {str(value)[:80]}.")
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (out_size, size)}
    if has_bias:
        shapes["linear.bias"] = (out_size,)
    if has_residual and out_size != size:
        shapes["residual.weight"] = (out_size, size)
    tensors = _tensors(folder, shapes)
    residual = tensors.get("residual.weight")
    return DenseLayer(
        kernel=tensors["linear.weight"].T,
        bias=tensors.get("linear.bias"),
        residual=None if residual is None else residual.T,
        activation=_activation(path, content),
        adds_input=has_residual and out_size == size,
    )


def _activation(path: Path, content: dict[str, Any]) -> str:
    name = content.get("activation_function", "torch.nn.modules.activation.Tanh")  # as in sentence-transformers
    ours = {full.rpartition(".")[2]: short for full, short in ACTIVATIONS.items()}
    if not isinstance(name, str) or not name.startswith("torch.nn.") or name.rpartition(".")[2] not in ours:
        raise ValueError(
            f"{path} has activation_function={str(name)[:80]!r}, which Longspan does not support. It supports "
            f"PyTorch's {', '.join(ours)}."
        )
    return ours[name.rpartition(".")[2]]


def _normalize(path: Path) -> Normalize:
    if path.exists():  # older releases write none
        content = read_object(path)
        _check_known(path, content, set(INPUT_KEYS))
        _check_vector(path, content)
    return Normalize()


def _tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The weights of a module, float32. Raises unless the file has exactly these tensors."""
    path = folder / "model.safetensors"
    if not path.is_file():
        pickle = (
            " It has pytorch_model.bin, a pickle, which Longspan does not read."
            * (folder / "pytorch_model.bin").is_file()
        )
        raise FileNotFoundError(f"{path} is missing.{pickle} Save the directory again with safetensors.")
    with ExitStack() as stack:
        file = open_safetensors(path, stack)
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if found != shapes:
            raise ValueError(f"{path} has the tensors {found}, but its config.json needs {shapes}.")
        for name in shapes:
            if file.get_slice(name).get_dtype() not in DTYPES:
                raise ValueError(f"{path}: {name} must be one of {', '.join(DTYPES)}.")
        return {name: np.array(file.get_tensor(name), np.float32) for name in shapes}


def _check_size(path: Path, content: dict[str, Any], key: str, size: int) -> None:
    if key not in content:
        raise ValueError(f"{path} has no {key!r}. It must be {size}, the size of the vectors that the module reads.")
    if type(content[key]) is not int or content[key] != size:
        raise ValueError(f"{path} has {key}={str(content[key])[:80]}, but the module reads vectors of size {size}.")


def _check_known(path: Path, content: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(content) - known)
    if unknown:
        raise ValueError(f"{path} has {', '.join(map(repr, unknown))}, which Longspan does not know.")


def _check_vector(path: Path, content: dict[str, Any]) -> None:
    """Raises if a module reads or writes something other than the vector of the text."""
    for key in INPUT_KEYS:
        if content.get(key) not in (None, SENTENCE):
            raise ValueError(f"{path} has {key}={str(content[key])[:80]!r}, but Longspan supports only {SENTENCE!r}.")


def _check_neutral(path: Path, key: str, value: Any) -> None:
    if key in ("max_seq_length", "do_lower_case") or value is None:
        return
    if key not in NEUTRAL or value not in NEUTRAL[key]:
        raise ValueError(
            f"{path} has {key}={str(value)[:80]}, which Longspan does not support, because it may change the vectors. "
            "If it does not, remove it."
        )
