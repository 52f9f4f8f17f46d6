"""The order in which a block-diffusion model filled the tokens of one text."""

from collections.abc import Sequence

import numpy as np


def blocks(count: int, block_length: int, block_offset: int) -> np.ndarray:
    """i[count]: each token's block, the first token being at `block_offset` in block 0."""
    return (block_offset + np.arange(count)) // block_length


def passes_in_block(order: Sequence[int], block_length: int, block_offset: int = 0) -> list[int]:
    """Each token's pass counted from 1 inside its block, from passes counted over all the text."""
    order_L, block_L = np.asarray(order), blocks(len(order), block_length, block_offset)
    first_L = np.array([order_L[block_L == block].min() for block in block_L])
    return (order_L - first_L + 1).tolist()


def inversions(order: Sequence[int], block_length: int, block_offset: int = 0) -> int:
    """Pairs of tokens of one block of which the later was filled first; 0 = left to right."""
    order_L, block_L = np.asarray(order), blocks(len(order), block_length, block_offset)
    later_LL = np.tri(len(order), k=-1, dtype=bool)  # [i, j]: i is right of j
    same_LL = block_L[:, None] == block_L[None, :]
    return int((later_LL & same_LL & (order_L[:, None] < order_L[None, :])).sum())
