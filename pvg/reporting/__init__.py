"""Reports for people: terminal tables, HTML pages and the diagnosis of logs.

`run_summary`, `solutions` and `time_sections` read a run. `formats`, `table`, `charts` and `html` show data. All markup
is in templates/. `run_page`, `several_page` and `bench_page` are the pages; `terminal` prints reports on a terminal.
"""
