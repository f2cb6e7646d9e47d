"""The core: it streams the layers of one module. It imports nothing of Lightning, and no capability.

From the ground up, each folder may import those before it:

- ``torch_compat``: private names of torch, and what depends on torch's version.
- ``device``: memory, streams, copies and waits; the only folder that touches the accelerator.
- ``model``: finds the layers of a module.
- ``plan``: which layer gets how much memory, and when optimizers step. No run is needed for this.
- ``messages``: the log, notes on errors, and texts that several files raise.
- ``observe``: the count of activations.
- ``store``: the memory of layers on the host.
- ``weights``: weights on their way to the device and back: slots, device parameters, writes, gradients.
- ``updates``: all about optimizers: steps, whole or layer by layer, and clipping.
- ``engine``: the schedule and the calls. **Begin here**: its page follows one layer through forward and backward.
"""
