"""Recipes and demonstrations. Recipes import what is beside them, in a package as in a file that is started."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
