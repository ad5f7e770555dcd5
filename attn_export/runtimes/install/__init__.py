"""Installation of the runtimes that pip alone does not bring."""


class InstallError(Exception):
    """Something cannot be installed; the message is one line with the remedy."""
