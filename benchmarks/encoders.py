"""Compares whole encoders with Hugging Face's, by turns in one run: time and peak memory; and trains on long inputs.

    python -m benchmarks.encoders                   # every case; torch and transformers here or in .venv-parity
    python -m benchmarks.encoders longformer-base   # some of them
    python -m benchmarks.encoders train             # both passes at 16384 tokens, with remat
    python -m benchmarks.encoders minilm            # short texts through `models.compiled`

Every implementation has its own process, so that its peak memory is known. A process waits while another one runs.
"""

import argparse
import importlib.util
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
LONG = 16384
SIZES = dict(longformer=dict(vocab_size=50265, type_vocab_size=1, layer_norm_eps=1e-5), big_bird=dict(vocab_size=50358))


class Case(NamedTuple):
    family: str
    rows: int
    length: int
    goal: float  # target ratio
    globals: int = 0


CASES = {
    "longformer-base": Case("longformer", 1, 4096, 2.2),
    "longformer-base, 1 global": Case("longformer", 1, 4096, 2.2, globals=1),
    "bigbird-base": Case("big_bird", 1, 4096, 2.5),
    "modernbert-base": Case("modernbert", 1, 8192, 1.8),
    "modernbert-base, 8 rows": Case("modernbert", 8, 512, 1.1),
}
MINILM = dict(
    vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
    max_position_embeddings=512,
)  # fmt: skip
# Batch and length -> target ratio.
SHORT = {(1, 16): 1.5, (1, 128): 1.2, (32, 128): 1.0, (8, 512): 1.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES, "minilm", "train"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-length", type=int, default=LONG)
    parser.add_argument("--peer-python", default=peer_python(), help="an interpreter with torch and transformers")
    options = parser.parse_args()
    for name in options.cases:
        if name == "minilm":
            print(short_texts(options.rounds, options.peer_python), flush=True)
        elif name != "train":
            print(compare(name, options.rounds, options.peer_python), flush=True)
        else:
            for family in SIZES:
                print(train(family, options.train_length), flush=True)


def compare(name: str, rounds: int, python: str | None) -> str:
    case = CASES[name]
    arguments = case.family, case.rows, case.length, case.globals
    workers = {"longspan": Worker(sys.executable, "ours", *arguments)}
    if python is not None:
        workers["Hugging Face"] = Worker(python, "theirs", *arguments)
    first = {who: worker.run() for who, worker in workers.items()}  # compiles, and allocates all memory
    times: dict[str, list[float]] = {who: [] for who in workers}
    for _ in range(rounds):
        for who, worker in workers.items():
            times[who].append(worker.run())
    lines = [f"{name}, {case.rows} x {case.length} tokens, forward"]
    for who, worker in workers.items():
        seconds = f"{np.median(times[who]):7.2f} s   first call {first[who]:5.1f} s"
        lines.append(f"  {who:<13}{seconds}   peak {worker.finish():6.0f} MiB")
    if python is not None:
        ratios = [b / a for a, b in zip(times["longspan"], times["Hugging Face"], strict=True)]
        lines.append(
            f"  {np.median(ratios):.2f}x faster (rounds {min(ratios):.2f} to {max(ratios):.2f}; goal {case.goal}x)"
        )
    else:
        lines.append("  torch and transformers are missing: `make parity` installs them, or give --peer-python")
    return "\n".join(lines)


def short_texts(rounds: int, python: str | None) -> str:
    """A small BERT on four shapes: the time of a call, and of the first call, which compiles."""
    lines = ["MiniLM (6 layers of 384), forward, ms"]
    for (batch, length), goal in SHORT.items():
        workers = {"ours": Worker(sys.executable, "ours", "minilm", batch, length, 0)}
        if python is not None:
            workers["theirs"] = Worker(python, "theirs", "minilm", batch, length, 0)
        first = {who: worker.run() for who, worker in workers.items()}["ours"]
        times: dict[str, list[float]] = {who: [] for who in workers}
        again = 15 if batch == 1 else 1
        for _ in range(4 * rounds):
            for who, worker in workers.items():
                time.sleep(0.25)  # the threads of the previous process spin for a while after their work is done
                for _ in range(again // 3 + 1):
                    worker.run()
                times[who].append(float(np.median([worker.run() for _ in range(again)])))
        ms = {who: f"{1e3 * np.median(seconds):.2f}" for who, seconds in times.items()}
        line = f"  {batch}x{length}: {ms['ours']} (first call {first:.1f} s)"
        if python is not None:
            ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
            line += f", Hugging Face {ms['theirs']}: {np.median(ratios):.2f}x (goal {goal}x)"
        lines.append(line)
        for worker in workers.values():
            worker.finish()
    return "\n".join(lines)


def train(family: str, length: int) -> str:
    worker = Worker(sys.executable, "train", family, 1, length, 0)
    seconds = min(worker.run() for _ in range(2))
    title = f"{family}, base size, {length} tokens, both passes with remat"
    return f"{title}\n  longspan     {seconds:7.2f} s   peak {worker.finish():6.0f} MiB (goal: below 12,000)"


class Worker:
    """A process that runs a model once for every line that it reads, and prints the seconds."""

    module = "benchmarks.encoders"

    def __init__(self, python: str, *arguments):
        command = [python, "-m", self.module, "--worker", *map(str, arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self) -> float:
        return self.ask("run")

    def finish(self) -> float:
        """The peak resident memory, in MiB."""
        peak = self.ask("peak")
        self.process.communicate()
        return peak

    def ask(self, what: str) -> float:
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return float(answer)


def work(kind: str, family: str, *sizes: str) -> None:
    run = {"ours": ours, "theirs": theirs, "train": ours_training}[kind](family, *map(int, sizes))
    for line in sys.stdin:
        if line.strip() == "peak":
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
            return
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


def our_config(family: str, length: int, **changes):
    from longspan import models

    if family == "minilm":
        return models.BertConfig(**MINILM)
    if family == "modernbert":
        return models.ModernBertConfig()
    if family == "longformer":
        return models.LongformerConfig(**SIZES[family], max_position_embeddings=length + 2, window=256, **changes)
    return models.BigBirdConfig(**SIZES[family], max_position_embeddings=length, **changes)


def ids_of(rows: int, length: int):
    return np.random.default_rng(0).integers(5, 30000, (rows, length))


def first_tokens(length: int, count: int):
    return (np.arange(length) < count)[None].astype(np.int64)


def ours(family: str, rows: int, length: int, count: int):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from longspan import models

    call = models.compiled(models.Encoder(our_config(family, length), rngs=nnx.Rngs(0)))
    ids, extra = jnp.asarray(ids_of(rows, length)), {}
    if count:
        extra["global_attention_mask"] = jnp.asarray(first_tokens(length, count))
    return lambda: jax.block_until_ready(call(ids, **extra).last_hidden_state)


def theirs(family: str, rows: int, length: int, count: int):
    import torch
    import transformers

    if family == "minilm":
        model = transformers.BertModel(transformers.BertConfig(**MINILM)).eval()
    elif family == "modernbert":
        model = transformers.ModernBertModel(transformers.ModernBertConfig(attn_implementation="sdpa")).eval()
    elif family == "longformer":
        config = transformers.LongformerConfig(
            **SIZES[family], max_position_embeddings=length + 2, attention_window=512, pad_token_id=1
        )
        model = transformers.LongformerModel(config).eval()
    else:
        model = transformers.BigBirdModel(
            transformers.BigBirdConfig(**SIZES[family], max_position_embeddings=length)
        ).eval()
    ids, extra = torch.from_numpy(ids_of(rows, length)), {}
    if count:
        extra["global_attention_mask"] = torch.from_numpy(first_tokens(length, count))

    def run():
        with torch.no_grad():
            model(ids, **extra).last_hidden_state.sum().item()

    return run


def ours_training(family: str, rows: int, length: int, count: int):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from longspan import models

    config = our_config(family, length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    graph, parameters = nnx.split(models.SequenceClassifier(config, rngs=nnx.Rngs(0)))
    ids = jnp.asarray(ids_of(rows, length))

    @jax.jit
    def gradient(parameters, ids):
        loss = lambda p: nnx.merge(graph, p)(ids, remat=True).logits[:, 0].sum()  # noqa: E731
        return jax.value_and_grad(loss)(parameters)

    return lambda: jax.block_until_ready(gradient(parameters, ids))


def peer_python() -> str | None:
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return sys.executable
    other = ROOT / ".venv-parity" / "bin" / "python"
    return str(other) if other.exists() else None


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(*sys.argv[sys.argv.index("--worker") + 1 :])
    else:
        main()
