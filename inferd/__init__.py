"""The import root. `server`, `engine` and `kernels` are links to the folders of the repository."""
