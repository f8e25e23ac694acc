"""The one exception type that users are meant to read."""


class UserError(ValueError):
    """Something the user can mend: the message names the bad value and the way out, in one line.

    The command line prints it without a traceback and exits with code 2.
    """
