"""How does a serving process decide what sleeps and what wakes?"""

from cumem.serving.host import HostStatus, ModelHost, ModelStatus

__all__ = ["HostStatus", "ModelHost", "ModelStatus"]
