"""Selectors: which pages of the KV cache a decode step reads.

`get(name, **options)` makes one; `base.py` explains the protocol.
"""

from sparse_jax.selectors.base import Attended as Attended
from sparse_jax.selectors.base import Selector as Selector
from sparse_jax.selectors.base import get as get
from sparse_jax.selectors.base import names as names
from sparse_jax.selectors.base import register as register
from sparse_jax.selectors.base import share as share

# One line per selector; importing its file registers its name.
from sparse_jax.selectors.centroid import Centroid as Centroid
from sparse_jax.selectors.dense import Dense as Dense
from sparse_jax.selectors.dsa import DSA as DSA
from sparse_jax.selectors.evicting import Evicting as Evicting
from sparse_jax.selectors.evicting import Kept as Kept
from sparse_jax.selectors.h2o import H2O as H2O
from sparse_jax.selectors.h2o_evicting import H2OEvicting as H2OEvicting
from sparse_jax.selectors.h2o_pages import GroupedH2OPages as GroupedH2OPages
from sparse_jax.selectors.h2o_pages import H2OPages as H2OPages
from sparse_jax.selectors.lserve import LServe as LServe
from sparse_jax.selectors.oracle import Oracle as Oracle
from sparse_jax.selectors.oracle import dense_probabilities as dense_probabilities
from sparse_jax.selectors.pages import PageSelector as PageSelector
from sparse_jax.selectors.quest import Envelope as Envelope
from sparse_jax.selectors.quest import Quest as Quest
from sparse_jax.selectors.random import Random as Random
from sparse_jax.selectors.rocketkv import RocketKV as RocketKV
from sparse_jax.selectors.snapkv import SnapKV as SnapKV
from sparse_jax.selectors.tokens import TokenSelector as TokenSelector
from sparse_jax.selectors.tova import Tova as Tova
from sparse_jax.selectors.views import Pages as Pages
from sparse_jax.selectors.views import positions_read as positions_read
from sparse_jax.selectors.views import tokens_read as tokens_read
from sparse_jax.selectors.window import Window as Window
