"""Training steps: beside Hugging Face's by turns, and the loop of `ls.train.fit` beside its bare compiled step.

    python -m benchmarks.training                 # all of it, 10 to 25 minutes on two quiet cores
    python -m benchmarks.training decoder         # 8 layers of 512, window 512, 8192 packed tokens
    python -m benchmarks.training longformer      # fine-tuning longformer-base on 4096 tokens
    python -m benchmarks.training loop            # the decoder's loop, and saving every 20 steps
    python -m benchmarks.training loss            # `ls.chunked_cross_entropy` and the plain loss, value and gradients

Every implementation has its own process, so that its peak memory is known. A process waits while another one runs. All
steps are AdamW in float32, without clipping and without dropout.
"""

import argparse
import resource
import sys
import tempfile
import time

import numpy as np

from benchmarks.encoders import SIZES, Worker, first_tokens, ids_of, our_config, peer_python

DECODER = dict(
    vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, sliding_window=512, max_position_embeddings=32768,
)  # fmt: skip
DECODER_TOKENS, LONGFORMER_TOKENS = 8192, 4096
LONGEST = 2048  # tokens of a document
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
GOALS = dict(decoder=2.0, longformer=2.0)
LOOP_GOAL, SAVING_GOAL, SAVE_EVERY = 1.03, 1.05, 20
LOSS_GOAL, LOSS_MEMORY_GOAL, FEATURES = 1.35, 1 / 8, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*GOALS, "loop", "loss"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=peer_python(), help="an interpreter with torch and transformers")
    options = parser.parse_args()
    for name in options.cases:
        if name == "loop":
            print(loop(options.rounds), flush=True)
        elif name == "loss":
            print(loss_alone(options.rounds), flush=True)
        else:
            print(compare(name, options.rounds, options.peer_python), flush=True)


def compare(name: str, rounds: int, python: str | None) -> str:
    workers = {"longspan": TrainingWorker(sys.executable, "ours", name)}
    if python is not None:
        workers["Hugging Face"] = TrainingWorker(python, "theirs", name)
    first = {who: worker.run() for who, worker in workers.items()}  # compiles, and allocates all memory
    times: dict[str, list[float]] = {who: [] for who in workers}
    for _ in range(rounds):
        for who, worker in workers.items():
            time.sleep(0.25)  # the threads of the previous process spin for a while after their work is done
            times[who].append(worker.run())
    lines = [f"{name}, one training step"]
    peaks = {who: worker.finish() for who, worker in workers.items()}
    for who in workers:
        seconds = f"{np.median(times[who]):7.2f} s   first step {first[who]:5.1f} s, with compiling"
        lines.append(f"  {who:<13}{seconds}   peak {peaks[who]:6.0f} MiB")
    if python is not None:
        ratios = [b / a for a, b in zip(times["longspan"], times["Hugging Face"], strict=True)]
        memory = peaks["longspan"] / peaks["Hugging Face"]
        lines.append(
            f"  {np.median(ratios):.2f}x faster (rounds {min(ratios):.2f} to {max(ratios):.2f}; goal {GOALS[name]}x), "
            f"{memory:.2f} of the memory (goal 1)"
        )
    else:
        lines.append("  torch and transformers are missing: `make parity` installs them, or give --peer-python")
    return "\n".join(lines)


def loop(rounds: int) -> str:
    """Seconds per step of the bare program, of the loop, and of the loop while one checkpoint is written."""
    worker = TrainingWorker(sys.executable, "loop", "decoder")
    for what in ("bare", "loop"):
        worker.ask(what)
    times = {what: [] for what in ("bare", "loop", "saving")}
    for _ in range(rounds):
        for what, found in times.items():
            found.append(worker.ask(what))
    worker.finish()
    overhead = np.median([b / a for a, b in zip(times["bare"], times["loop"], strict=True)])
    extra = [LOOP_STEPS * (c - b) for b, c in zip(times["loop"], times["saving"], strict=True)]
    saving = 1 + np.median(extra) / (SAVE_EVERY * np.median(times["loop"]))
    return (
        f"decoder, the loop\n  bare step {np.median(times['bare']):.2f} s; the loop takes {overhead:.3f} of it "
        f"(goal {LOOP_GOAL})\n  one checkpoint costs {np.median(extra):.2f} s: saving every {SAVE_EVERY} steps takes "
        f"{saving:.3f} of never (goal {SAVING_GOAL})"
    )


