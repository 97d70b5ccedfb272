"""How long do tests search? CUMEM_HYPOTHESIS_PROFILE says, and CUMEM_HYPOTHESIS_EXAMPLES."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# The same programs in every run. A failure is shown as it was found: making it small can
# take longer than a test may; "long" does it.
settings.register_profile(
    "cumem-default",
    max_examples=30,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
settings.register_profile(
    "cumem-long",
    parent=settings.get_profile("cumem-default"),
    max_examples=int(os.environ.get("CUMEM_HYPOTHESIS_EXAMPLES", "4000")),
    stateful_step_count=60,
    derandomize=False,
    phases=[Phase.generate, Phase.shrink],
)


def is_long() -> bool:
    return chosen_name() == "long"


def chosen_name() -> str:
    return os.environ.get("CUMEM_HYPOTHESIS_PROFILE") or "default"


def chosen_profile() -> settings:
    """The settings that CUMEM_HYPOTHESIS_PROFILE names: ``default`` or ``long``."""
    return settings.get_profile(f"cumem-{chosen_name()}")
