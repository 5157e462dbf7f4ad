"""The mask algebra: rules for who may attend to whom, composed with `&`, `|` and `~`.

`side` says how a rule sees tokens and tiles, `base` holds `Mask` and the algebra, `numbers` the rules that compare
positions, `arrays` those that read arrays aligned with slots, `compose` those made of others.
"""

from longspan.masks.arrays import Blocks as Blocks
from longspan.masks.arrays import Dense as Dense
from longspan.masks.arrays import Global as Global
from longspan.masks.arrays import KvLengths as KvLengths
from longspan.masks.arrays import Segments as Segments
from longspan.masks.arrays import TokenTypes as TokenTypes
from longspan.masks.base import And as And
from longspan.masks.base import Mask as Mask
from longspan.masks.base import Not as Not
from longspan.masks.base import Or as Or
from longspan.masks.base import rule as rule
from longspan.masks.compose import Custom as Custom
from longspan.masks.compose import PerHead as PerHead
from longspan.masks.numbers import Band as Band
from longspan.masks.numbers import Causal as Causal
from longspan.masks.numbers import Chunk as Chunk
from longspan.masks.numbers import Empty as Empty
from longspan.masks.numbers import Full as Full
from longspan.masks.numbers import Prefix as Prefix
from longspan.masks.numbers import Window as Window
