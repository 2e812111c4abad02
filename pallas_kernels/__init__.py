"""Pallas kernels of sparse_jax: arrays in, arrays out.

One file a kernel; `lowering.py` is the only one that names a backend.
"""

from pallas_kernels.config import Config as Config
from pallas_kernels.copy_pages import copy_pages as copy_pages
from pallas_kernels.h2o import h2o_accumulate as h2o_accumulate
from pallas_kernels.indexer_scores import indexer_scores as indexer_scores
from pallas_kernels.mla_sparse_decode import mla_sparse_decode as mla_sparse_decode
from pallas_kernels.page_bounds import page_bounds as page_bounds
from pallas_kernels.page_sparse_decode import page_sparse_decode as page_sparse_decode
from pallas_kernels.paged_decode import paged_decode as paged_decode
from pallas_kernels.reference_capture import reference_capture as reference_capture
from pallas_kernels.reference_consume import reference_consume as reference_consume
from pallas_kernels.token_sparse_decode import token_sparse_decode as token_sparse_decode
from pallas_kernels.top_k import top_k as top_k
