"""`longspan explain`: the engine, tiles, FLOPs and bytes of a call of `attention`, without running it."""

import dataclasses
from typing import Annotated

import typer

from longspan.cli.expressions import parse
from longspan.cli.library import library
from longspan.cli.options import KEYS, MAX_LENGTH, MAX_PLANNED, AsJson, Expression, print_json


def explain(
    expression: Expression,
    shape: Annotated[
        str, typer.Option(help="Shape of the queries: batch, tokens, heads, head size, such as 1,4096,8,64.")
    ],
    keys: Annotated[int | None, typer.Option("-S", "--keys", min=0, max=MAX_PLANNED, help=KEYS)] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LENGTH, help="Number of key/value heads; by default the number of query heads."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the arrays: float32, bfloat16, float16 or float64.")] = "float32",
    engine: Annotated[str, typer.Option(help="Name of an engine; auto chooses one.")] = "auto",
    chip: Annotated[
        str | None,
        typer.Option(
            help="Also print the memory and the copies of the kernels of pallas_tpu for this kind of TPU: v4, v5e, "
            "v5p, v6e or tpu7x. No TPU is needed."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print how attention would run: the engine and why, tiles, FLOPs, bytes."""
    B, T, N, H = _sizes(shape)
    ls = library()
    mask = parse(expression, T)
    import jax

    from longspan.checks import FLOATS, check_choice

    check_choice("--dtype", dtype, FLOATS)
    if keys is None:
        keys = T
    if kv_heads is None:
        kv_heads = N
    q = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    k = jax.ShapeDtypeStruct((B, keys, kv_heads, H), dtype)
    report = ls.explain(q, k, k, mask=mask, engine=engine, chip=chip)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print(report)


def _sizes(shape: str) -> list[int]:
    """The four numbers of a shape, separated by commas, x or spaces, with or without brackets."""
    words = shape.strip("()[] ").replace(",", " ").replace("x", " ").split()
    if len(words) != 4 or not all(word.isascii() and word.isdigit() and len(word) < 12 for word in words):
        raise ValueError(
            f"--shape must be four numbers (batch, tokens, heads, head size), such as 1,4096,8,64, got {shape!r}."
        )
    sizes = [int(word) for word in words]
    if sizes[1] > MAX_PLANNED:
        raise ValueError(f"--shape: the number of tokens must be at most {MAX_PLANNED:,}, got {sizes[1]:,}.")
    return sizes
