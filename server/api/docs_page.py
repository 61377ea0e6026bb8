"""/docs: the interface as a page to read and to try. Its scripts are served from here, never from another host."""

from __future__ import annotations

import functools
from importlib.resources import files

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError

_PACKAGE = "fastapi_swagger"
"""Carries the files of swagger-ui-dist. Only its files are used."""
_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}


async def page(request: Request) -> Response:
    """FastAPI's own page, with the addresses of our files."""
    del request
    script, style, icon = (f"/docs/{name}" for name in _FILES)
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="inferd",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )


async def file(request: Request) -> Response:
    """Raises `RequestError` if the package is not installed."""
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404)
    return Response(_content(name), media_type=_FILES[name])


@functools.cache
def _content(name: str) -> bytes:
    try:
        return files(_PACKAGE).joinpath("resources", name).read_bytes()
    except ModuleNotFoundError as error:
        message = f"The files of this page are missing. Install them with `pip install {_PACKAGE.replace('_', '-')}`."
        raise RequestError("not_implemented", message) from error
