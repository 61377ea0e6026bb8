"""`inferd bench`."""

import typer

bench_app = typer.Typer(name="bench", help="Measure a running server.", no_args_is_help=True)


@bench_app.command("serve")
def bench_serve() -> None:
    """Load."""
