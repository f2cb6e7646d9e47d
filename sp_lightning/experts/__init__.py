"""Uploads only the experts and the rows of embeddings that a batch uses.

No option: the layer search finds stacked experts (``stacks``) and embeddings that are looked up. ``expert_rows`` uploads the
experts that a router has chosen, and keeps recently used ones in an ``expert_cache``; ``embedding_rows`` uploads the rows of an
embedding that a batch looks up. Without this folder such layers are uploaded whole, with the same results.
"""
