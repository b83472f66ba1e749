"""hacpo: heterogeneous agents learn the same verifiable task from each other's rollouts (HACPO, arXiv 2603.02604)."""

__version__ = "0.1.0"
