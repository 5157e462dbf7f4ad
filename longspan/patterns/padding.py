"""Padding as segment ids, for both patterns."""

import numpy as np


def padding_ids(is_token):
    """Ids for `Segments`: 0 for tokens, which attend to each other, and -1 for padding."""
    return is_token.astype(np.int32) - 1
