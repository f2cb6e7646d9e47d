"""Recipes and demonstrations. Recipes import `common` from their own folder, also when tests import them from this package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
