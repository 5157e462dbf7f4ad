"""`longspan demo`: a demonstration of Longspan on this machine, in under three minutes on two cores."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import typer

from longspan.cli.comparison import PARTS, Comparison, compare_with_dense
from longspan.cli.info import facts_of_machine
from longspan.cli.library import library
from longspan.cli.notices import DelayedStream, compiling
from longspan.cli.stage import Stage
from longspan.cli.timing import machine
from longspan.optional import needs

DEVICES = 8
PROMPT = b"def main(self):\n    "


class DemoSizes(NamedTuple):
    """The sizes of the demo's parts."""

    tokens: int = 32_768  # of the comparison with dense attention, and of the plan for devices
    window: int = 512  # keys in the decoder mask's window, with the query's own
    document_tokens: int = 4096  # of the encoder's documents
    encoder_window: int = 32  # keys on each side of a query in the encoder
    steps: int = 40  # of the encoder's training
    decoder_width: int = 128
    answer_bytes: int = 600  # that the decoder generates


TOY = DemoSizes(
    tokens=512, window=32, document_tokens=128, encoder_window=4, steps=40, decoder_width=16, answer_bytes=20
)


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures; by default a new folder, longspan-demo.", file_okay=False),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Training time of the decoder, in seconds.")] = 60.0,
    toy: Annotated[bool, typer.Option("--toy", help="Use small sizes, to check that everything runs.")] = False,
) -> None:
    """Demonstrate Longspan on this machine: masks, 32k tokens, an encoder, a decoder, eight devices."""
    start, sizes = time.perf_counter(), TOY if toy else DemoSizes()
    stage = Stage(_folder(out))
    ls = library()
    mask = ls.Causal() & (ls.Window(sizes.window - 1, 0) | ls.Prefix(4))
    _machine(stage)
    _masks(stage, mask, sizes)
    _comparison(stage, mask, sizes)
    _clues(stage, sizes)
    _decoder(stage, sizes, seconds)
    _devices(stage, mask, sizes)
    _next(stage)
    stage.say(f"\nThe demo took {time.perf_counter() - start:.0f} s.")
    if stage.failed:
        stage.say(f"{len(stage.failed)} of the demo's claims did not hold: {'; '.join(stage.failed)}.")
        raise typer.Exit(1)


