"""pyproject.toml says everything. This only refuses to build an empty wheel."""

from pathlib import Path

from setuptools import setup

for name in ("server", "engine", "kernels"):
    if not Path("inferd", name, "__init__.py").is_file():
        raise SystemExit(
            f"inferd/{name} has no __init__.py: it is to be a link to ../{name}. Check the repository out with links "
            "(git: core.symlinks=true), and copy the folders inferd, server, engine and kernels together."
        )
setup()
