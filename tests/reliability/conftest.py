"""The fixtures of every reliability test."""

from driver_fixture import (  # noqa: F401 - pytest finds fixtures by name
    driver,
    emulator,
    no_look_at_sleeping_memory,
    short_collections,
)
