"""Who carries out the stages of `hacpo run` on other machines.

An executor (`orders.Executor`) runs one command line of hacpo somewhere and says how it ended; another kind is one
file beside `on_ray` and `on_slurm`, and a line in `far_workers.open_executor`. Nothing passes through it but that
order: inputs and outputs are files, atomic and seeded, so that carrying out an order twice is harmless.
"""
