"""Padding, as both patterns say it."""

import numpy as np


def padding_ids(is_token):
    """Ids for `Segments` under which tokens see each other, and padding neither sees nor is seen."""
    return is_token.astype(np.int32) - 1
