"""Running stages: the catalogue, one stage's invocation, the DVC files, the warm driver, and who may write when."""
