"""Optim: the optimizer's steps on the host, whole or layer by layer.

``background`` runs the updates of layers while the next forward, or the rest of backward, goes on: on one device, and on several,
where the primary's thread works and the others wait for it. ``layerwise`` takes a step apart for it, if ``fused`` says that this
can be done; ``fused`` switches torch's fused kernels on for the time of a step, too. ``pieces`` makes one walk over memory of
widening, unscaling, clipping, stepping and casting. ``clipping`` measures norms while backward goes on, and leaves the
multiplication to the updates; ``scaler`` is the gradient scaler for the host. ``state_on_disk`` has the optimizer's state on a
disk; ``state_transfers`` reads its bytes ahead and writes them behind.

The user's optimizer and the layers (``weights``) come in. Updated weights on the host go out; whoever reads them waits for
them. The wing may import ``weights`` and the wings below. It knows the engine above as the protocol ``background.Updatable``.
"""
