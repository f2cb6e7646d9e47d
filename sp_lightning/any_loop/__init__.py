"""Capability: streams a module in a loop without Lightning's Trainer.

- ``stream`` translates the events of any loop (a call of the root module, a backward, an optimizer's step) into the calls of a
  :class:`~sp_lightning.trainer.run.Run`, which the strategy makes for Lightning's events.
- ``words`` says errors and log lines in the words of a loop.
- ``transformers_trainer`` calls ``stream`` where transformers' Trainer begins and ends.

**Without this folder**, ``sp_lightning.stream`` and ``sp_lightning.StreamedTrainer`` are errors.
"""
