"""The fixtures of e2e, for a tier that starts daemons too."""

from tests.e2e.conftest import start

__all__ = ["start"]
