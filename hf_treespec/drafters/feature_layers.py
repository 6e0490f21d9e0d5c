"""Which decoder layers of a target feed a drafter."""

from __future__ import annotations


def spread_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """Target layers whose outputs feed a drafter of `count` layers (DFlash, arXiv 2602.06036, A.3).

    0-based decoder layers, spread evenly from the second to the third-to-last; the middle one for a single layer.

    Raises:
        ValueError: The target has too few layers for `count` different ones.
    """
    if count == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    ids = [round(first + index * (last - first) / (count - 1)) for index in range(count)]
    if len(set(ids)) != count or ids != sorted(ids):
        raise ValueError(
            f"{count} feature layers do not fit between layer {first} and layer {last} of a target with "
            f"{num_target_layers} layers; pass target_layer_ids explicitly."
        )
    return ids
