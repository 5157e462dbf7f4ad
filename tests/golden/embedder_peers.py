"""Small sentence-transformers directories, and the texts on which we compare with them. Needs torch only to run them.

    python tests/golden/embedder_peers.py     # writes the vectors of sentence-transformers to embedders.json

A directory is a golden checkpoint of a model, a tokenizer of words, and modules with random weights.
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
GOLDEN = HERE / "embedders.json"
VOCAB, SIZE = 23, 12
TYPE = "sentence_transformers.models."
NOTHING: Mapping[str, Any] = MappingProxyType({})
TORCH = "torch.nn.modules."
# Texts of 0, 1, 3, 7 and 40 words, a repeated text, and one with capitals and an unknown word.
TEXTS = (
    "w1 w2 w3", "w7", " ".join(f"w{n % 11}" for n in range(40)), "", "w5 w6 w7 w8 w9 w1 w0", "w7", "W1 Other w4",
)  # fmt: skip


class Embedding(NamedTuple):
    """A directory: its model, its modules, and the arguments of a call."""

    model: str  # a golden checkpoint
    pooling: dict[str, Any] | None = None  # None: no modules.json
    modules: tuple[dict[str, Any], ...] = ()  # configs of Dense; an empty one is Normalize
    transformer: Mapping[str, Any] = NOTHING
    settings: Mapping[str, Any] = NOTHING
    call: Mapping[str, Any] = NOTHING
    ends: bool = True  # whether the tokenizer adds a token at the end; else only in front


def flags(*modes: str, **more: Any) -> dict[str, Any]:
    return dict(word_embedding_dimension=SIZE, **{f"pooling_mode_{mode}": True for mode in modes}, **more)


def dense(inputs: int, outputs: int, activation: str, **more: Any) -> dict[str, Any]:
    return dict(in_features=inputs, out_features=outputs, activation_function=TORCH + activation, **more)


SIX = ("lasttoken", "cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "mean_sqrt_len_tokens")
PROMPTS = dict(prompts=dict(query="w3 w4: ", passage="w9 "), default_prompt_name="query")
SHORT = dict(max_seq_length=9, do_lower_case=False)
EMBEDDINGS = {
    "mean": Embedding("bertModel", flags("mean_tokens"), ({},), transformer=SHORT),
    "no modules.json": Embedding("bertModel"),
    "six modes, Tanh": Embedding(
        "bertModel", flags(*SIX), (dense(6 * SIZE, 5, "activation.Tanh", bias=True),), settings=PROMPTS
    ),
    "modes in another order": Embedding(
        "bertModel",
        dict(embedding_dimension=SIZE, pooling_mode=["mean", "cls"], include_prompt=False),
        settings=PROMPTS,
        transformer=SHORT,
    ),
    "prompt is not pooled": Embedding(
        "robertaModel",
        flags("weightedmean_tokens", "max_tokens", include_prompt=False),
        ({},),
        settings=PROMPTS,
        call=dict(prompt="w2 w8"),
    ),
    "last token, prompt is not pooled": Embedding(
        "bertModel", flags("lasttoken", "cls_token", include_prompt=False), settings=PROMPTS, ends=False
    ),
    "residual": Embedding(
        "robertaModel",
        flags("mean_sqrt_len_tokens"),
        (dense(SIZE, SIZE, "linear.Identity", bias=False, use_residual=True), {},
         dense(SIZE, 7, "activation.GELU", bias=True, use_residual=True)),
        settings=dict(truncate_dim=5),
        transformer=dict(do_lower_case=True),
    ),
    "modernbert": Embedding("modernbertModel", flags("cls_token"), ({},), call=dict(prompt_name="passage"),
                            settings=PROMPTS),
    "longformer": Embedding("longformerModel", flags("mean_tokens"), ({},)),
    "nomic_bert": Embedding("nomic_bertModel", flags("mean_tokens"), ({},), call=dict(truncate_dim=4)),
    "gte": Embedding("gteModel", flags("cls_token"), ({},)),
    "jina_embeddings_v3": Embedding("jina_embeddings_v3Model", flags("mean_tokens"), ({},)),
    "eurobert": Embedding("eurobertModel", flags("mean_tokens")),
    "embedding_gemma": Embedding(
        "embedding_gemmaModel",
        flags("mean_tokens"),
        (dense(SIZE, 17, "linear.Identity", bias=False), dense(17, SIZE, "linear.Identity", bias=False), {}),
        settings=PROMPTS,
    ),
    "qwen3": Embedding("qwen3", flags("lasttoken") | dict(word_embedding_dimension=24), ({},), settings=PROMPTS),
}  # fmt: skip


def write(name: str, directory: Path, checkpoint: Path) -> Path:
    """Writes the directory of a case around the files of its checkpoint."""
    case = EMBEDDINGS[name]
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / file, directory / file)
    write_tokenizer(directory, ends=case.ends)
    if case.pooling is None:
        return directory
    entries, rng = [dict(idx=0, name="0", path="", type=TYPE + "Transformer")], generator(name)
    configs = [("Pooling", case.pooling), *(("Dense" if module else "Normalize", module) for module in case.modules)]
    for number, (kind, config) in enumerate(configs, start=1):
        folder = directory / f"{number}_{kind}"
        entries.append(dict(idx=number, name=str(number), path=folder.name, type=TYPE + kind))
        folder.mkdir()
        if kind != "Normalize":
            (folder / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            write_weights(folder, config, rng)
    files = {"modules.json": entries, "config_sentence_transformers.json": dict(case.settings)}
    for file, content in (files | {"sentence_bert_config.json": dict(case.transformer)}).items():
        (directory / file).write_text(json.dumps(content))
    return directory


def generator(name: str) -> np.random.RandomState:
    """A generator of random numbers, whose stream never changes."""
    return np.random.RandomState(zlib.crc32(name.encode()))


def write_weights(folder: Path, config: dict[str, Any], rng: np.random.RandomState) -> None:
    from safetensors.numpy import save_file

    inputs, outputs = config["in_features"], config["out_features"]
    # Not so large that tanh is 1 nearly everywhere.
    tensors = {"linear.weight": rng.normal(size=(outputs, inputs)) / inputs**0.5}
    if config["bias"]:
        tensors["linear.bias"] = rng.normal(size=outputs)
    if config.get("use_residual") and inputs != outputs:
        tensors["residual.weight"] = rng.normal(size=(outputs, inputs))
    save_file({key: value.astype(np.float32) for key, value in tensors.items()}, folder / "model.safetensors")


def write_tokenizer(directory: Path, *, ends: bool) -> None:
    """A tokenizer of words, with the padding of the directory's config, and with settings that must be ignored."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    config = json.loads((directory / "config.json").read_text())
    pad = config.get("pad_token_id") or 0
    words = [f"w{n}" for n in range(config["vocab_size"] - 4)]
    words[pad:pad] = ["[PAD]"]
    words += ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "[CLS] $A [SEP]" if ends else "[CLS] $A"
    special = [(token, words.index(token)) for token in ("[CLS]", "[SEP]") if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8, pad_id=pad)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    names |= dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=1000)
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def peer(directory: Path) -> Any:
    """The directory in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu", model_kwargs=dict(dtype="float32"))


def checkpoint_of(name: str) -> Path:
    """The files of a case's model."""
    model = EMBEDDINGS[name].model
    if (HERE / model).is_dir():
        return HERE / model
    from tests.models.test_decoders import directory  # it draws the weights of decoders by name

    return directory(model)


def main() -> None:
    import sys
    import tempfile

    sys.path.insert(0, str(HERE.parent.parent))
    vectors = {}
    for name, case in EMBEDDINGS.items():
        with tempfile.TemporaryDirectory() as directory:
            found = peer(write(name, Path(directory) / "theirs", checkpoint_of(name))).encode(list(TEXTS), **case.call)
        vectors[name] = [[float(f"{number:.7g}") for number in row] for row in found.tolist()]
        print(name, found.shape)
    GOLDEN.write_text(json.dumps(vectors, separators=(",", ":")).replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