def loss_alone(rounds: int) -> str:
    """Time at 2,048 tokens and 32,000 words, temporary memory of the compiled program at 8,192 and 128,256."""
    import jax

    import longspan as ls

    losses = dict(chunked=ls.chunked_cross_entropy, plain=plain_cross_entropy)
    programs = {name: jax.jit(jax.value_and_grad(loss, (0, 1))) for name, loss in losses.items()}
    rng = np.random.default_rng(0)
    hidden, weights = (rng.normal(size=(n, FEATURES)).astype(np.float32) for n in (2048, 32000))
    operands = jax.device_put((hidden, weights * 0.03, rng.integers(0, 32000, 2048).astype(np.int32)))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*operands))
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            times[name].append(time.perf_counter() - start)
    ratio = np.median([a / b for a, b in zip(times["chunked"], times["plain"], strict=True)])
    memory = {name: loss_memory(program) for name, program in programs.items()}
    return (
        f"chunked_cross_entropy, value and gradients, float32\n"
        f"  2,048 tokens, 32,000 words: {np.median(times['chunked']):.2f} s, {ratio:.2f} of the plain loss's time "
        f"(goal {LOSS_GOAL})\n"
        f"  8,192 tokens, 128,256 words: {memory['chunked'] / 2**20:.0f} MiB of temporary memory, "
        f"1/{memory['plain'] / memory['chunked']:.0f} of the plain loss's (goal 1/{1 / LOSS_MEMORY_GOAL:.0f})"
    )


def loss_memory(program) -> int:
    """The temporary memory of a compiled loss, in bytes."""
    import jax

    large = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8192, FEATURES), (128256, FEATURES))]
    labels = jax.ShapeDtypeStruct((8192,), np.int32)
    return program.lower(*large, labels).compile().memory_analysis().temp_size_in_bytes


def plain_cross_entropy(hidden, weights, labels):
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(hidden @ weights.T, labels).mean()


class TrainingWorker(Worker):
    """A process that makes a training step for every line that it reads."""

    module = "benchmarks.training"


def work(kind: str, name: str) -> None:
    runs = {"ours": ours, "theirs": theirs, "loop": our_loop}[kind](name)
    for line in sys.stdin:
        what = line.strip()
        if what == "peak":
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
            return
        print(runs[what](), flush=True)


LOOP_STEPS = 3


def packed_batch():
    """A row of packed documents, the same for both implementations."""
    from longspan.train import PackedBatches

    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 30000, rng.integers(64, LONGEST)) for _ in range(64)]
    return PackedBatches(documents, rows=1, length=DECODER_TOKENS)


def ours(name: str):
    import jax

    from longspan.models.graph import HashedGraph
    from longspan.train.placement import place_batch
    from longspan.train.state import initial_state, split_model
    from longspan.train.step import TrainProgram

    model, loss, batch = our_case(name)
    model.train()
    graph, parameters, others = split_model(model)
    optimizer = our_optimizer()
    held = [initial_state(parameters, others, optimizer, jax.random.key(0), None, {})]
    del model, parameters, others
    program, placed = TrainProgram(HashedGraph(graph), loss, optimizer, 1), place_batch(batch, None)

    def run():
        start = time.perf_counter()
        held[0], output = program(held[0], placed, np.int32(0))
        jax.block_until_ready((held[0], output))
        return time.perf_counter() - start

    return dict(run=run, bare=lambda: np.mean([run() for _ in range(LOOP_STEPS)]))


