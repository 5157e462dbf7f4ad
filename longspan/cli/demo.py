"""`longspan demo`: what Longspan is for, computed here and now in under three minutes on two cores."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import typer

from longspan.cli.info import facts_of_machine
from longspan.cli.library import library
from longspan.cli.notices import Held, compiling
from longspan.cli.race import PARTS, Race, race
from longspan.cli.stage import Stage
from longspan.cli.timing import machine
from longspan.optional import needs

DEVICES = 8
PROMPT = b"def main(self):\n    "


class Sizes(NamedTuple):
    """How much of everything."""

    tokens: int = 32_768
    window: int = 512  # keys that a token sees, its own included
    document: int = 4096  # tokens that the encoder reads
    near: int = 32  # keys on each side of a token that it sees there
    steps: int = 40
    width: int = 128  # of the decoder
    answer: int = 600  # bytes that it writes


TOY = Sizes(tokens=512, window=32, document=128, near=4, steps=40, width=16, answer=20)


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for pictures; by default a new one, longspan-demo.", file_okay=False),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="How long the decoder is trained.")] = 60.0,
    toy: Annotated[bool, typer.Option("--toy", help="Small sizes: just to see that everything runs.")] = False,
) -> None:
    """Show what this is for: masks, 32k tokens, an encoder, a decoder, eight devices."""
    start, sizes = time.perf_counter(), TOY if toy else Sizes()
    stage = Stage(_folder(out))
    ls = library()
    mask = ls.Causal() & (ls.Window(sizes.window - 1, 0) | ls.Prefix(4))
    _machine(stage)
    _masks(stage, mask, sizes)
    _race(stage, mask, sizes)
    _clues(stage, sizes)
    _decoder(stage, sizes, seconds)
    _devices(stage, mask, sizes)
    _next(stage)
    stage.say(f"\nThis took {time.perf_counter() - start:.0f} s.")
    if stage.failed:
        stage.say(f"{len(stage.failed)} of its claims did not hold: {'; '.join(stage.failed)}.")
        raise typer.Exit(1)


def _folder(wanted: Path | None) -> Path:
    """The folder for pictures: the one that was named, or a new one here."""
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
    for name, said in facts["engines"].items():
        stage.say(f"  engine {name:<10} {said}")
    if facts["instruction_sets"]:
        stage.say(f"  instruction sets of the cpu engine: {', '.join(facts['instruction_sets'])}")


def _masks(stage: Stage, mask: Any, sizes: Sizes) -> None:
    """A rule each, drawn by asking about tiles."""
    ls = library()
    import numpy as np

    length = min(4096, sizes.tokens)
    block = length // 32
    documents = np.repeat(np.arange(5), [length // 4, length // 8, length // 2, length // 16, length // 16])
    random = ls.bigbird_random_blocks(length, block_size=block, num_random_blocks=3, num_heads=2, seed=0)
    masks = {
        "decoder": ("a window and the first four tokens", mask),
        "documents": ("five documents in one row, each to itself", ls.Causal() & ls.Segments(documents[None])),
        "encoder": ("Longformer: windows, and one token for all", ls.Window(block, block) | ls.Global((0,))),
        "bigbird": ("BigBird: random blocks too", ls.bigbird(length, block_size=block, rand_attn=random)),
    }
    stage.title(f"A mask is a rule, and draws itself ({length:,} tokens)")
    for name, (sentence, rule) in masks.items():
        stage.say(f"{name.capitalize()}: {sentence}.\n")
        head = dict(head=0) if name == "bigbird" else {}
        stage.say(rule.show(length, length, max_cells=16, **head))
        stage.draw(name, rule, length, tile=block)
        stage.say()


def _race(stage: Stage, mask: Any, sizes: Sizes) -> None:
    """Sparse against dense."""
    from rich.table import Table

    stage.title(f"{sizes.tokens:,} tokens, sparse against dense")
    stage.say(f"{mask!r}, one head of 64, float32\n")
    with (
        compiling(f"sparse and dense attention for {sizes.tokens:,} tokens") as compiled,
        stage.progress("computing every pair, to compare with", PARTS) as update,
    ):
        result = race(mask, sizes.tokens, lambda done: (compiled(), update(completed=done)))
    table = Table("", "time", "memory", "from float64")
    for one in (result.dense, result.sparse):
        table.add_row(one.name, f"{1e3 * one.seconds:,.1f} ms", f"{one.bytes / 1e6:,.1f} MB", f"{one.error:.1e}")
    stage.console.print(table)
    stage.say(
        "Memory is what XLA reserves for a compiled program besides q, k, v and the result. Dense ran in parts, and"
    )
    stage.say("was compiled, not run, for all tokens at once. Errors are those of some rows, computed by NumPy.\n")
    faster, smaller = (a / max(b, 1e-9) for a, b in zip(result.dense[1:3], result.sparse[1:3], strict=True))
    stage.say(f"Sparse takes 1/{faster:,.0f} of the time and 1/{smaller:,.0f} of the memory.")
    stage.check(f"all {sizes.tokens:,} results are those of dense attention, within {result.apart:.0e}", _agree(result))


def _agree(result: Race) -> bool:
    """Whether both are as exact as float32 makes them: NaN is not."""
    return result.sparse.error <= 2e-6 and result.apart <= 1e-5


def _example(stage: Stage, name: str) -> ModuleType | None:
    """The program examples/NAME.py: of a checkout, or as wheels bring it along; None, and why, if neither is here."""
    try:
        for module in ("flax", "optax"):
            needs("This section", module, extra="flax")
    except ImportError as error:
        stage.say(f"Left out. {error}")
        return None
    package = Path(__file__).parent.parent
    path = next((p for p in (package.parent, package) if (p / "examples" / f"{name}.py").is_file()), None)
    if path is None:
        stage.say(f"Left out: examples/{name}.py is not beside this installation. It is in a checkout and in wheels.")
        return None
    spec = importlib.util.spec_from_file_location(f"longspan_demo_{name}", path / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _clues(stage: Stage, sizes: Sizes) -> None:
    """An encoder whose answer depends on both ends of a document."""
    length, batch = sizes.document, 4
    stage.title(f"An encoder answers from clues at both ends of {length:,} tokens")
    example = _example(stage, "long_documents")
    if example is None:
        return
    stage.say(
        "A document opens with one of two topics and closes with one of two verdicts; in between are random words."
    )
    stage.say("Which of the four is it? A small Longformer learns it here; its first token is global: it reads all.\n")
    done = iter(range(0, sizes.steps + 10, 10))
    with stage.progress(f"training, {sizes.steps} steps", sizes.steps) as update:
        model = example.fit(
            with_global_token=True, length=length, window=sizes.near, steps=sizes.steps, batch=batch,
            learning_rate=1e-2, report=lambda line: update(completed=next(done), description=line.strip()),
        )  # fmt: skip
    test = dict(length=length, batch=batch, batches=10)
    with stage.progress("40 new documents", None):
        right, blind = (example.accuracy(model, with_global_token=yes, **test) for yes in (True, False))
    reach = 2 * sizes.near
    stage.say(
        f"Right on new documents: {right:.0%}. The same model with windows alone, which reach {reach}: {blind:.0%}."
    )
    stage.check("it reads both ends", right >= 0.9)
    stage.check("and only the global token carries it there", blind <= 0.75)


def _decoder(stage: Stage, sizes: Sizes, seconds: float) -> None:
    """A decoder of bytes: trained, then it goes on alone, from a cache that does not grow."""
    stage.title(f"A decoder of bytes, trained for {seconds:g} s on Python's own library")
    example = _example(stage, "byte_decoder")
    if example is None:
        return
    ls = library()
    import jax
    import numpy as np
    from flax import nnx

    config = example.Bytes(hidden_size=sizes.width, intermediate_size=3 * sizes.width)
    model = ls.models.CausalLM(config, rngs=nnx.Rngs(0))
    start = time.perf_counter()
    with stage.progress("compiling", seconds) as update:
        report = lambda line, **_: update(completed=time.perf_counter() - start, description=line.strip())  # noqa: E731
        losses = example.train(model, seconds, report)
    few = max(1, min(20, len(losses) // 2))
    first, last = losses[0], float(np.mean(losses[-few:]))
    stage.say(f"{len(losses)} steps: from {first:.2f} to {last:.2f} bits per byte.")
    _draw_losses(stage, losses)
    kept = [model.init_cache(1, length) for length in (1000, 1_000_000)]
    short, long = (cache.nbytes for cache in kept)
    stage.say(f"Its cache takes {short / 1e3:,.0f} kB for 1,000 tokens and {long / 1e3:,.0f} kB for 1,000,000:")
    stage.say(f"a layer keeps {kept[1][0].k.shape[1]} keys, since its mask will not look at others again.")
    stage.check("the cache of a million tokens is no larger than that of a thousand", short == long)
    stage.say("\nIt goes on from a prompt, byte by byte:\n")
    draws = dict(temperature=0.7, key=jax.random.key(0), stop_tokens=())
    with compiling("the decoder") as compiled:
        held = Held(lambda row, byte: stage.letter(byte), 1, compiled)
        held.waiting += [(0, byte) for byte in PROMPT]  # the text begins with it
        ls.generate(model, [list(PROMPT)], max_new_tokens=sizes.answer, stream=held, **draws)
        held.release()
    stage.say()


def _draw_losses(stage: Stage, losses: list[float]) -> None:
    from longspan.optional import is_installed

    if not is_installed("matplotlib"):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="bits per byte", title="A decoder of bytes")
    axes.grid(alpha=0.3)
    stage.save("training", figure)


def _devices(stage: Stage, mask: Any, sizes: Sizes) -> None:
    """What devices would send each other."""
    ls = library()
    stage.title(f"The same mask on {DEVICES} devices that share the {sizes.tokens:,} tokens")
    ours, all_before = (ls.parallel.plan(rule, sizes.tokens, DEVICES) for rule in (mask, ls.Causal()))
    stage.say(f"{ours.show()}\n\n{all_before}\n")
    stage.say("A row is one token's key and value. What a window sends does not grow with the length.")
    stage.check("less is sent than for causal attention", ours.sent_rows < all_before.sent_rows)


def _next(stage: Stage) -> None:
    stage.title("What to try next")
    if stage.files:
        stage.say(f"Look at the pictures in {stage.folder}: {', '.join(stage.files)}")
    for command, what in {
        "longspan show 'Causal() & Window(255, 0)' -T 4096": "draw a mask of your own",
        "longspan explain 'Causal() & Window(255, 0)' --shape 1,32768,8,64": "what attention would do with it",
        "longspan bench": "engines and other libraries, timed here",
        "longspan check DIR": "look into a checkpoint of Hugging Face's",
        "longspan --help": "all commands",
    }.items():
        stage.say(f"  {command:<70} {what}")
