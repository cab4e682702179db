"""What is refused in one line, before processes meet."""


class BadInput(ValueError):
    """Its text is one line for the user: the flag or the file, what is wrong, a value that would work."""


def reject(wrong, text):
    if wrong:
        raise BadInput(text)
