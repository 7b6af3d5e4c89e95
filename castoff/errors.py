"""Errors and warnings that castoff addresses to its users."""


class CastoffError(ValueError):
    """A request that castoff cannot serve: what was given, what is allowed, what to change.

    The command line prints the message and exits with status 2.
    """


class CastoffWarning(UserWarning):
    """Something the user should know, which does not stop the answer."""
