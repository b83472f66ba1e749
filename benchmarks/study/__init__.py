"""The study of docs/protocol.md, from its sweeps to its pages: `make study`.

| module | what it does |
|---|---|
| `__main__` | the command: sweeps, collected files, learning rates, pages |
| `rates` | learning rates, chosen from tuning and written into the sweeps |
| `asked` | what is compared with what: hypotheses, and the tables of the page |
| `markdown` | the generated part of docs/results.md |
| `quick` | the same study in minutes, as a project of its own |
| `theory`, `cosine` | what the page says of Theorems 4.1 and 4.3; commands of their own |
| `known_accuracies`, `gradients` | what these two look at: simulated groups, and gradients of a run's updates |

Differences, intervals and verdicts are `hacpo.tools.compare`'s, and so is the page with figures.
"""
