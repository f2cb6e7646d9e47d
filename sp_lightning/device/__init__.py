"""The device and its memory: the lowest folder of the engine.

``Device`` (synchronous copies, the CPU) and ``Accelerator`` (three streams) are one interface. The engine passes flat memory and
names streams and waits; it gets copies, events, free and peak bytes, and times (``timeline``). ``layout`` says where a parameter
is in flat memory, ``lease`` whether somebody still holds memory that was handed out. ``host_memory`` is page-locked for copies.
``background_thread`` and ``own_threads`` are the threads of a run; ``closing`` closes what a run has opened.

Only ``accelerator`` touches the accelerator. This folder knows no model, no layer and no Lightning.
"""
