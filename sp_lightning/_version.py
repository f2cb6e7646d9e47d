__version__ = "0.1.0"
TESTED_TORCH = ("2.10", "2.15")
"""The oldest and the newest torch that the tests have run with (``.ci/versions``)."""
