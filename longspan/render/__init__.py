"""Pictures of masks: one grid of cells (`grid`), and what draws it (`text`)."""

from longspan.render.grid import Grid as Grid
from longspan.render.grid import grid_of as grid_of
from longspan.render.text import draw as draw
from longspan.render.text import lines as lines
