"""The core: it streams the layers of one module. It imports nothing of Lightning, and no capability.

**The contract.** User code is written for a module whose weights always have one memory. Here a weight has memory on the host,
and in a step also on the device. These seven rules say what user code may rely on. Everything in this folder serves one of
them. A *step* is one call of ``training_step`` and its backward, or of another loop's forward and backward.

1. In a step, ``module.weight`` is on the device, and right at every use. A parameter that user code captured earlier, for example
   in a list, stands for the same weight.
2. In a step, user code may write a weight in place, through ``.data`` that it took in this step, or by ``param.data = x``, which
   copies ``x``.
3. What user code takes from a weight in a step (``.data``, a view) is for that step. Its version counter is followed. If it is
   kept longer, it can still be read.
4. A graph whose weights, or their 16-bit copies, were written before its backward raises autograd's own in-place error.
5. A weight's shape and strides change between two batches only. Its dtype may also change in a step.
6. Between steps, all weights are ordinary memory on the host. ``param.data = x`` then has its usual meaning.
7. Other threads read the memory on the host. They do nothing else.

Code that breaks a rule gets an error before a result can differ, with a remedy. ``tests/equality/programs/contract.py`` breaks
each rule once. The exceptions, which no version counter shows, are the list "Not detected" in ``examples/guide/limits.md``.

**The way of a weight**, the question "who calls whom?"::

    a module is called, a stand-in is used, autograd unpacks a saved tensor, a gradient arrives        4 entries
      └▶ engine.Engine
           └▶ engine.schedule.Residency        which layer is in which slot, and which is fetched next
                └▶ weights.ring.Slots          the device memory, and the copies into it
                     └▶ device.device.Device   streams and waits
    optimizer.step ─▶ updates.updating.Updating ─▶ updates.background.BackgroundUpdates

**The folders**, from the ground up. Each may import those before it:

- ``torch_compat``: private names of torch, and what depends on torch's version.
- ``device``: memory, streams, copies and waits; the only folder that touches the accelerator.
- ``model``: finds the layers of a module.
- ``plan``: which layer gets how much memory, and when optimizers step. No run is needed for this.
- ``messages``: the log, notes on errors, and texts that several files raise.
- ``store``: the memory of layers on the host.
- ``weights``: weights on their way to the device and back: slots, device parameters, writes, gradients.
- ``updates``: all about optimizers: steps, whole or layer by layer, and clipping.
- ``engine``: the schedule and the calls. **Begin here**: its page follows one layer through forward and backward.
"""
