"""Property tests have no deadline: the machine has other work to do, and a time is no property."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
