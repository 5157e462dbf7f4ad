"""`DiskFull`: one error for a disk without space, however a library reports it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

FULL = (errno.ENOSPC, errno.EDQUOT)
MESSAGES = ("No space left on device", "Disk quota exceeded", "ENOSPC", "EDQUOT")


class DiskFull(OSError):
    """The disk is full, and the run stopped. Its last checkpoint is intact.

    Example:
        >>> from longspan import train
        >>> issubclass(train.DiskFull, OSError)
        True
    """


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns an error because of a full disk into `DiskFull`; `what` was being written."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise DiskFull(
            f"The disk is full: {what} could not be written. The last checkpoint is intact. Free some space and resume."
        ) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error or its cause says that there is no space."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(text in str(error) for text in MESSAGES) or is_full(error.__cause__) or is_full(error.__context__)
