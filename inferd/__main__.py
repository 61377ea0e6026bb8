"""`python -m inferd` is the command `inferd`."""

from inferd.server.cli import main

if __name__ == "__main__":
    main()
