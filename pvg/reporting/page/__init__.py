"""The HTML page: one file that opens from disk, without network, in light and dark, and complete without JavaScript.

    from pvg.reporting.page.run_page import run_page
    write_atomic(path, run_page(directory, summary).encode())

`markup` makes safe HTML, `scales` numbers fit for axes, `charts` and `gantt` SVG; every other module makes the sections
of one kind of page, and `document` puts them into one file.
"""
