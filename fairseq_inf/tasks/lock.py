"""One training at a time in a folder."""

import fcntl
import logging
import os
import socket

logger = logging.getLogger(__name__)

FILE = "training.lock"


def lock(save_dir):
    """Hold the folder until this process ends, be it by a kill.  A record lock, because processes
    that are forked do not keep it.  -> what holds it, to be kept"""
    path = os.path.join(save_dir, FILE)
    file = open(path, "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise ValueError(
            f"--save-dir {save_dir} is in use by another training ({file.read().strip()}): "
            "name another folder, or end that one"
        ) from None
    except OSError as error:
        logger.warning(
            f"--save-dir {save_dir} cannot be locked ({error.strerror}): see that no other "
            "training uses it"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
