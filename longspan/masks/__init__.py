"""The mask algebra: rules for which query may attend to which key, composed with `&`, `|` and `~`.

A mask is one of the leaves (`Causal`, `Window`, `Segments`, …), a composition of masks, or your own rule:

- `Custom(fn)` is a function of positions, the shortest way to write a rule.
- A subclass of `Rule` defines `lower`, which returns a `Compare` of two terms or any other mask. A term is a number per
  token: `position`, `slot`, `array`, `number` or `member`. Such a rule skips tiles and runs natively.
- A subclass of `Mask` defines `allowed`, and optionally the bounds `classify`, `kv_spans` and `q_spans` (`Spans`).

Decorate subclasses with `rule`. In this package, `base` defines `Mask`, `sides` the arguments of a rule, `terms` and
`compare` the comparisons that most leaves are lowered to, `algebra` the compositions, and `cut` masks of some slots.

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
