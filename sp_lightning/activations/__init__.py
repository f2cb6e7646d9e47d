"""What becomes of what autograd saves in the units' forwards.

``calls`` replaces the units' forwards while a step runs, and gives each call to its unit's mode (``modes``): keep it on the
device, recompute it in backward (``recompute``, with what ``snapshot`` and ``forward_state`` know of the forward), or
offload it to the host and back (``offload``). In come the modes by name and the calls; out go the forwards' outputs, and
what each call saved, in bytes.

``chunked_loss`` is for what is saved outside of all units: a language model's logits. It works without a strategy, too.

This wing may import ``device``, ``model``, ``plan``, ``observe`` and ``store``. It knows weights by their attributes alone.
"""
