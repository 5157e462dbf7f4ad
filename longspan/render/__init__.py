"""Pictures of masks.

One grid of cells (`grid`), how much of each is allowed (`shares`) and the documents along its edges (`bands`) are
brought together (`picture`; of a layout's tiles: `tiles`) and drawn (`text`, `html`, `plot`). `notebook` is what
notebooks show by themselves.
"""

from longspan.render.grid import Grid as Grid
from longspan.render.grid import grid_of as grid_of
from longspan.render.text import draw as draw
from longspan.render.text import lines as lines
