"""`longspan bench`: how long attention takes here, by engine and length, beside what else is installed."""

import datetime
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.expressions import parse
from longspan.cli.files import check_writable, written
from longspan.cli.notices import compiling, say
from longspan.cli.options import LONGEST, PLANNED, AsJson, print_json
from longspan.optional import needs

Rows = list[dict[str, Any]]


def bench(
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="The mask.")] = "Causal() & Window(255, 0)",
    lengths: Annotated[str, typer.Option("-T", "--lengths", help="Numbers of tokens.")] = "512,1024,2048",
    heads: Annotated[int, typer.Option(min=1, max=LONGEST, help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, max=LONGEST, help="Size of a head.")] = 64,
    engine: Annotated[list[str] | None, typer.Option(help="An engine; may be repeated. All by default.")] = None,
    peers: Annotated[bool, typer.Option(help="Time other libraries too, where they are installed.")] = True,
    backward: Annotated[bool, typer.Option("--backward", help="Time the gradients, with the forward pass.")] = False,
    rounds: Annotated[int, typer.Option(min=1, max=10**6, help="Rounds; the median counts.")] = 3,
    save: Annotated[
        Path | None,
        typer.Option(help="Write JSON into this directory, named by machine, versions and date.", file_okay=False),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="JSON of an earlier run, to compare with.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time and memory by length (.png, .svg).", dir_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time attention on this machine, by engine and by length."""
    numbers = _lengths(lengths)
    _check_memory(max(numbers), heads, head_dim)
    before = None if compare is None else _earlier(compare)
    if save is not None and not save.is_dir():
        raise ValueError(f"--save: {save} is not a directory.")
    _check_plot(plot)
    chosen = _engines(engine)
    rows: Rows = []
    for length in numbers:
        rows += _measured(expression, length, (heads, head_dim, backward), chosen, peers, rounds, quiet=as_json)
    from longspan.cli.timing import machine

    report = dict(
        machine=machine(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        mask=expression,
        heads=heads,
        head_dim=head_dim,
        backward=backward,
        rows=rows,
    )
    if before is not None:
        _compare(report, before)
    if as_json:
        print_json(report)
    else:
        print(_text(report, compared=before is not None))
    if save is not None:
        path = save / file_name(report)
        with written(path) as new:
            new.write_text(json.dumps(report, indent=2), "utf-8")
        say(f"wrote {path}")
    if plot is not None:
        _draw(report, plot)
        say(f"wrote {plot}")


def _lengths(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and 0 < int(word[:12]) <= PLANNED for word in words):
        raise ValueError(
            f"--lengths must be numbers of tokens from 1 to {PLANNED:,} between commas, such as 512,1024, got "
            f"{text[:80]!r}."
        )
    return [int(word) for word in words]


def _check_memory(length: int, heads: int, head_dim: int) -> None:
    """q, k and v fit into memory, before anything is made: a system may promise more than it has."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 3 * 4 * length * heads * head_dim
    if needed > there:
        raise ValueError(
            f"q, k and v of {length:,} tokens, {heads:,} heads of {head_dim:,}, take {needed / 1e9:,.0f} GB, and this "
            f"machine has {there / 1e9:,.0f} GB. Give fewer tokens, heads, or a smaller head size."
        )


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    needs("--plot", "matplotlib", extra="plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot: {path} must end in .png, .svg or .pdf.")
    check_writable(path)


def _engines(names: list[str] | None) -> list[str]:
    from longspan.cli.library import library

    library()
    from longspan.checks import check_choice
    from longspan.engines import ENGINES

    for name in names or ():
        check_choice("--engine", name, tuple(ENGINES))
    return list(dict.fromkeys(names or ENGINES))


def _measured(
    expression: str,
    length: int,
    sizes: tuple[int, int, bool],
    engines: list[str],
    peers: bool,
    rounds: int,
    *,
    quiet: bool,
) -> Rows:
    """One row for everybody at one length."""
    from longspan.cli.timing import Problem, contestants, seconds_of

    problem = Problem(parse(expression, length), length, *sizes)
    with compiling(f"attention for {length:,} tokens", quiet=quiet):
        found = contestants(problem, engines, peers=peers)
    seconds = seconds_of({name: who.run for name, who in found.items() if not isinstance(who, str)}, rounds)
    return [
        dict(length=length, name=name, seconds=None, temporary_bytes=None, left_out=who)
        if isinstance(who, str)
        else dict(length=length, name=name, seconds=seconds[name], temporary_bytes=who.temporary_bytes, left_out=None)
        for name, who in found.items()
    ]


def _earlier(path: Path) -> dict[tuple[int, str], float]:
    """The seconds of an earlier run by length and name."""
    try:
        content = json.loads(path.read_text("utf-8"))
        rows = [(row["length"], row["name"], row["seconds"]) for row in content["rows"]]
        return {(int(length), str(name)): float(seconds) for length, name, seconds in rows if seconds is not None}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"--compare: {path} is not what `longspan bench --save` wrote.") from error


def _compare(report: dict[str, Any], before: dict[tuple[int, str], float]) -> None:
    for row in report["rows"]:
        then = before.get((row["length"], row["name"]))
        row["times_as_fast"] = None if then is None or row["seconds"] is None else then / row["seconds"]


def file_name(report: dict[str, Any]) -> str:
    """A name that says where, with what and when."""
    where = report["machine"]
    words = (where["cpu"], f"{where['cores']}-cores", f"longspan-{where['longspan']}", f"jax-{where['jax']}")
    return "-".join(re.sub(r"[^\w.]+", "-", str(word)).strip("-") for word in (*words, report["date"])) + ".json"


def _text(report: dict[str, Any], *, compared: bool) -> str:
    where = report["machine"]
    passes = "forward and backward" if report["backward"] else "forward"
    head = [
        f"{report['mask']}, {report['heads']} heads of {report['head_dim']}, float32, {passes}",
        f"{where['cpu']}, {where['cores']} cores; longspan {where['longspan']}, jax {where['jax']}; {report['date']}",
        "",
    ]
    columns = ["tokens", "", "ms", "temporary MB", *(["times as fast"] if compared else [])]
    cells = [columns, *([*_cells(row), *([_ratio(row)] if compared else [])] for row in report["rows"])]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    left_out = {row["name"]: row["left_out"] for row in report["rows"] if row["left_out"]}
    return "\n".join([*head, *lines, *(f"{name}: {why}" for name, why in left_out.items())])


def _cells(row: dict[str, Any]) -> list[str]:
    time = "-" if row["seconds"] is None else f"{1e3 * row['seconds']:.2f}"
    memory = "-" if row["temporary_bytes"] is None else f"{row['temporary_bytes'] / 1e6:.1f}"
    return [f"{row['length']:,}", row["name"], time, memory]


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["times_as_fast"]
    return "-" if ratio is None else f"{ratio:.2f}"


def _draw(report: dict[str, Any], path: Path) -> None:
    """Time and memory against the number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{report['mask']}\n{report['machine']['cpu']}", fontsize=9)
    lengths = sorted({row["length"] for row in report["rows"]})
    for axes, field, unit, label in zip(
        figure.subplots(1, 2), ("seconds", "temporary_bytes"), (1e3, 1e-6), ("ms", "temporary MB"), strict=True
    ):
        for name in dict.fromkeys(row["name"] for row in report["rows"]):
            points = [
                (row["length"], unit * row[field]) for row in report["rows"] if row["name"] == name and row[field]
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xticks(lengths, labels=[f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    with written(path) as new:
        figure.savefig(new, format=path.suffix[1:], dpi=150)
