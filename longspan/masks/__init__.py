"""The mask algebra: rules for who may attend to whom, composed with `&`, `|` and `~`.

`sides` says how a rule sees tokens and tiles, `base` what every `Mask` answers, `pytree` what makes it a value, `spans`
how intervals combine. `terms` are numbers of tokens, and `compare` holds one of the query against one of the key: most
rules of `by_position`, `by_slot`, `between` and `packed` are said by it. Others stand in `tables` and `custom`;
`algebra` makes masks of masks, `cut` cuts them to some slots.

Example:
    >>> print((ls.masks.Causal() & ls.masks.Window(1, 0)).show(3, 3))
    #..
    ##.
    .##
"""

from longspan.masks.algebra import And as And
from longspan.masks.algebra import Not as Not
from longspan.masks.algebra import Or as Or
from longspan.masks.algebra import PerHead as PerHead
from longspan.masks.base import Extent as Extent
from longspan.masks.base import Mask as Mask
from longspan.masks.base import rule as rule
from longspan.masks.between import Between as Between
from longspan.masks.by_position import Band as Band
from longspan.masks.by_position import BlockCausal as BlockCausal
from longspan.masks.by_position import Causal as Causal
from longspan.masks.by_position import Chunk as Chunk
from longspan.masks.by_position import Empty as Empty
from longspan.masks.by_position import Full as Full
from longspan.masks.by_position import Prefix as Prefix
from longspan.masks.by_position import Window as Window
from longspan.masks.by_slot import Global as Global
from longspan.masks.by_slot import KvLengths as KvLengths
from longspan.masks.by_slot import QLengths as QLengths
from longspan.masks.by_slot import Segments as Segments
from longspan.masks.by_slot import TokenTypes as TokenTypes
from longspan.masks.compare import Compare as Compare
from longspan.masks.custom import Custom as Custom
from longspan.masks.packed import FirstOfSegment as FirstOfSegment
from longspan.masks.packed import positions_from_segments as positions_from_segments
from longspan.masks.rules import Rule as Rule
from longspan.masks.spans import Spans as Spans
from longspan.masks.tables import Blocks as Blocks
from longspan.masks.tables import Dense as Dense
from longspan.masks.terms import Term as Term
from longspan.masks.terms import array as array
from longspan.masks.terms import member as member
from longspan.masks.terms import number as number
from longspan.masks.terms import position as position
from longspan.masks.terms import slot as slot
