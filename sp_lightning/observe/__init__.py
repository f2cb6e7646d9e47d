"""What a run reports: counters, sentences about them, and pictures.

``stats`` has the counters of a run and says what they mean, ``messages`` has what users read beside an error,
and ``plot`` draws a timeline or a range of windows with matplotlib, if that is installed. In come numbers, intervals
(``device.timeline``) and plans; out go text and files.

This wing may import ``device``, ``model`` and ``plan``.
"""
