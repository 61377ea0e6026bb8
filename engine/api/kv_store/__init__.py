"""Keys and values of computed prefixes in files of a directory, for later starts of the server.

`segment` is one file, `opening` the directory and its mark, `listing` what it holds. `directory` is for servers,
`upkeep` for the commands. This package knows neither tokens nor tensors: what it keeps are bytes, found by a key.
"""
