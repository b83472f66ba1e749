"""The report of a run: one self-contained HTML page, a small metrics file and the held-out curves.

| module | what it does |
|---|---|
| `collect` | reads the tables and metrics files into `Measurements`: plain numbers by step and agent |
| `facts` | what ran: agents, problem sets, settings and how they differ from the recipe |
| `browser` | the rollouts that the page embeds, within a byte budget |
| `scales` | axes, ticks and how numbers are written |
| `charts` | line and bar charts as inline SVG with a table of the same numbers |
| `panels`, `figures`, `ratio_figures`, `reward_figures` | which lines, bands and bars each figure shows |
| `held_out` | held-out results: cards, agents by benchmarks, every number with its error |
| `html_tables`, `checks` | the other tables of numbers, and the questions that decide whether a run can be trusted |
| `markup` | the templates: `template.html`, the page, and `parts.html`, its pieces; all values are escaped there |
| `page` | puts everything into `template.html` |
| `summary` | metrics.json and curves.csv |

The prose of the page is in the templates and `captions.toml`, its looks in `report.css`, its behaviour in
`report.js`.
"""
