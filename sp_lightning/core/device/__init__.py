"""The device and its memory: the lowest folder of the engine.

``Device`` (synchronous copies, the CPU) and ``Accelerator`` (several streams) have one interface. The engine passes flat memory,
streams and waits. It gets copies, events, free and peak bytes, times (``timeline``) and counters (``stats``). ``layout``
describes where a parameter is in flat memory. ``lease`` detects whether tensors still use a slot's memory. ``host_memory`` is
page-locked memory for copies. ``background_thread`` and ``own_threads`` are the threads of a run; ``closing`` closes the parts of
a run.

Only ``accelerator`` touches the accelerator. This folder does not depend on models, layers or Lightning.
"""
