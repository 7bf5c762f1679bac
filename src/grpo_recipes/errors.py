"""The one exception for mistakes that a user can mend."""


class UserError(Exception):
    """Bad input. The message names the place and the mend; no traceback is shown to the user.

    Args:
        message: what is wrong, in one sentence.
        where: the place: a dotted recipe key, a file, a command line argument.
        mend: what to do about it.
    """

    def __init__(self, message: str, *, where: str | None = None, mend: str | None = None) -> None:
        self.message, self.where, self.mend = message, where, mend
        place = f"{where}: " if where else ""
        advice = f"\n  -> {mend}" if mend else ""
        super().__init__(f"{place}{message}{advice}")
