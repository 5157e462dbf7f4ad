"""Pictures of masks.

`grid` finds which cells of a mask hold no, some or only allowed pairs. `shares` counts the allowed pairs of each cell.
`bands` has the segment ids along the edges. `picture` combines the three for a mask, `tiles` for the tiles of a layout.
`text`, `html` and `plot` draw them. `notebook` builds the HTML that notebooks display.
"""

from longspan.render.grid import Grid as Grid
from longspan.render.grid import grid_of as grid_of
from longspan.render.text import draw as draw
from longspan.render.text import lines as lines
