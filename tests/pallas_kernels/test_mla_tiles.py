"""Tiles of query rows that the kernel of sparse MLA chooses: usual head counts leave no row of a tile without work."""

import pytest

from pallas_kernels.mla_sparse_decode import resolve_mla


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("groups", [1, 8, 128])
@pytest.mark.parametrize("heads", [4, 8, 16, 32, 64, 128])
def test_tiles_divide_the_heads(heads, groups, packed):
    """Padding to 64 heads would be three quarters of the work at 16. Matrix units need 16."""
    launch = resolve_mla(None, groups=groups, rows=heads, chosen=2048, width=576, itemsize=2, packed=packed)
    assert launch.block_rows in (16, 32, 64)
    rows = -(-heads // launch.block_rows) * launch.block_rows
    assert rows == max(16, heads)
