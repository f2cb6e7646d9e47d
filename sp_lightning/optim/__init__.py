"""Optim: the optimizer's steps on the host, whole or layer by layer.

``background`` runs the updates of layers while the next forward, or the rest of backward, goes on. ``layerwise`` takes a step
apart for it, if it is fused or ``separable``; ``pieces`` makes one walk over memory of widening, unscaling, clipping, stepping
and casting. ``clipping`` measures norms while backward goes on, and leaves the multiplication to the updates.
``shared_updates`` are those of several ranks: the primary's thread works, the others wait for it. ``fused`` switches torch's
fused kernels on for the time of a step; ``scaler`` is the gradient scaler for the host.

The user's optimizer and the layers (``weights``) come in. Updated weights on the host go out; whoever reads them waits for
them. The wing may import ``weights`` and the wings below. It knows the engine above as the protocol ``Updatable``, and the
place of an optimizer's state as the protocol ``OptimizerState`` (``updatable`` has both). ``state_on_disk`` is such a place,
whose bytes ``state_transfers`` reads ahead and writes behind; ``state_waits`` is what users find while updates are under way.
"""
