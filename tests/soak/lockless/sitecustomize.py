"""A filesystem that takes locks and does nothing, for every interpreter that has this folder on its path."""

import fcntl

fcntl.flock = lambda *_: None
