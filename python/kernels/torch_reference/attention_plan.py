"""Which query tiles one step's attention computes, and which keys each of them reads.

Host-side index arithmetic only; `attention.py` does the mathematics and explains the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import StepInputs
from trunkline.kernels.torch_reference.kv_pool import TorchKvPool

BLOCK = 128
ROW_MULTIPLE = 8
CHUNK_ELEMENTS = 1 << 20  # largest temporary of one product: what stays in cache

IndexArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of attention, and the query tokens per tile whose products are proven invariant."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tile_tokens: tuple[int, ...]  # ascending; tiles never cross a multiple of BLOCK

    def num_rows(self, tile_tokens: int) -> int:
        """Query rows of a tile: heads that share keys x tokens, padded."""
        rows = self.num_heads // self.num_kv_heads * tile_tokens
        return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE

    def block_elements(self, tile_tokens: int) -> int:
        """Elements of the largest temporary per tile and block."""
        return self.num_kv_heads * BLOCK * max(self.num_rows(tile_tokens), self.head_dim)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive blocks of a group's first `num_tiles` tiles."""

    num_tiles: int
    num_blocks: int
    pages: torch.Tensor  # [tiles * blocks * pages per block] int64
    masked_from: int  # the first tile that `mask` is for
    mask: torch.Tensor | None  # [masked tiles, blocks, rows or 1, BLOCK] bool, True: hidden
    stale: torch.Tensor | None  # flat key positions in these pages that are not the row's


@dataclass(frozen=True, slots=True)
class Group:
    """Query tiles of one height, most blocks first."""

    num_tiles: int
    num_rows: int
    tile_tokens: int
    token_index: torch.Tensor  # [tiles * tokens] int64; padding repeats the tile's last token
    kept: torch.Tensor  # entries of token_index that are not padding
    kept_tokens: torch.Tensor  # their flat tokens
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class _Tile:
    row: int
    first_token: int  # flat
    first_position: int
    num_tokens: int
    first_block: int
    num_blocks: int


class AttentionPlan:
    """One step's tiles for one window, shared by all layers that have it."""

    def __init__(self, step: StepInputs, window: int | None, heads: HeadShape) -> None:
        self._step = step
        self._window = window
        self._heads = heads
        self._pool: TorchKvPool = step.kv
        self._kv_lens = step.computed_lens + step.query_lens
        self.groups = [self._group(height, tiles) for height, tiles in self._by_height()]

    def _tiles(self) -> list[_Tile]:
        tiles = []
        flat = 0
        lengths = zip(
            self._step.computed_lens.tolist(), self._step.query_lens.tolist(), strict=True
        )
        for row, (start, length) in enumerate(lengths):
            position = start
            while position < start + length:
                end = min(start + length, (position // BLOCK + 1) * BLOCK)
                end = min(end, position + self._heads.tile_tokens[-1])
                first = 0 if self._window is None else max(0, position - self._window + 1) // BLOCK
                tiles.append(
                    _Tile(
                        row=row,
                        first_token=flat + position - start,
                        first_position=position,
                        num_tokens=end - position,
                        first_block=first,
                        num_blocks=(end - 1) // BLOCK + 1 - first,
                    )
                )
                position = end
            flat += length
        return tiles

    def _by_height(self) -> list[tuple[int, list[_Tile]]]:
        by_height: dict[int, list[_Tile]] = {}
        for tile in sorted(self._tiles(), key=lambda tile: -tile.num_blocks):
            height = next(h for h in self._heads.tile_tokens if h >= tile.num_tokens)
            by_height.setdefault(height, []).append(tile)
        groups = []
        for height, tiles in by_height.items():
            most = max(1, CHUNK_ELEMENTS // self._heads.block_elements(height))
            groups += [(height, tiles[i : i + most]) for i in range(0, len(tiles), most)]
        return groups

    def _group(self, tile_tokens: int, tiles: list[_Tile]) -> Group:
        offsets = np.arange(tile_tokens)
        lengths = np.array([tile.num_tokens for tile in tiles])[:, None]
        within = np.minimum(offsets, lengths - 1)  # [tiles, tokens]
        tokens = (np.array([tile.first_token for tile in tiles])[:, None] + within).reshape(-1)
        positions = np.array([tile.first_position for tile in tiles])[:, None] + within
        num_rows = self._heads.num_rows(tile_tokens)
        if tile_tokens > 1:
            positions = positions[:, np.arange(num_rows) % tile_tokens]
        kept = np.flatnonzero(offsets < lengths)
        return Group(
            num_tiles=len(tiles),
            num_rows=num_rows,
            tile_tokens=tile_tokens,
            token_index=self._tensor(tokens),
            kept=self._tensor(kept),
            kept_tokens=self._tensor(tokens[kept]),
            chunks=self._chunks(tile_tokens, tiles, positions),
        )

    def _chunks(self, tile_tokens: int, tiles: list[_Tile], positions: IndexArray) -> list[Chunk]:
        chunks = []
        block = 0
        while block < tiles[0].num_blocks:
            active = sum(tile.num_blocks > block for tile in tiles)
            budget = CHUNK_ELEMENTS // (active * self._heads.block_elements(tile_tokens))
            count = max(1, min(budget, tiles[0].num_blocks - block))
            chunks.append(self._chunk(tiles[:active], positions[:active], block, count))
            block += count
        return chunks

    def _chunk(self, tiles: list[_Tile], positions: IndexArray, block: int, count: int) -> Chunk:
        first = np.array([tile.first_block for tile in tiles]) + block
        starts = (first[:, None] + np.arange(count)) * BLOCK
        keys = starts[:, :, None] + np.arange(BLOCK)  # [tiles, blocks, BLOCK]
        masked_from, mask = self._mask(keys, positions)
        rows = np.array([tile.row for tile in tiles])[:, None, None]
        size = self._pool.spec.page_size
        page_keys = keys[:, :, ::size]  # [tiles, blocks, pages per block]
        used = page_keys < self._kv_lens[rows]
        columns = np.where(used, page_keys // size, 0)
        pages = np.where(used, self._step.page_tables[rows, columns], 0)
        stale = np.flatnonzero((keys >= self._kv_lens[rows]) & used.repeat(size, axis=2))
        return Chunk(
            num_tiles=len(tiles),
            num_blocks=count,
            pages=self._tensor(pages.reshape(-1)),
            masked_from=masked_from,
            mask=mask,
            stale=self._tensor(stale) if stale.size else None,
        )

    def _mask(self, keys: IndexArray, positions: IndexArray) -> tuple[int, torch.Tensor | None]:
        partly = keys[:, -1, -1] > positions.min(axis=1)
        if self._window is not None:
            partly |= keys[:, 0, 0] <= positions.max(axis=1) - self._window
        if not partly.any():
            return 0, None
        masked_from = int(partly.argmax())
        keys = keys[masked_from:, :, None, :]
        positions = positions[masked_from:, None, :, None]
        hidden = keys > positions
        if self._window is not None:
            hidden |= keys <= positions - self._window
        return masked_from, torch.from_numpy(hidden).to(self._pool.data.device)

    def _tensor(self, array: IndexArray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._pool.data.device)
