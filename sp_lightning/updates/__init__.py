"""Optim: the optimizer's steps on the host, whole or layer by layer.

``background`` runs the updates of layers while the next forward, or the rest of backward, goes on: on one device, and on several,
where the primary's thread works and the others wait for it. ``fused`` says which steps run fused, and which can be taken apart
by layers; ``like_gpu`` says which have the bits of a GPU. ``pieces`` makes one walk over memory of widening, unscaling, clipping,
stepping and casting. ``scaler`` is the gradient scaler for the host.

The user's optimizer and the layers (``weights``) come in. Updated weights on the host go out; code that reads them waits for
them. The wing may import ``weights`` and the wings below. What takes a step apart is the engine's ``layerwise``.
"""
