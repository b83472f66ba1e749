"""The commands that are no stage: what looks at a run, and what starts one."""
