"""Shows a run: tables and text on the terminal, and HTML pages that load nothing.

`run_summary`, `solutions` and `follow` read a run; `formats`, `table` and `charts` show it. templates/ has the markup.
"""
