"""`longspan explain`: what `attention` would do with a mask and a shape."""

import dataclasses
from typing import Annotated

import typer

from longspan.cli.expressions import parse
from longspan.cli.library import library
from longspan.cli.options import KEYS, LONGEST, PLANNED, AsJson, Expression, print_json


def explain(
    expression: Expression,
    shape: Annotated[str, typer.Option(help="Of the queries: batch, tokens, heads, head size, such as 1,4096,8,64.")],
    keys: Annotated[int | None, typer.Option("-S", "--keys", min=0, max=PLANNED, help=KEYS)] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=LONGEST, help="Key/value heads; as many as query heads by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    engine: Annotated[str, typer.Option(help="auto, or the name of an engine.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Say what attention would do: the engine and why, tiles, FLOPs, bytes."""
    B, T, N, H = _sizes(shape)
    ls = library()
    mask = parse(expression, T)
    import jax

    from longspan.checks import FLOATS, check_choice

    check_choice("--dtype", dtype, FLOATS)
    q = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    k = jax.ShapeDtypeStruct((B, T if keys is None else keys, N if kv_heads is None else kv_heads, H), dtype)
    report = ls.explain(q, k, k, mask=mask, engine=engine)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print(report)


def _sizes(shape: str) -> list[int]:
    """The four numbers of a shape, between commas, x or spaces, with or without brackets."""
    words = shape.strip("()[] ").replace(",", " ").replace("x", " ").split()
    if len(words) != 4 or not all(word.isascii() and word.isdigit() and len(word) < 12 for word in words):
        raise ValueError(
            f"--shape must be four numbers, batch, tokens, heads and head size, such as 1,4096,8,64, got {shape!r}."
        )
    sizes = [int(word) for word in words]
    if sizes[1] > PLANNED:
        raise ValueError(f"--shape: {sizes[1]:,} tokens are over {PLANNED:,}. Give at most so many.")
    return sizes
