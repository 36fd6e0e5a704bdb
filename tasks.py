"""The tasks of Bakehouse for `invoke` in a checkout; `bakehouse/flags.py` declares them."""

from pathlib import Path

from bakehouse.program import make_tasks

namespace = make_tasks(Path(__file__).resolve().with_name("recipes"))
