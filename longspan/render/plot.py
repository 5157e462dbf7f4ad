"""Pictures by matplotlib, for papers and files: `Mask.plot`. It is imported when somebody plots."""

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
FAINTEST = 0.25  # how far from white the least share is drawn


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
    tiles = None
    if tile is not None:
        sizes = tile if isinstance(tile, tuple) else (tile, tile)
        tiles = tiles_of(
            plan_layout(mask, q_len, kv_len, *sizes, **positions, xp=np), batch=batch, head=head, max_cells=max_cells
        )
    across, down = len(picture.panels), 1 if tiles is None else 2
    figure = _figure(across, down)
    figure.suptitle(_title(picture, wide=across > 1), fontsize=9)
    grid = figure.subplots(down, across, squeeze=False)
    for panel, axes in zip(picture.panels, grid[0], strict=True):
        image = _image(axes, _shades(panel.share, panel.grid.some, panel.grid.every), picture)
        axes.set_title("" if panel.head is None else f"head {panel.head}", fontsize=9)
    _scale(figure, image, grid[0])
    if tiles is not None:
        for levels, axes in zip(tiles.levels, grid[1], strict=True):
            _tiles(axes, levels, tiles)
        _legend(figure, tiles, columns=3 if across > 1 else 1)
    return figure


def _title(picture: Picture, *, wide: bool) -> str:
    """The rule and the caption, broken where there is one panel to be as wide as."""
    rule = "\n".join(textwrap.wrap(picture.title, 120 if wide else 58, break_long_words=False))
    return f"{rule}\n{picture.facts if wide else _broken(picture.facts)}"


def _broken(facts: str) -> str:
    return "\n".join(textwrap.wrap(facts, 58))


def _figure(across: int, down: int) -> "Figure":
    """A figure that no list of open ones holds on to, and that notebooks show also where pyplot was never imported."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class MaskFigure(Figure):
        def _repr_png_(self) -> bytes:
            import io

            file = io.BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

    size = (INCHES * (1 if across == 1 else 0.75) * across + 1.2, INCHES * (1 if across == 1 else 0.75) * down + 0.9)
    figure = MaskFigure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _shades(share: np.ndarray, some: np.ndarray, every: np.ndarray) -> np.ndarray:
    """What is drawn of each share: none and all are only what is none and all."""
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
    # The last cell of a ragged length reaches past the end of the axes.
    extent = (0, max(columns, 1) * picture.kv_cell, max(rows, 1) * picture.q_cell, 0)
    image = axes.imshow(
        values if values.size else np.zeros((1, 1)), extent=extent, interpolation="nearest", aspect="auto", **colours
    )
    axes.set_xlim(0, max(picture.kv_len, 1))
    axes.set_ylim(max(picture.q_len, 1), 0)
    axes.set_box_aspect(min(4.0, max(0.25, picture.q_len / picture.kv_len)) if picture.q_len and picture.kv_len else 1)
    for axis, length in ((axes.xaxis, picture.kv_len), (axes.yaxis, picture.q_len)):
        places = ticks(length)
        axis.set_ticks(places, labels=[f"{at:,}" for at in places], fontsize=8)
    axes.set_xlabel("keys", fontsize=8)
    axes.set_ylabel("queries", fontsize=8)
    return image


def _bands(axes: "Axes", bands: Bands) -> None:
    """Documents along the left and the upper edge."""
    for names, is_query in ((bands.q, True), (bands.kv, False)):
        if not names:
            continue
        paints = np.array([[*_rgb(paint), 1.0] if (paint := colour(name)) else [0.0] * 4 for name in names])
        place = (-0.035, 0, 0.022, 1) if is_query else (0, 1.013, 1, 0.022)
        strip = axes.inset_axes(place)
        strip.imshow(paints[:, None] if is_query else paints[None], aspect="auto", interpolation="nearest")
        strip.set_axis_off()
    axes.tick_params(axis="y", pad=14)


def _scale(figure: "Figure", image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=list(axes), shrink=0.7, pad=0.02, ticks=[5e-4, 0.25, 0.5, 0.75, 1.0], extend="min")
    bar.ax.set_yticklabels(["few", "25%", "50%", "75%", "all"], fontsize=8)
    bar.set_label("share of pairs allowed (white: none)", fontsize=8)


def _tiles(axes: "Axes", levels: np.ndarray, tiles: TilePicture) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(["white", *(_over_white(ink) for ink in KINDS.values())])
    _drawn(axes, levels, tiles, cmap=colours, vmin=-0.5, vmax=2.5)
    if max(levels.shape) <= 48:
        for axis, length, cell in ((axes.xaxis, tiles.kv_len, tiles.kv_cell), (axes.yaxis, tiles.q_len, tiles.q_cell)):
            axis.set_ticks(range(0, length, cell), minor=True)
        axes.grid(which="minor", color="0.8", linewidth=0.5)
        axes.tick_params(which="minor", length=0)


def _over_white(ink: Ink) -> tuple[float, float, float]:
    red, green, blue = (1 - ink.opacity * (1 - part) for part in _rgb(ink.colour))
    return red, green, blue


def _legend(figure: "Figure", tiles: TilePicture, columns: int) -> None:
    from matplotlib.patches import Patch

    names = [("EMPTY: not visited", _rgb("white"))]
    for name, ink in zip(("PARTIAL", "FULL"), KINDS.values(), strict=True):
        names.append((f"{name}: {ink.meaning}", _over_white(ink)))
    patches = [Patch(facecolor=paint, edgecolor="0.6", label=name) for name, paint in names]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=columns, fontsize=8, title=tiles.facts, title_fontsize=8
    )
