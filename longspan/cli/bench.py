"""`longspan bench`: the time of attention on this machine, by engine and length, and that of other libraries."""

import datetime
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.expressions import parse
from longspan.cli.notices import compiling, say
from longspan.cli.options import MAX_LENGTH, MAX_PLANNED, AsJson, print_json
from longspan.files import atomic_write, check_writable
from longspan.optional import needs

Rows = list[dict[str, Any]]


def bench(
    expression: Annotated[
        str, typer.Argument(metavar="EXPR", help="The mask, as for `longspan show`.")
    ] = "Causal() & Window(255, 0)",
    lengths: Annotated[
        str, typer.Option("-T", "--lengths", help="Numbers of tokens, separated by commas.")
    ] = "512,1024,2048",
    heads: Annotated[int, typer.Option(min=1, max=MAX_LENGTH, help="Number of heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, max=MAX_LENGTH, help="Size of a head.")] = 64,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Time this engine; may be repeated. By default all engines of this platform are timed."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Also time the other libraries that are installed.")] = True,
    backward: Annotated[bool, typer.Option("--backward", help="Time the forward and the backward pass.")] = False,
    rounds: Annotated[int, typer.Option(min=1, max=10**6, help="Number of timed rounds; the median is printed.")] = 3,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write JSON to this directory, in a file named by machine, versions and date.", file_okay=False
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Compare with the JSON file of an earlier run.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot time and memory by length to this file (.png, .svg, .pdf).", dir_okay=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time attention on this machine, by engine and length."""
    numbers = _read_lengths(lengths)
    _check_memory(max(numbers), heads, head_dim)
    before = None
    if compare is not None:
        before = _read_earlier(compare)
    if save is not None and not save.is_dir():
        raise ValueError(f"--save: {save} is not a directory. Create it, or name another one.")
    _check_plot(plot)
    engines = _check_engines(engine)
    rows: Rows = []
    for length in numbers:
        sizes = (heads, head_dim, backward)
        rows += _measure(expression, length, sizes, engines, peers, rounds, quiet=as_json)
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
        _add_ratios(report, before)
    if as_json:
        print_json(report)
    else:
        print(_table(report, compared=before is not None))
    if save is not None:
        path = save / file_name(report)
        with atomic_write(path) as new:
            new.write_text(json.dumps(report, indent=2), "utf-8")
        say(f"wrote {path}")
    if plot is not None:
        _plot(report, plot)
        say(f"wrote {plot}")


def _read_lengths(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and 0 < int(word[:12]) <= MAX_PLANNED for word in words):
        raise ValueError(
            f"--lengths must be numbers of tokens from 1 to {MAX_PLANNED:,}, separated by commas, such as 512,1024, "
            f"got {text[:80]!r}."
        )
    return [int(word) for word in words]


def _check_memory(length: int, heads: int, head_dim: int) -> None:
    """Refuses sizes of q, k and v that exceed the machine's memory: a system may allocate more than it has."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 3 * 4 * length * heads * head_dim
    if needed > available:
        raise ValueError(
            f"q, k and v of {length:,} tokens and {heads:,} heads of size {head_dim:,} need {needed / 1e9:,.0f} GB, "
            f"but this machine has {available / 1e9:,.0f} GB. Give fewer tokens, fewer heads, or a smaller head size."
        )


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    needs("--plot", "matplotlib", extra="plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot: the file name must end in .png, .svg or .pdf, got {path}.")
    check_writable(path)


def _check_engines(names: list[str] | None) -> list[str]:
    """The engines to time, each once; by default all."""
    from longspan.cli.library import library

    library()
    import jax

    from longspan.checks import check_choice
    from longspan.engines import ENGINES, tried

    for name in names or ():
        check_choice("--engine", name, tuple(ENGINES))
    return list(dict.fromkeys(names or tried(jax.default_backend())))


def _measure(
    expression: str,
    length: int,
    sizes: tuple[int, int, bool],
    engines: list[str],
    peers: bool,
    rounds: int,
    *,
    quiet: bool,
) -> Rows:
    """One row per engine and library, at one length."""
    from longspan.cli.timing import Problem, implementations_of, median_seconds

    problem = Problem(parse(expression, length), length, *sizes)
    with compiling(f"attention for {length:,} tokens", quiet=quiet):
        found = implementations_of(problem, engines, peers=peers)
    seconds = median_seconds({name: one.run for name, one in found.items() if not isinstance(one, str)}, rounds)
    rows: Rows = []
    for name, one in found.items():
        row: dict[str, Any] = dict(length=length, name=name, seconds=None, temporary_bytes=None, left_out=None)
        if isinstance(one, str):
            row |= dict(left_out=one)
        else:
            row |= dict(seconds=seconds[name], temporary_bytes=one.temporary_bytes)
        rows.append(row)
    return rows


def _read_earlier(path: Path) -> dict[tuple[int, str], float]:
    """The seconds of an earlier run, by length and name."""
    try:
        content = json.loads(path.read_text("utf-8"))
        rows = [(row["length"], row["name"], row["seconds"]) for row in content["rows"]]
        return {(int(length), str(name)): float(seconds) for length, name, seconds in rows if seconds is not None}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"--compare: {path} is not a file that `longspan bench --save` wrote.") from error


def _add_ratios(report: dict[str, Any], before: dict[tuple[int, str], float]) -> None:
    """Adds to each row the earlier seconds divided by the new ones."""
    for row in report["rows"]:
        earlier = before.get((row["length"], row["name"]))
        row["times_as_fast"] = None
        if earlier is not None and row["seconds"] is not None:
            row["times_as_fast"] = earlier / row["seconds"]


def file_name(report: dict[str, Any]) -> str:
    """A file name of the machine, the versions and the date."""
    machine = report["machine"]
    words = (machine["cpu"], f"{machine['cores']}-cores", f"longspan-{machine['longspan']}", f"jax-{machine['jax']}")
    return "-".join(re.sub(r"[^\w.]+", "-", str(word)).strip("-") for word in (*words, report["date"])) + ".json"


def _table(report: dict[str, Any], *, compared: bool) -> str:
    machine = report["machine"]
    passes = "forward and backward" if report["backward"] else "forward"
    head = [
        f"{report['mask']}, heads {report['heads']}, head size {report['head_dim']}, float32, {passes}",
        f"{machine['cpu']}, {machine['cores']} cores; longspan {machine['longspan']}, jax {machine['jax']}; "
        f"{report['date']}",
        "",
    ]
    cells = [["tokens", "", "ms", "temporary MB", "times as fast"], *map(_cells, report["rows"])]
    if not compared:
        cells = [row[:-1] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    left_out = {row["name"]: row["left_out"] for row in report["rows"] if row["left_out"]}
    return "\n".join([*head, *lines, *(f"{name}: {why}" for name, why in left_out.items())])


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = [_cell(row["seconds"], 1e3, 2), _cell(row["temporary_bytes"], 1e-6, 1)]
    return [f"{row['length']:,}", row["name"], *numbers, _cell(row.get("times_as_fast"), 1, 2)]


def _cell(number: float | None, unit: float, digits: int) -> str:
    return "-" if number is None else f"{unit * number:.{digits}f}"


def _plot(report: dict[str, Any], path: Path) -> None:
    """Plots time and memory against the number of tokens."""
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
    with atomic_write(path) as new:
        figure.savefig(new, format=path.suffix[1:], dpi=150)
