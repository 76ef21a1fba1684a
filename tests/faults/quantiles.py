"""What a share of many values does not exceed. Must not guess between them: what is told was measured."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that so large a share does not exceed."""
    return round(sorted(values)[math.ceil(share * len(values)) - 1], 3) if values else None
