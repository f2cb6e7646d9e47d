"""Tools: commands and functions for users, beside a run.

- ``planner``: the command line, and ``plan`` and ``rates``. Begin with ``plan_command``.
- ``comparison``: ``check`` compares a module with plain Lightning; ``dial`` measures k and k'. Begin with ``check``.
- ``machine``: the properties of a machine that its speed depends on, for what both measure.

Tools may import all other folders. Nothing imports them except the registry and ``__main__``.
"""