def _folder(wanted: Path | None) -> Path:
    """The folder for pictures: the given one, or a new one in the current directory."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    number, path = 1, Path("longspan-demo")
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = Path(f"longspan-demo-{number}")


def _machine(stage: Stage) -> None:
    stage.title("This machine")
    where, facts = machine(), facts_of_machine()
    stage.say(f"{where['cpu']}, {where['cores']} cores; {', '.join(facts['devices'])}")
    stage.say(f"longspan {where['longspan']}, jax {where['jax']}, Python {where['python']}")
    for name, status in facts["engines"].items():
        stage.say(f"  engine {name:<10} {status}")
    if facts["instruction_sets"]:
        stage.say(f"  instruction sets of the cpu engine: {', '.join(facts['instruction_sets'])}")


def _masks(stage: Stage, mask: Any, sizes: DemoSizes) -> None:
    """Draws four masks."""
    ls = library()
    import numpy as np

    length = min(4096, sizes.tokens)
    block = length // 32
    documents = np.repeat(np.arange(5), [length // 4, length // 8, length // 2, length // 16, length // 16])
    random = ls.bigbird_random_blocks(length, block_size=block, num_random_blocks=3, num_heads=2, seed=0)
    masks = {
        "decoder": ("Decoder: a window and the first four tokens", mask),
        "documents": ("Five documents packed in one row, causal", ls.Causal() & ls.Segments(documents[None])),
        "encoder": ("Longformer: windows and one global token", ls.Window(block, block) | ls.Global((0,))),
        "bigbird": (
            "BigBird: window, global and random blocks",
            ls.bigbird(length, block_size=block, rand_attn=random),
        ),
    }
    stage.title(f"Masks, drawn from their rules ({length:,} tokens)")
    for name, (sentence, rule) in masks.items():
        stage.say(f"{sentence}.\n")
        head = dict(head=0) if name == "bigbird" else {}
        stage.say(rule.show(length, length, max_cells=16, **head))
        stage.draw(name, rule, length, tile=block)
        stage.say()
    stage.say("Open this page in a browser to see why a pair is allowed, what the mask costs, and what a cache keeps:")
    stage.explore("explorer", mask, length)


def _comparison(stage: Stage, mask: Any, sizes: DemoSizes) -> None:
    """Compares sparse with dense attention: time, memory and results."""
    from rich.table import Table

    stage.title(f"Sparse and dense attention over {sizes.tokens:,} tokens")
    stage.say(f"{mask!r}, one head of size 64, float32\n")
    with (
        compiling(f"sparse and dense attention for {sizes.tokens:,} tokens") as compiled,
        stage.progress("computing dense attention", PARTS) as update,
    ):
        result = compare_with_dense(mask, sizes.tokens, lambda done: (compiled(), update(completed=done)))
    table = Table("", "time", "memory", "error")
    for one in (result.dense, result.sparse):
        table.add_row(one.name, f"{1e3 * one.seconds:,.1f} ms", f"{one.bytes / 1e6:,.1f} MB", f"{one.error:.1e}")
    stage.console.print(table)
    stage.say('Column "memory": the temporary memory of the compiled program, without q, k, v and the result. Dense')
    stage.say("attention ran on one part of the queries after another. Its memory is that of a program for all queries")
    stage.say("at once, which was compiled but not run.")
    stage.say('Column "error": the largest difference from attention that NumPy computes in float64, for 64 of the')
    stage.say("queries.\n")
    speedup = result.dense.seconds / max(result.sparse.seconds, 1e-9)
    saving = result.dense.bytes / max(result.sparse.bytes, 1e-9)
    stage.say(f"Sparse attention takes 1/{speedup:,.0f} of the time and 1/{saving:,.0f} of the memory.")
    claim = f"sparse and dense attention differ by at most {result.difference:.0e} over all {sizes.tokens:,} tokens"
    stage.check(claim, _agree(result))


def _agree(result: Comparison) -> bool:
    """Whether both are as exact as float32 allows; False for NaN."""
    return result.sparse.error <= 2e-6 and result.difference <= 1e-5


def _example(stage: Stage, name: str) -> ModuleType | None:
    """The module examples/NAME.py of a checkout or a wheel; None, after printing the reason, if it cannot be used."""
    try:
        for module in ("flax", "optax"):
            needs("This section", module, extra="flax")
    except ImportError as error:
        stage.say(f"Skipped. {error}")
        return None
    package = Path(__file__).parent.parent
    path = next((p for p in (package.parent, package) if (p / "examples" / f"{name}.py").is_file()), None)
    if path is None:
        stage.say(f"Skipped: this installation has no examples/{name}.py. Checkouts and wheels have it.")
        return None
    spec = importlib.util.spec_from_file_location(f"longspan_demo_{name}", path / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _clues(stage: Stage, sizes: DemoSizes) -> None:
    """Trains an encoder on documents whose class depends on both ends."""
    length, batch = sizes.document_tokens, 4
    stage.title(f"An encoder that needs both ends of {length:,} tokens")
    example = _example(stage, "long_documents")
    if example is None:
        return
    stage.say(
        "Each document starts with one of two topics and ends with one of two verdicts; the rest is random words."
    )
    stage.say("A small Longformer learns to name both. Its first token is global: it attends to the whole document.\n")
    done = iter(range(0, sizes.steps + 10, 10))
    with stage.progress(f"training, {sizes.steps} steps", sizes.steps) as update:
        model = example.fit(
            with_global_token=True, length=length, window=sizes.encoder_window, steps=sizes.steps, batch=batch,
            learning_rate=1e-2, report=lambda line: update(completed=next(done), description=line.strip()),
        )  # fmt: skip
    test = dict(length=length, batch=batch, batches=10)
    with stage.progress("testing on 40 new documents", None):
        with_global = example.accuracy(model, with_global_token=True, **test)
        without = example.accuracy(model, with_global_token=False, **test)
    reach = 2 * sizes.encoder_window
    stage.say(f"Accuracy on new documents: {with_global:.0%}.")
    stage.say(f"Accuracy without the global token, where information travels at most {reach} tokens: {without:.0%}.")
    stage.check("the encoder uses both ends of the documents (accuracy of at least 90%)", with_global >= 0.9)
    stage.check("without the global token the encoder cannot use both ends (accuracy of at most 75%)", without <= 0.75)


def _decoder(stage: Stage, sizes: DemoSizes, seconds: float) -> None:
    """Trains a byte-level decoder, and generates text with a cache of constant size."""
    stage.title(f"A byte-level decoder, trained for {seconds:g} s on the source of Python's standard library")
    example = _example(stage, "byte_decoder")
    if example is None:
        return
    ls = library()
    import jax
    import numpy as np
    from flax import nnx

    config = example.Bytes(hidden_size=sizes.decoder_width, intermediate_size=3 * sizes.decoder_width)
    model = ls.models.CausalLM(config, rngs=nnx.Rngs(0))
    start = time.perf_counter()
    with stage.progress("compiling", seconds) as update:
        report = lambda line, **_: update(completed=time.perf_counter() - start, description=line.strip())  # noqa: E731
        losses = example.train(model, seconds, report)
    last_few = max(1, min(20, len(losses) // 2))
    first, last = losses[0], float(np.mean(losses[-last_few:]))
    stage.say(f"Loss: {first:.2f} bits per byte at the first step, {last:.2f} after {len(losses):,} steps.")
    _draw_losses(stage, losses)
    short, long = model.init_cache(1, 1000), model.init_cache(1, 1_000_000)
    both = f"{short.nbytes / 1e3:,.0f} kB for 1,000 tokens and {long.nbytes / 1e3:,.0f} kB for 1,000,000 tokens"
    stage.say(f"The cache takes {both}:")
    stage.say(f"each layer stores {long[0].k.shape[1]} keys, because later queries attend to no others.")
    stage.check("the cache for 1,000,000 tokens is as large as that for 1,000 tokens", short.nbytes == long.nbytes)
    stage.say("\nThe decoder continues a prompt, byte by byte:\n")
    draws = dict(temperature=0.7, key=jax.random.key(0), stop_tokens=())
    with compiling("the decoder") as compiled:
        stream = DelayedStream(lambda row, byte: stage.letter(byte), 1, compiled)
        stream.waiting += [(0, byte) for byte in PROMPT]  # print the prompt first
        ls.generate(model, [list(PROMPT)], max_new_tokens=sizes.answer_bytes, stream=stream, **draws)
        stream.release()
    stage.say()


def _draw_losses(stage: Stage, losses: list[float]) -> None:
    from longspan.optional import is_installed

    if not is_installed("matplotlib"):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="bits per byte", title="A byte-level decoder")
    axes.grid(alpha=0.3)
    stage.save("training", figure)


def _devices(stage: Stage, mask: Any, sizes: DemoSizes) -> None:
    """Prints the communication between devices that shard the sequence, without running anything."""
    ls = library()
    stage.title(f"The decoder's mask on {DEVICES} devices that shard the {sizes.tokens:,} tokens")
    windowed = ls.parallel.plan(mask, sizes.tokens, DEVICES)
    causal = ls.parallel.plan(ls.Causal(), sizes.tokens, DEVICES)
    stage.say(f"{windowed.show()}\n\n{causal}\n")
    stage.say("A row is the key and the value of one token. The rows that a window sends do not grow with the length.")
    rows = sum(step.rows for step in windowed.steps if step.kind == "columns")
    received = windowed.sent_rows - sum(step.rows for step in windowed.steps if step.kind != "columns")
    stage.say(f"In an all-reduce of {rows} rows over {DEVICES} devices, each device receives {received} rows.")
    stage.check("the devices send fewer rows than for causal attention", windowed.sent_rows < causal.sent_rows)


def _next(stage: Stage) -> None:
    stage.title("Next steps")
    if stage.files:
        stage.say(f"See the pictures and pages in {stage.folder}: {', '.join(stage.files)}")
    for command, purpose in {
        "longspan show 'Causal() & Window(255, 0)' -T 4096": "draw a mask",
        "longspan explore 'Causal() & Window(255, 0)' -T 4096 --html mask.html": "write an interactive page of it",
        "longspan explain 'Causal() & Window(255, 0)' --shape 1,32768,8,64": "print its engine, tiles and FLOPs",
        "longspan bench": "time the engines and other libraries",
        "longspan check DIR": "inspect a Hugging Face checkpoint",
        "longspan --help": "list all commands",
    }.items():
        stage.say(f"  {command:<70}  {purpose}")
