"""Models of packages that ship LightningModules, trained plain and streamed, each the way its package trains it.

``python -m tests.packages`` installs the packages into a venv of their own, trains every model of every file here several
times, and prints what differs. pytest does not run it, because the packages take a few GB. pytest runs the files
``test_…`` where their package is installed.

A file has ``REQUIRES``, what pip installs for it, and ``MODELS``, functions that train a model, by name. A function knows
nothing of the strategy, which :mod:`tests.packages.child` puts into every Trainer that is made.
"""