def our_loop(name: str):
    from longspan import train

    model, loss, _ = our_case(name)
    batches = packed_batch()

    class Times(train.Progress):
        def start(self, step, steps):
            self.at = []

        def step(self, record):
            self.at.append(time.perf_counter())

    def fit(**given):
        times = Times()
        with tempfile.TemporaryDirectory() as out:
            optimizer = our_optimizer()
            # The end of the first step to the end of the last one, before it is saved.
            train.fit(model, batches, loss, optimizer, steps=LOOP_STEPS + 1, out=out, progress=times, **given)
        return (times.at[-1] - times.at[0]) / LOOP_STEPS

    bare = ours(name)["bare"]
    # Of the checkpoints after 2 and 4 steps, the first one is written between the two moments.
    return dict(bare=bare, loop=lambda: fit(save_every=1000), saving=lambda: fit(save_every=2, keep=1))


def our_optimizer():
    from longspan import train

    if not hasattr(our_optimizer, "made"):
        our_optimizer.made = train.adamw(LEARNING_RATE, steps=10_000, weight_decay=WEIGHT_DECAY, clip=None)
    return our_optimizer.made


def our_case(name: str):
    """The model, its loss and a batch."""
    from flax import nnx

    from longspan import models

    if name == "decoder":
        model = models.CausalLM(models.MistralConfig(**DECODER), rngs=nnx.Rngs(0))
        return model, language_model_loss, packed_batch()(0)
    config = our_config(name, LONGFORMER_TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = models.SequenceClassifier(config, rngs=nnx.Rngs(0))
    batch = dict(
        input_ids=ids_of(1, LONGFORMER_TOKENS).astype(np.int32),
        global_attention_mask=first_tokens(LONGFORMER_TOKENS, 1).astype(np.int32),
        labels=np.ones(1, np.int32),
    )
    return model, classification_loss, batch


def language_model_loss(model, batch, key):
    import longspan as ls

    inputs = {name: batch[name] for name in ("input_ids", "segment_ids", "positions")}
    hidden = model(**inputs, logits=False).last_hidden_state
    return ls.chunked_cross_entropy(hidden, model.head.kernel[...].T, batch["labels"])


def classification_loss(model, batch, key):
    import optax

    logits = model(batch["input_ids"], global_attention_mask=batch["global_attention_mask"], rngs=key).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def theirs(name: str):
    import torch
    import transformers

    torch.manual_seed(0)
    if name == "decoder":
        config = transformers.MistralConfig(**DECODER, attn_implementation="sdpa", use_cache=False)
        model, batch = transformers.MistralForCausalLM(config), packed_batch()(0)
        # Positions that restart tell the model where documents start. `labels` are shifted by the model.
        inputs = dict(input_ids=batch["input_ids"], position_ids=batch["positions"])
        starts = batch["positions"] == 0
        inputs["labels"] = np.where(starts | (batch["segment_ids"] < 0), -100, batch["input_ids"])
    else:
        config = transformers.LongformerConfig(
            **SIZES[name], max_position_embeddings=LONGFORMER_TOKENS + 2, attention_window=512, pad_token_id=1,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = transformers.LongformerForSequenceClassification(config)
        mask = first_tokens(LONGFORMER_TOKENS, 1)
        inputs = dict(input_ids=ids_of(1, LONGFORMER_TOKENS), global_attention_mask=mask, labels=np.ones(1))
    model.train()
    tensors = {name: torch.from_numpy(np.asarray(x, np.int64)) for name, x in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def run():
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(**tensors).loss
        loss.backward()
        optimizer.step()
        loss.item()
        return time.perf_counter() - start

    return dict(run=run)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(*sys.argv[sys.argv.index("--worker") + 1 :])
    else:
        main()
