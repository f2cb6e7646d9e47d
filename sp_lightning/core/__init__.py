"""The core: it streams the layers of one module. It imports nothing of Lightning, and no capability.

From the ground up, each folder may import those before it:

- ``torch_compat``: private names of torch, and what depends on torch's version.
- ``device``: memory, streams, copies and waits; the only folder that touches the accelerator.
- ``model``: finds the layers of a module.
- ``plan``: which layer gets how much memory, and when optimizers step. No run is needed for this.
- ``observe``: the count of activations, and messages.
- ``store``: the memory of layers on the host.
- ``layers``: one layer on its way: slots, device parameters, writes, gradients.
- ``updates``: optimizer steps, whole or layer by layer.
- ``engine``: the schedule and the calls. **Begin here**: its page follows one layer through forward and backward.
"""
