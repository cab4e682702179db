"""One idea a file, on top of parallel.py. Nothing here is needed by a layout that does not use it."""
