"""Headers of the server's web pages and their files. A browser enforces them. This file knows no page.

No page may load anything from another host, and no site may show a page in a frame: it could lay something over its
buttons, and have a visitor press them unknowingly.
"""

from __future__ import annotations


def policy(*scripts: str) -> str:
    """The Content-Security-Policy of a page. `scripts`: hashes of its inline scripts, as the policy writes them."""
    allowed = " ".join(("'self'", *scripts))
    return (
        f"default-src 'none'; script-src {allowed}; worker-src 'self'; style-src 'self'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def page_headers(*scripts: str) -> dict[str, str]:
    """All headers of a page. `scripts` as in `policy`."""
    return {
        "Content-Security-Policy": policy(*scripts),
        "X-Frame-Options": "DENY",  # for browsers that do not read frame-ancestors
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
