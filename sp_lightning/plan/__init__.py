"""Every decision that is taken before a step runs, and the numbers that follow from it.

``options`` checks what the user asks for. ``plan`` gives every layer its place in memory and its slots (``rings``).
``ledger`` and ``host_memory`` count the host memory that is needed and free. Input: the layers that were found, and the options.
Output: frozen objects. Nothing here moves or allocates memory.

This wing may import ``device`` and ``model``.
"""
