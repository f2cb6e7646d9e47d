"""Every decision that is taken before a step runs, and the numbers that follow from it.

``options`` checks what the user asks for. ``plan`` gives every layer its place in memory and its slots (``rings``), and
``activation_policy`` gives every unit its mode; ``ledger`` and ``host_memory`` count what the host needs and has. In come
the layers that were found and the options; out come frozen objects. Nothing here moves or allocates memory.

This wing may import ``device`` and ``model``.
"""
