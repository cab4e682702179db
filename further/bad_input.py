"""What is refused in one line, before processes meet."""

import contextlib
import os


class BadInput(ValueError):
    """Its text is one line for the user: the flag or the file, what is wrong, a value that would work."""


def reject(wrong, text):
    if wrong:
        raise BadInput(text)


@contextlib.contextmanager
def writable(folder, name):
    """Make the folder that flag `name` asks for. BadInput if that fails, or what is written inside."""
    try:
        os.makedirs(folder, exist_ok=True)
        yield
    except OSError as error:
        raise BadInput(f"{name} {folder}: {error.strerror}; name a folder that can be written") from None
