"""The plain-jnp meaning of each operation.

A kernel must equal the function of its name here; documents point to this code.
"""

from sparse_jax.xla.h2o_accumulate import h2o_accumulate as h2o_accumulate
from sparse_jax.xla.indexer_scores import indexer_scores as indexer_scores
from sparse_jax.xla.merge_attention import merge_attention as merge_attention
from sparse_jax.xla.mla_sparse_attention import mla_sparse_attention as mla_sparse_attention
from sparse_jax.xla.page_bounds import page_bounds as page_bounds
from sparse_jax.xla.paged_attention import page_sparse_attention as page_sparse_attention
from sparse_jax.xla.paged_attention import paged_attention as paged_attention
from sparse_jax.xla.reference import reference_capture as reference_capture
from sparse_jax.xla.reference import reference_consume as reference_consume
from sparse_jax.xla.to_slots import compact as compact
from sparse_jax.xla.to_slots import to_slots as to_slots
from sparse_jax.xla.token_sparse_attention import token_sparse_attention as token_sparse_attention
from sparse_jax.xla.top_k import top_k as top_k
