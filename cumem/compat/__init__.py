"""How do users of other libraries move over? By changing one import.

:mod:`cumem.compat.torch_memory_saver` and :mod:`cumem.compat.vllm` have the names that
those libraries have, with their meanings; ``docs/migrating.md`` has the differences.
"""
