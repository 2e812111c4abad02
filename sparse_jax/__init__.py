"""Sparse decode attention for JAX: paged, functional, jit-compiled, with Pallas kernels for NVIDIA GPUs."""

from pallas_kernels import Config as Config
from sparse_jax import compaction as compaction
from sparse_jax import paging as paging
from sparse_jax import reference_store as reference_store
from sparse_jax import selectors as selectors
from sparse_jax.attention import page_sparse_attention as page_sparse_attention
from sparse_jax.attention import paged_attention as paged_attention
from sparse_jax.attention import token_sparse_attention as token_sparse_attention
from sparse_jax.attention_call import AttentionOutput as AttentionOutput
from sparse_jax.h2o import h2o_accumulate as h2o_accumulate
from sparse_jax.latent import indexer_scores as indexer_scores
from sparse_jax.latent import mla_sparse_attention as mla_sparse_attention
from sparse_jax.ops import merge_attention as merge_attention
from sparse_jax.ops import retained_count as retained_count
from sparse_jax.ops import to_slots as to_slots
from sparse_jax.ops import top_k as top_k
from sparse_jax.reference import Reference as Reference
from sparse_jax.reference import reference_capture as reference_capture
from sparse_jax.reference import reference_consume as reference_consume
from sparse_jax.reference import retained_counts as retained_counts
from sparse_jax.tuning import Tuning as Tuning
from sparse_jax.tuning import TuningWarning as TuningWarning
from sparse_jax.tuning import load_tuning as load_tuning
from sparse_jax.validation import checked as checked
