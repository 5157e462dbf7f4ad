"""Pictures by matplotlib, for papers and files: `Mask.plot`. matplotlib is imported only when a mask is plotted."""

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.checks import check_static_size
from longspan.layout import plan_layout
from longspan.masks import Mask
from longspan.optional import needs
from longspan.render.bands import Bands, colour
from longspan.render.html import BLUE, KINDS, Ink
from longspan.render.picture import Picture, picture_of, ticks
from longspan.render.tiles import TilePicture, tiles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = 4.0  # along a panel
FAINTEST = 0.25  # opacity of the smallest share
MAX_LINED = 48  # tiles along a side, up to which lines are drawn between tiles


def plot(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 0,
    head: int | None = None,
    tile: int | tuple[int, int] | None = None,
    max_cells: int = 256,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> "Figure":
    """A mask as a figure, see `Mask.plot`."""
    needs("Mask.plot", "matplotlib", extra="plot")
    positions = dict(q_positions=q_positions, kv_positions=kv_positions)
    max_cells = check_static_size("max_cells", max_cells, 1)
    cells = max(1, -(-q_len // max_cells), -(-kv_len // max_cells))
    picture = picture_of(mask, q_len, kv_len, cells=cells, batch=batch, head=head, **positions)
    tiles, down = None, 1
    if tile is not None:
        sizes = tile if isinstance(tile, tuple) else (tile, tile)
        layout = plan_layout(mask, q_len, kv_len, *sizes, **positions, xp=np)
        tiles, down = tiles_of(layout, batch=batch, head=head, max_cells=max_cells), 2
    across = len(picture.panels)
    figure = _figure(across, down)
    figure.suptitle(_title(picture), fontsize=9)
    grid = figure.subplots(down, across, squeeze=False)
    for panel, axes in zip(picture.panels, grid[0], strict=True):
        image = _image(axes, _shades(panel.share, panel.grid.some, panel.grid.every), picture)
        if panel.head is not None:
            axes.set_title(f"head {panel.head}", fontsize=9)
    _scale(figure, image, grid[0])
    if tiles is not None:
        for levels, axes in zip(tiles.levels, grid[1], strict=True):
            _tiles(axes, levels, tiles)
        _legend(figure, tiles)
    return figure


def _title(picture: Picture) -> str:
    """The rule and the caption, in lines as wide as the panels."""
    if len(picture.panels) > 1:
        rule, facts = textwrap.wrap(picture.title, 120, break_long_words=False), [picture.facts]
    else:
        rule, facts = textwrap.wrap(picture.title, 58, break_long_words=False), textwrap.wrap(picture.facts, 58)
    return "\n".join([*rule, *facts])


def _figure(across: int, down: int) -> "Figure":
    """A figure that pyplot does not keep open, and that notebooks display even if pyplot was never imported."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class MaskFigure(Figure):
        def _repr_png_(self) -> bytes:
            import io

            file = io.BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

    side = INCHES if across == 1 else 0.75 * INCHES
    figure = MaskFigure(figsize=(side * across + 1.2, side * down + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _shades(share: np.ndarray, some: np.ndarray, every: np.ndarray) -> np.ndarray:
    """The shade of each share: 0 and 1 only where no pair or every pair is allowed."""
    return np.where(every, 1.0, np.where(some, np.clip(share, 1e-3, 0.98), 0.0))


def _image(axes: "Axes", shades: np.ndarray, picture: Picture) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("longspan", [(0.0, _over_white(Ink(BLUE, FAINTEST))), (1.0, BLUE)])
    ramp = ramp.with_extremes(under="white")
    image = _drawn(axes, shades, picture, cmap=ramp, vmin=5e-4, vmax=1.0)
    if picture.bands is not None:
        _bands(axes, picture.bands)
    return image


def _rgb(name: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(name)


def _drawn(axes: "Axes", values: np.ndarray, picture: Picture | TilePicture, **colours: Any) -> Any:
    """Cells with token numbers along the edges."""
    rows, columns = values.shape
    # The last cell of a side may extend past the end of the axes.
    extent = (0, max(columns, 1) * picture.kv_cell, max(rows, 1) * picture.q_cell, 0)
    if not values.size:
        values = np.zeros((1, 1))
    image = axes.imshow(values, extent=extent, interpolation="nearest", aspect="auto", **colours)
    axes.set_xlim(0, max(picture.kv_len, 1))
    axes.set_ylim(max(picture.q_len, 1), 0)
    aspect = 1.0
    if picture.q_len and picture.kv_len:
        aspect = min(4.0, max(0.25, picture.q_len / picture.kv_len))
    axes.set_box_aspect(aspect)
    for axis, length in ((axes.xaxis, picture.kv_len), (axes.yaxis, picture.q_len)):
        places = ticks(length)
        axis.set_ticks(places, labels=[f"{at:,}" for at in places], fontsize=8)
    axes.set_xlabel("keys", fontsize=8)
    axes.set_ylabel("queries", fontsize=8)
    return image


def _bands(axes: "Axes", bands: Bands) -> None:
    """Segment ids as coloured bands, at the left for queries and on top for keys."""
    if bands.q:
        _strip(axes, (-0.035, 0.0, 0.022, 1.0), _paints(bands.q)[:, None])
    if bands.kv:
        _strip(axes, (0.0, 1.013, 1.0, 0.022), _paints(bands.kv)[None])
    axes.tick_params(axis="y", pad=14)


def _strip(axes: "Axes", place: tuple[float, float, float, float], paints: np.ndarray) -> None:
    strip = axes.inset_axes(place)
    strip.imshow(paints, aspect="auto", interpolation="nearest")
    strip.set_axis_off()


def _paints(ids: list[int | None]) -> np.ndarray:
    """The colours [cells, 4] of ids, transparent for padding."""
    paints = np.zeros((len(ids), 4))
    for number, cell_id in enumerate(ids):
        name = colour(cell_id)
        if name is not None:
            paints[number] = (*_rgb(name), 1.0)
    return paints


def _scale(figure: "Figure", image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=list(axes), shrink=0.7, pad=0.02, ticks=[5e-4, 0.25, 0.5, 0.75, 1.0], extend="min")
    bar.ax.set_yticklabels(["few", "25%", "50%", "75%", "all"], fontsize=8)
    bar.set_label("share of pairs allowed (white: none)", fontsize=8)


def _tiles(axes: "Axes", levels: np.ndarray, tiles: TilePicture) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(["white", *(_over_white(ink) for ink in KINDS.values())])
    _drawn(axes, levels, tiles, cmap=colours, vmin=-0.5, vmax=2.5)
    if max(levels.shape) <= MAX_LINED:
        for axis, length, cell in ((axes.xaxis, tiles.kv_len, tiles.kv_cell), (axes.yaxis, tiles.q_len, tiles.q_cell)):
            axis.set_ticks(range(0, length, cell), minor=True)
        axes.grid(which="minor", color="0.8", linewidth=0.5)
        axes.tick_params(which="minor", length=0)


def _over_white(ink: Ink) -> tuple[float, float, float]:
    """The colour of an ink on white paper."""
    red, green, blue = 1 - ink.opacity * (1 - np.array(_rgb(ink.colour)))
    return float(red), float(green), float(blue)


def _legend(figure: "Figure", tiles: TilePicture) -> None:
    from matplotlib.patches import Patch

    names = [("EMPTY: not visited", _rgb("white"))]
    for name, ink in zip(("PARTIAL", "FULL"), KINDS.values(), strict=True):
        names.append((f"{name}: {ink.meaning}", _over_white(ink)))
    patches = [Patch(facecolor=paint, edgecolor="0.6", label=name) for name, paint in names]
    columns = 3 if len(tiles.heads) > 1 else 1
    figure.legend(
        handles=patches, loc="outside lower center", ncols=columns, fontsize=8, title=tiles.facts, title_fontsize=8
    )
