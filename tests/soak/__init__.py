"""The attack as a tool (docs/reliability.md): `python -m tests.soak` does to small real runs what disks, power
and other processes do, and compares what comes of it with an undisturbed run, byte by byte.

`frame` runs parts, `parts` lists them, `sandbox` makes the runs, `checks` says what must hold when one is finished.
"""
