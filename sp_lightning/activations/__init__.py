"""What becomes of what autograd saves in the units' forwards.

``calls`` runs each call of a unit in the unit's mode: keep what is saved on the device, compute it again in backward
(``recompute``, with the ``snapshot`` of what the forward found; ``once_only`` knows forwards that cannot run twice), or send
it to the host and back (``offload``). What is kept in a batch that was never measured is offloaded before device memory ends
(``headroom``). In come the modes by name and the calls; out go the forwards' outputs, and what each call saved, in bytes.

``chunked_loss`` is for what is saved outside of all units: a language model's logits. It works without a strategy, too.

This wing may import ``device``, ``model``, ``plan``, ``observe`` and ``store``. It knows weights by their attributes alone.
"""
