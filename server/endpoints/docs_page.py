"""/docs: the interface as a page to read and to try. Its scripts are served from here, never from another host."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files
from pathlib import PurePosixPath

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.routes import DOCS_FILES
from inferd.server.playground.page import page_headers

_PACKAGE = "fastapi_swagger"
"""Carries the files of swagger-ui-dist. Only its files are used."""
_MEDIA = {".js": "text/javascript", ".css": "text/css", ".png": "image/png"}


async def page(request: Request) -> Response:
    """FastAPI's own page, with the addresses of our files, behind the prefix that a proxy removes. Its inline script is
    the only one that a browser runs."""
    prefix = request.scope.get("root_path", "")
    script, style, icon = (prefix + route.path for route in DOCS_FILES)
    answer = get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title="inferd",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )
    answer.headers.update(page_headers(*_hashes_of_scripts(bytes(answer.body))))
    return answer


async def file(request: Request) -> Response:
    """Raises `RequestError` if the package is not installed."""
    name = PurePosixPath(request.url.path)
    return Response(_content(name.name), media_type=_MEDIA[name.suffix], headers=page_headers())


def _hashes_of_scripts(page: bytes) -> list[str]:
    """Hashes of the inline scripts of a page. They differ by prefix."""
    scripts = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'" for script in scripts]


@functools.cache
def _content(name: str) -> bytes:
    try:
        return files(_PACKAGE).joinpath("resources", name).read_bytes()
    except ModuleNotFoundError as error:
        message = f"The files of this page are missing. Install them with `pip install {_PACKAGE.replace('_', '-')}`."
        raise RequestError("not_implemented", message) from error
