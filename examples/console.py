"""The former place of ``examples/demos/console.py``, for ``train_vision.py``."""

from examples.demos.console import ConsoleLogger, last_loss, say, say_memory, say_speed, steps_per_second

__all__ = ["ConsoleLogger", "last_loss", "say", "say_memory", "say_speed", "steps_per_second"]
