"""Semantic search: finds the passages of a folder of long documents that are closest to a question.

    python examples/semantic_search.py my-embedder notes/ "How do I reset my password?"

`my-embedder` is a sentence-transformers directory with a `tokenizer.json`, such as that of all-MiniLM-L6-v2. Documents
longer than its `max_seq_length` are searched in overlapping passages.
"""

import argparse
from pathlib import Path

import numpy as np

from longspan import hf, models


def passages_of(embedder: models.Embedder, text: str) -> list[str]:
    """The text in passages of at most `max_seq_length` tokens, each of which repeats half of the one before it."""
    tokenizer, longest = embedder.tokenizer, embedder.max_seq_length or 512
    content = longest - tokenizer.num_special_tokens_to_add(is_pair=False)
    tokenizer.no_truncation()
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    tokenizer.enable_truncation(longest)
    starts = range(0, max(1, len(offsets) - content // 2), max(1, content // 2))
    ends = [min(start + content, len(offsets)) - 1 for start in starts]
    return [text[offsets[start][0] : offsets[end][1]] for start, end in zip(starts, ends, strict=True) if offsets]


def search(embedder: models.Embedder, folder: Path, question: str, count: int) -> list[tuple[float, str, str]]:
    """The closest passages: their similarities, the names of their files, and their texts."""
    found = [
        (path.name, passage)
        for path in sorted(folder.glob("*.txt"))
        for passage in passages_of(embedder, path.read_text("utf-8"))
    ]
    # Models with prompts for questions and documents were trained with both.
    names = {name: name for name in embedder.prompts}
    vectors = embedder.embed([passage for _, passage in found], prompt_name=names.get("document"))
    asked = embedder.embed([question], prompt_name=names.get("query"))
    (scores,) = embedder.similarity(asked, vectors)
    best = np.argsort(-scores, kind="stable")[:count]
    return [(float(scores[place]), *found[place]) for place in best]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embedder", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--count", type=int, default=5)
    options = parser.parse_args(arguments)
    embedder = hf.load_embedder(options.embedder)
    for score, name, passage in search(embedder, options.folder, options.question, options.count):
        print(f"{score:.3f}  {name}: {' '.join(passage.split())[:90]}")


if __name__ == "__main__":
    main()
