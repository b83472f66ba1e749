"""Running stages: where a run lives, one stage's invocation, the DVC files, and the warm driver behind `hacpo run`."""
