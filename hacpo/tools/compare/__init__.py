"""Groups of runs against each other: `hacpo compare`.

| module | what it does |
|---|---|
| `reading` | runs, sweeps and collected files as one frame of results |
| `grouping` | which runs are each other's repetitions, and in which settings groups differ |
| `curves` | a run's accuracy by what was spent, and numbers read off it, problem by problem |
| `comparing` | paired differences with intervals, corrected for their number, and a verdict on each |
| `compare_view` | the printed table, and JSON |
| `compare_page` | one HTML page |

Intervals are `hacpo.evaluation.bootstrap`'s, areas and equal budgets `hacpo.evaluation.budgets`'.
"""
