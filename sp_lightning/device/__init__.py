"""The ground floor: the device and its memory, and what torch keeps private.

``Device`` (synchronous copies, the CPU) and ``Accelerator`` (three streams) are the seam. The engine hands them flat
memory and names streams and waits; back come copies, events, free and peak bytes, and times (``timeline``). ``layout``
says where a parameter lies in flat memory, ``lease`` whether anybody still holds memory that was handed out. The
processes of several devices are ``ranks``: they wait for each other, say on a ``board`` where they are, and have
``shared_memory``. What they do by torch.distributed is in ``collectives``. ``rank_order`` is the order in which they add.
``patched`` knows which methods of an optimizer users have replaced, and tells the engine of a backward that fails.
``around_calls`` has code around calls of modules, of which the modules show nothing.
``host_memory`` is page-locked for copies.

Only ``accelerator`` touches the accelerator, and only ``torch_private`` uses names of torch that begin with an
underscore. This wing knows no model, no layer and no Lightning: it imports torch and nothing else of the package.
"""
