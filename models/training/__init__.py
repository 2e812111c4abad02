"""What `models.train` is made of: corpora and batches, recipe, objective and optimiser, quality and the model card.

This file imports nothing: the processes that make batches must start without JAX.
"""
